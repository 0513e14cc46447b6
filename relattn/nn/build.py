"""Attention and position encodings by name: the only look-up."""

from __future__ import annotations

import functools

from relattn import spec
from relattn.nn import attention as attentions
from relattn.nn import (
    gated_positional,
    gates,
    learned_relu_attention,
    learned_rotations,
    linformer,
    offset_biases,
    positions,
    random_feature_attention,
    relative_positions,
    routing,
    translution,
)

ATTENTIONS = {
    "softmax": attentions.SoftmaxAttention,
    "favor": random_feature_attention.FavorAttention,
    "relu": learned_relu_attention.LearnedReluAttention,
    "banded": random_feature_attention.BandedAttention,
    "gated_positional": gated_positional.GatedPositionalAttention,
    "translution": translution.TranslutionAttention,
    "lor_translution": translution.LorTranslutionAttention,
    "linformer": linformer.LinformerAttention,
    "routing": routing.RoutingAttention,
}

POSITIONS = {
    "none": positions.NoPosition,
    "learned": positions.Learned,
    "sincos": positions.Sincos,
    "learnable_sincos": positions.LearnableSincos,
    "constrained_sincos": positions.ConstrainedSincos,
    "relative_key": relative_positions.RelativeKey,
    "relative_value": relative_positions.RelativeValue,
    "relative_bias": relative_positions.RelativeBias,
    "t5_bias": offset_biases.T5Bias,
    "sincos_bias": offset_biases.SincosBias,
    "fourier_bias": offset_biases.FourierBias,
    "rope1d": relative_positions.Rope1d,
    "rope2d": relative_positions.Rope2d,
    "rope2d_mixed": learned_rotations.Rope2dMixed,
    "cayley_string": learned_rotations.CayleyString,
    "circulant_string": learned_rotations.CirculantString,
    "irpe_gate": gates.IrpeGate,
    "string_gate": gates.StringGate,
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
        position: Spec of an entry of `POSITIONS`, ``"constrained_sincos"``, or a sum of
            such specs, ``"learned + rope2d"``, of which one at most acts elsewhere than
            at the site ``tokens``.
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
    make_position = _resolve_position(position, attention, make_attention.func.sites)
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


def _resolve_position(
    position: str, attention: str, sites: tuple[str, ...]
) -> functools.partial:
    """The constructor of a position, or of a sum, that the attention honours."""
    makers = [
        spec.resolve(term, POSITIONS, "position", _RESERVED)
        for term in spec.terms(position)
    ]
    for term, make in zip(spec.terms(position), makers, strict=True):
        if make.func.site not in sites:
            fitting = [name for name, entry in POSITIONS.items() if entry.site in sites]
            raise ValueError(
                f"position {term!r} acts at the site {make.func.site!r}, which "
                f"attention {attention!r} does not honour; it takes position "
                f"{', '.join(fitting)}"
            )
    if len(makers) == 1:
        return makers[0]
    others = [make for make in makers if make.func.site not in ("none", "tokens")]
    if len(others) > 1:
        raise ValueError(
            f"position {position!r} has {len(others)} terms that reach the attention; "
            "a sum takes one, and any number that are added to the tokens"
        )
    return functools.partial(positions.PositionSum, makers=tuple(makers))
