"""Attention weights of a model: how much each token reads from each other."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.nn.attention import ATTENTION_WEIGHTS, MultiHeadAttention


def attention_weights(
    model: nn.Module, variables: Mapping[str, Any], inputs: Array
) -> list[Float[Array, "batch heads n n"]]:
    """Computes the attention weights of every layer.

    Outputs are linear in the values, out_i = sum_j a_ij v_j. Identity vectors appended
    to the values therefore give the weights a_ij of any attention exactly, even if it
    never forms the matrix. Weights of trigonometric features may be negative; those of
    a routed head are zero where a query and a key share no cluster; those of Linformer
    include its projection of the values. Weights of Translution, and of any
    attention with ``fourier_values`` or ``rotary_values``, multiply values that depend
    on the offset.

    Args:
        model: A `ViT`, `Performer`, `GPT` or another model with attention.
        variables: Its variables.
        inputs: Preprocessed images or tokens.

    Returns:
        One array for each layer, ``[batch, heads, n, n]``: queries, then keys, both
        with prefix tokens such as CLS first.

    Raises:
        ValueError: If the model has no attention.

    Example:
        >>> from relattn.models import ViT
        >>> model = ViT(10, dim=8, num_heads=2, num_layers=3, attention="favor")
        >>> images = jnp.ones((1, 32, 32, 1))
        >>> variables = model.init(jax.random.key(0), images)
        >>> weights = attention_weights(model, variables, images)
        >>> len(weights), weights[0].shape
        (3, (1, 2, 5, 5))
        >>> bool(jnp.allclose(weights[0].sum(axis=-1), 1, atol=1e-3))
        True
    """
    found = _sow_weights(model, variables, inputs).get(ATTENTION_WEIGHTS, {})
    # Not those of `AttentionPool`, whose query is not a token.
    found = {name: found[name] for name in found if name != "pool"}
    layers = []
    for name in sorted(found, key=lambda name: int(name.rpartition("_")[2])):
        (weights,) = jax.tree.leaves(found[name])
        layers += list(weights) if name.startswith("blocks_") else [weights]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention, so no weights")
    return layers


@functools.partial(jax.jit, static_argnums=0)
def _sow_weights(model: nn.Module, variables: Any, inputs: Array) -> Any:
    """Applies the model; returns the collection of the weights of its attentions."""
    inputs_length: list[int] = []

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if not isinstance(context.module, MultiHeadAttention):
            return call(*args, **kwargs)
        # Tables of offsets add nothing to the columns of the identity.
        if context.method_name == "tables":
            tables, n = call(*args, **kwargs), inputs_length[-1]
            if "value_table" in tables:
                padding = [(0, 0)] * (tables["value_table"].ndim - 1) + [(0, n)]
                tables["value_table"] = jnp.pad(tables["value_table"], padding)
            return tables
        if context.method_name != "attend":
            return call(*args, **kwargs)
        # A [v, I] = [A v, A]
        q, k, v, *rest = args
        n, width = v.shape[-2:]
        identity = jnp.broadcast_to(jnp.eye(n, dtype=v.dtype), (*v.shape[:-1], n))
        inputs_length.append(n)
        out = call(q, k, jnp.concatenate([v, identity], axis=-1), *rest, **kwargs)
        context.module.sow_weights(out[..., width:])
        return out[..., :width]

    with nn.intercept_methods(record):
        return model.apply(variables, inputs, mutable=[ATTENTION_WEIGHTS])[1]
