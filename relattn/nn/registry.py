"""Attentions and position encodings by name: the only look-up.

A model resolves the specs of its configuration here: by `layer_attentions` for all
layers, or by `build` for one kind. To add an attention or a position encoding, add its
class to `ATTENTIONS` or `POSITIONS`; from outside relattn, call `register_attention` or
`register_position`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from relattn import spec
from relattn.messages import check_choice, shorten
from relattn.nn.attention import MultiHeadAttention
from relattn.nn.gated_positional import GatedPositionalAttention
from relattn.nn.linear_attention import (
    BandedAttention,
    FavorAttention,
    HedgehogAttention,
    LearnedReluAttention,
)
from relattn.nn.linformer import LinformerAttention
from relattn.nn.positions import base, bias, fourier, gates, relative, rotary, sincos
from relattn.nn.routing import RoutingAttention
from relattn.nn.softmax_attention import SoftmaxAttention
from relattn.nn.translution import LorTranslutionAttention, TranslutionAttention

ATTENTIONS: dict[str, type[MultiHeadAttention]] = {
    "softmax": SoftmaxAttention,
    "favor": FavorAttention,
    "relu": LearnedReluAttention,
    "hedgehog": HedgehogAttention,
    "banded": BandedAttention,
    "gated_positional": GatedPositionalAttention,
    "translution": TranslutionAttention,
    "lor_translution": LorTranslutionAttention,
    "linformer": LinformerAttention,
    "routing": RoutingAttention,
}

POSITIONS: dict[str, type[base.Position]] = {
    "none": base.NoPosition,
    "learned": sincos.Learned,
    "sincos": sincos.Sincos,
    "learnable_sincos": sincos.LearnableSincos,
    "constrained_sincos": sincos.ConstrainedSincos,
    "relative_key": relative.RelativeKey,
    "relative_value": relative.RelativeValue,
    "relative_bias": relative.RelativeBias,
    "t5_bias": bias.T5Bias,
    "alibi": bias.Alibi,
    "sincos_bias": bias.SincosBias,
    "fourier_bias": bias.FourierBias,
    "rope1d": rotary.Rope1d,
    "rope2d": rotary.Rope2d,
    "rope2d_mixed": rotary.Rope2dMixed,
    "cayley_string": rotary.CayleyString,
    "circulant_string": rotary.CirculantString,
    "irpe_gate": gates.IrpeGate,
    "string_gate": gates.StringGate,
    "rotary_values": rotary.RotaryValues,
    "fourier_values": fourier.FourierValues,
    "fourier_scores": fourier.FourierScores,
    "fourier_mask": fourier.FourierMask,
}

# The entries above; users register others.
BUILT_IN = frozenset({*ATTENTIONS, *POSITIONS})

# The model sets these attributes, not the spec.
SET_BY_MODEL = {
    field.name
    for module in (MultiHeadAttention, base.Position)
    for field in dataclasses.fields(module)
}


def register_attention(name: str, module: type) -> None:
    """Registers a user-defined attention under a name, for models and configurations.

    The attributes of the class are options of the spec: ``"cosine(scale=20.0)"``. A run
    that was trained with the attention loads only where it is registered.

    Args:
        name: A Python identifier that names no attention or position of relattn. A
            second call with the same name replaces the first.
        module: A subclass of `relattn.MultiHeadAttention`.

    Raises:
        ValueError: If relattn uses the name, or it is not a Python identifier, or
            the class defines neither ``attend`` nor ``mix``, or names an unknown site.
        TypeError: If ``module`` is not such a subclass.

    Example:
        >>> import jax, jax.numpy as jnp, relattn
        >>> class Mean(relattn.MultiHeadAttention):
        ...     def attend(self, q, k, v, context):
        ...         return jnp.broadcast_to(v.mean(axis=-2, keepdims=True), v.shape)
        >>> relattn.register_attention("mean", Mean)
        >>> vit = relattn.ViT(10, attention="mean", dim=8, num_heads=2, num_layers=1)
        >>> images = jnp.zeros((1, 32, 32, 1))
        >>> vit.init_with_output(jax.random.key(0), images)[0].shape
        (1, 10)
    """
    _check_entry(name, module, MultiHeadAttention)
    hooks = ("attend", "mix")
    if all(getattr(module, x) is getattr(MultiHeadAttention, x) for x in hooks):
        raise ValueError(
            f"{name!r} cannot be registered: {module.__name__} must define attend, "
            "from queries, keys and values to outputs of heads, or mix, from tokens"
        )
    if isinstance(module.sites, str):
        raise ValueError(
            f"{name!r} cannot be registered: {module.__name__}.sites must be a tuple, "
            f"such as ('none', 'tokens'), got {module.sites!r}"
        )
    for site in module.sites:
        check_choice("site", site, base.SITES, f" in {module.__name__}.sites")
    _add(ATTENTIONS, name, module)


def register_position(name: str, module: type) -> None:
    """Registers a user-defined position encoding; see `register_attention`.

    Args:
        name: A Python identifier that names no attention or position of relattn. A
            second call with the same name replaces the first.
        module: A subclass of `relattn.Position`.

    Raises:
        ValueError: If relattn uses the name, or it is not a Python identifier, or
            the class has no ``site`` or no ``__call__``.
        TypeError: If ``module`` is not such a subclass.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, relattn
        >>> class Rows(relattn.Position):
        ...     site = "tokens"
        ...     @nn.compact
        ...     def __call__(self, tokens, grid):
        ...         shape = (grid[0], 1, self.dim)
        ...         rows = self.param("rows", nn.initializers.normal(0.02), shape)
        ...         rows = jnp.broadcast_to(rows, (*grid, self.dim))
        ...         return tokens + rows.reshape(-1, self.dim)
        >>> relattn.register_position("rows", Rows)
        >>> vit = relattn.ViT(10, position="rows", dim=8, num_heads=2, num_layers=1)
        >>> images = jnp.zeros((1, 32, 32, 1))
        >>> vit.init_with_output(jax.random.key(0), images)[0].shape
        (1, 10)
    """
    _check_entry(name, module, base.Position)
    check_choice("site", module.site, base.SITES, f" of {module.__name__}")
    is_callable = any("__call__" in vars(parent) for parent in module.__mro__)
    if is_callable != (module.site != "none"):
        problem = "does not define __call__"
        if is_callable:
            problem = f"needs a site, one of {', '.join(base.SITES[1:])}"
        raise ValueError(f"{name!r} cannot be registered: {module.__name__} {problem}")
    _add(POSITIONS, name, module)


def _add(entries: dict[str, Any], name: str, module: type) -> None:
    """Registers a class, possibly in place of another one."""
    if entries.get(name, module) is not module:
        # Compiled functions of models, such as `relattn.generate`, have the other one.
        jax.clear_caches()
    entries[name] = module


def _check_entry(name: str, module: type, base: type) -> None:
    """Raises an error unless a name and a class can be registered."""
    if not isinstance(module, type) or not issubclass(module, base):
        raise TypeError(
            f"{shorten(name)} needs a subclass of relattn.{base.__name__}, got "
            f"{shorten(module)}"
        )
    spec.check_new_name(name, BUILT_IN)


def build(
    attention: str,
    position: str,
    *,
    dim: int,
    num_heads: int,
    num_layers: int,
    num_kv_heads: int = 0,
    head_dim: int = 0,
    qkv_bias: bool = True,
    out_bias: bool = True,
    causal: bool = False,
) -> tuple[functools.partial, functools.partial]:
    """Resolves the specs of an attention and a position, and checks that they fit.

    Args:
        attention: Spec of an entry of `ATTENTIONS`, ``"favor(num_features=256)"``.
        position: Spec of an entry of `POSITIONS`, ``"constrained_sincos"``, or a sum of
            specs, ``"learned + rope2d"``. At most one term of a sum may act at the site
            ``values``, and at most one at another site than ``tokens``.
        dim: Width of the tokens.
        num_heads: Number of heads.
        num_layers: Number of layers.
        num_kv_heads: Number of heads with keys and values; 0 for ``num_heads``.
        head_dim: Width of a head; 0 for dim / num_heads.
        qkv_bias: Whether queries, keys and values have a bias.
        out_bias: Whether the output projection has a bias.
        causal: Whether a token attends only to itself and earlier tokens.

    Returns:
        A constructor of the layers' attention (call it with ``layer=``) and one of the
        model's position encoding.

    Raises:
        ValueError: If a name or an option does not exist, an option or a size is
            invalid, the attention does not support the site of the position or has no
            causal form, or the attention or the position needs keys for every head.

    Example:
        >>> attention, position = build(
        ...     "favor", "learnable_sincos", dim=8, num_heads=2, num_layers=1)
        >>> attention(layer=0).num_heads
        2
    """
    make_attention = spec.resolve(attention, ATTENTIONS, "attention", SET_BY_MODEL)
    make_position = _resolve_position(position, attention, make_attention.func.sites)
    if causal and not make_attention.func.has_causal_form:
        fitting = [name for name, entry in ATTENTIONS.items() if entry.has_causal_form]
        raise ValueError(
            f"attention {attention!r} has no causal form: choose from "
            f"{', '.join(fitting)}"
        )
    sizes = {"dim": dim, "num_heads": num_heads, "head_dim": head_dim}
    make_position = functools.partial(make_position, num_layers=num_layers, **sizes)
    make_attention = functools.partial(
        make_attention,
        num_kv_heads=num_kv_heads,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        causal=causal,
        **sizes,
    )
    # The instance checks its attributes.
    instance = make_attention(parent=None)
    if instance.num_kv_heads < num_heads:
        _check_shared_keys(position, make_position(parent=None), num_kv_heads)
    return make_attention, make_position


def layer_attentions(
    attention: str,
    position: str,
    *,
    num_layers: int,
    num_relative_layers: int = 0,
    **options: Any,
) -> tuple[list[functools.partial], functools.partial]:
    """Resolves the specs of a model: an attention for each layer, and the position.

    The first ``num_relative_layers`` layers use ``attention``, the rest use softmax.

    Args:
        attention: Spec of the first layers' attention.
        position: Spec of the position encoding.
        num_layers: Number of layers.
        num_relative_layers: Number of layers that use ``attention``; 0 for all.
        **options: The other arguments of `build`.

    Returns:
        A constructor of an attention for each layer, and a constructor of the position
        encoding. Layers with equal attentions have the same constructor.

    Raises:
        ValueError: If `build` raises it, or if there are more relative layers than
            layers.

    Example:
        >>> attentions, _ = layer_attentions(
        ...     "lor_translution", "none", dim=8, num_heads=2, num_layers=3,
        ...     num_relative_layers=1)
        >>> [attention.func.__name__ for attention in attentions]
        ['LorTranslutionAttention', 'SoftmaxAttention', 'SoftmaxAttention']
    """
    if not 0 <= num_relative_layers <= num_layers:
        raise ValueError(
            "num_relative_layers must be from 0 (all layers) to "
            f"num_layers={num_layers}, got {num_relative_layers}"
        )
    options["num_layers"] = num_layers
    first, make_position = build(attention, position, **options)
    num_first = num_relative_layers or num_layers
    attentions = [first] * num_first
    if num_first < num_layers:
        rest, _ = build("softmax", position, **options)
        attentions += [rest] * (num_layers - num_first)
    return attentions, make_position


def _check_shared_keys(spec_of_all: str, position: Any, num_kv_heads: int) -> None:
    """Raises if a position encodes the keys or values of each head differently."""
    terms = [position]
    if isinstance(position, base.PositionSum):
        terms = position.make_terms()
    for name, term in zip(spec.terms(spec_of_all), terms, strict=True):
        if term.site in ("heads", "values") and not term.takes_shared_keys:
            raise ValueError(
                f"position {name!r} encodes the keys or values of each head "
                f"differently, got num_kv_heads={num_kv_heads}: choose num_kv_heads=0, "
                "or a position that is the same for all heads, such as 'rope1d'"
            )


def _resolve_position(
    position: str, attention: str, sites: tuple[str, ...]
) -> functools.partial:
    """Resolves the spec of a position, or a sum, for the sites of an attention."""
    makers = [
        spec.resolve(term, POSITIONS, "position", SET_BY_MODEL)
        for term in spec.terms(position)
    ]
    for term, make in zip(spec.terms(position), makers, strict=True):
        if make.func.site not in sites:
            fitting = [name for name, entry in POSITIONS.items() if entry.site in sites]
            raise ValueError(
                f"position {term!r} acts at the site {make.func.site!r}, which "
                f"attention {attention!r} does not support: it takes position "
                f"{', '.join(fitting)}"
            )
    if len(makers) == 1:
        return makers[0]
    values = [make for make in makers if make.func.site == "values"]
    others = [
        make for make in makers if make.func.site not in ("none", "tokens", "values")
    ]
    if max(len(values), len(others)) > 1:
        raise ValueError(
            f"position {position!r} has {len(values) + len(others)} terms that reach "
            "the attention: a sum takes one for the scores, one for the values, and "
            "any number that are added to the tokens"
        )
    if values and any(make.func is relative.RelativeValue for make in others):
        raise ValueError(
            f"position {position!r} has 2 terms that change the values: choose one"
        )
    return functools.partial(base.PositionSum, makers=tuple(makers))
