"""Attention and position encodings by name: the only look-up."""

from __future__ import annotations

import functools

from relattn import spec
from relattn.nn import attention as attentions
from relattn.nn import positions, random_feature_attention, translution

ATTENTIONS = {
    "softmax": attentions.SoftmaxAttention,
    "favor": random_feature_attention.FavorAttention,
    "banded": random_feature_attention.BandedAttention,
    "translution": translution.TranslutionAttention,
    "lor_translution": translution.LorTranslutionAttention,
}

POSITIONS = {
    "none": positions.NoPosition,
    "learnable_sincos": positions.LearnableSincos,
    "constrained_sincos": positions.ConstrainedSincos,
}

# What the model decides, not the spec.
_RESERVED = ("dim", "heads", "layer", "num_layers", "qkv_bias", "causal")
_RESERVED += ("dtype", "parent", "name", "args", "kwargs")


def build(
    attention: str,
    position: str,
    *,
    dim: int,
    heads: int,
    num_layers: int,
    causal: bool = False,
) -> tuple[functools.partial, functools.partial]:
    """Resolves the specs of an attention and a position, and checks that they fit.

    Args:
        attention: Spec of an entry of `ATTENTIONS`, ``"favor(num_features=256)"``.
        position: Spec of an entry of `POSITIONS`, ``"constrained_sincos"``.
        dim: Width of the tokens.
        heads: Number of heads.
        num_layers: Number of layers.
        causal: Whether a token attends to itself and those before it only.

    Returns:
        A constructor of the layers' attention (give it ``layer``) and one of the
        model's position encoding.

    Raises:
        ValueError: If a name or an option does not exist, the sizes do not fit, the
            attention does not honour the site of the position, or has no causal form.

    Example:
        >>> attention, position = build(
        ...     "favor", "learnable_sincos", dim=8, heads=2, num_layers=1)
        >>> attention(layer=0).heads
        2
    """
    make_attention = spec.resolve(attention, ATTENTIONS, "attention", _RESERVED)
    make_position = spec.resolve(position, POSITIONS, "position", _RESERVED)
    site, sites = make_position.func.site, make_attention.func.sites
    if site not in sites:
        fitting = [name for name, entry in POSITIONS.items() if entry.site in sites]
        raise ValueError(
            f"position {position!r} acts at the site {site!r}, which attention "
            f"{attention!r} does not honour; it takes position {', '.join(fitting)}"
        )
    if causal and not make_attention.func.has_causal_form:
        fitting = [name for name, entry in ATTENTIONS.items() if entry.has_causal_form]
        raise ValueError(
            f"attention {attention!r} has no causal form; choose from "
            f"{', '.join(fitting)}"
        )
    make_attention.func.check(dim, heads, **make_attention.keywords)
    make_position = functools.partial(
        make_position, dim=dim, heads=heads, num_layers=num_layers
    )
    make_attention = functools.partial(
        make_attention, dim=dim, heads=heads, causal=causal
    )
    return make_attention, make_position
