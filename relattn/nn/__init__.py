"""Flax modules: attentions and position encodings, with their parameters.

`ATTENTIONS` and `POSITIONS` list all by name; `build` looks them up.
"""

from relattn.nn.attention import Context as Context
from relattn.nn.attention import MultiHeadAttention as MultiHeadAttention
from relattn.nn.compat import attention_fn as attention_fn
from relattn.nn.compat import dot_product_attention as dot_product_attention
from relattn.nn.compat import split_attention_mask as split_attention_mask
from relattn.nn.positions.base import LayerPosition as LayerPosition
from relattn.nn.positions.base import Position as Position
from relattn.nn.registry import ATTENTIONS as ATTENTIONS
from relattn.nn.registry import POSITIONS as POSITIONS
from relattn.nn.registry import build as build
from relattn.nn.registry import register_attention as register_attention
from relattn.nn.registry import register_position as register_position
