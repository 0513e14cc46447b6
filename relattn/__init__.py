"""Relative and linear attention in JAX and Flax.

These are the most used names. The others are in the packages `relattn.kernels`,
`relattn.nn` and `relattn.models` and, with the extra ``train``, in `relattn.data`,
`relattn.training` and `relattn.evaluation`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from relattn import kernels as kernels
from relattn import models as models
from relattn import nn as nn
from relattn import offsets as offsets
from relattn.kernels import CausalOffsets as CausalOffsets
from relattn.kernels import Offsets as Offsets
from relattn.kernels import banded_attention as banded_attention
from relattn.kernels import causal_linear_attention as causal_linear_attention
from relattn.kernels import draw_orthogonal as draw_orthogonal
from relattn.kernels import linear_attention as linear_attention
from relattn.kernels import lor_translution as lor_translution
from relattn.kernels import positive_features as positive_features
from relattn.kernels import redraw as redraw
from relattn.kernels import relative_attention as relative_attention
from relattn.kernels import relu_features as relu_features
from relattn.kernels import rotary_angles as rotary_angles
from relattn.kernels import rotate as rotate
from relattn.kernels import softmax_attention as softmax_attention
from relattn.kernels import toeplitz_linear_attention as toeplitz_linear_attention
from relattn.kernels import translution as translution
from relattn.kernels import trigonometric_features as trigonometric_features
from relattn.models import GPT as GPT
from relattn.models import Performer as Performer
from relattn.models import ViT as ViT
from relattn.models import build_model as build_model
from relattn.models import generate as generate
from relattn.models import register_model as register_model
from relattn.models.pretrained import load_pretrained as load_pretrained
from relattn.nn import LayerPosition as LayerPosition
from relattn.nn import MultiHeadAttention as MultiHeadAttention
from relattn.nn import Position as Position
from relattn.nn import attention_fn as attention_fn
from relattn.nn import dot_product_attention as dot_product_attention
from relattn.nn import register_attention as register_attention
from relattn.nn import register_position as register_position
from relattn.nn import split_attention_mask as split_attention_mask
from relattn.offsets import Torus as Torus

if TYPE_CHECKING:
    from relattn import data as data
    from relattn import evaluation as evaluation
    from relattn import training as training
    from relattn.data import register_data as register_data
    from relattn.training import load_run as load_run
    from relattn.training import train_and_evaluate as train_and_evaluate

__version__ = "0.1.0.dev0"

# Imported on first use: they need the extra `train`, and Orbax, Grain and TFDS take
# almost as long to import as JAX and Flax.
_PACKAGES = ("data", "evaluation", "training")
_FUNCTIONS = {
    "load_run": "relattn.training",
    "register_data": "relattn.data",
    "train_and_evaluate": "relattn.training",
}


# Hidden from type checkers, which would accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return importlib.import_module(f"relattn.{name}")
        if name in _FUNCTIONS:
            return getattr(importlib.import_module(_FUNCTIONS[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_FUNCTIONS})
