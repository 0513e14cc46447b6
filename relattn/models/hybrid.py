"""What ViT and GPT share: their named sizes, and the attention of every layer."""

from __future__ import annotations

import functools

from relattn.nn.build import build

# Translution, table 1.
SIZES = {
    "A": {"num_layers": 6, "dim": 192, "heads": 3, "mlp_dim": 768},
    "B": {"num_layers": 12, "dim": 192, "heads": 3, "mlp_dim": 768},
    "C": {"num_layers": 12, "dim": 384, "heads": 6, "mlp_dim": 1536},
}


def hybrid(
    attention: str,
    position: str,
    *,
    dim: int,
    heads: int,
    num_layers: int,
    num_relative_layers: int = 0,
    qkv_bias: bool = False,
    causal: bool = False,
) -> tuple[list[functools.partial], functools.partial]:
    """The attention of every layer: the first of one kind, the rest softmax.

    Args:
        attention: Spec of the first layers' attention.
        position: Spec of the position encoding.
        dim: Width of the tokens.
        heads: Number of heads.
        num_layers: Number of layers.
        num_relative_layers: How many layers use ``attention``; 0 for all.
        qkv_bias: Whether queries, keys and values have a bias.
        causal: Whether a token attends to itself and earlier tokens only.

    Returns:
        A constructor of an attention for each layer, and one of the position encoding.

    Raises:
        ValueError: If `relattn.nn.build.build` refuses, or there are more relative
            layers than layers.

    Example:
        >>> attentions, _ = hybrid("lor_translution", "none", dim=8, heads=2,
        ...                        num_layers=3, num_relative_layers=1)
        >>> [attention.func.__name__ for attention in attentions]
        ['LorTranslutionAttention', 'SoftmaxAttention', 'SoftmaxAttention']
    """
    if not 0 <= num_relative_layers <= num_layers:
        raise ValueError(
            "config.model.num_relative_layers must be from 0 (all layers) to "
            f"config.model.num_layers={num_layers}, got {num_relative_layers}"
        )
    make = functools.partial(
        build, dim=dim, heads=heads, num_layers=num_layers, causal=causal
    )
    first, make_position = make(attention, position)
    first = functools.partial(first, qkv_bias=qkv_bias)
    num_first = num_relative_layers or num_layers
    attentions = [first] * num_first
    if num_first < num_layers:
        rest, _ = make("softmax", position)
        rest = functools.partial(rest, qkv_bias=qkv_bias)
        attentions += [rest] * (num_layers - num_first)
    return attentions, make_position
