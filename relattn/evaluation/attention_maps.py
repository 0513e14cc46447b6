"""Attention maps: the weights of an image's patches in the last layer of a run."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from relattn import models
from relattn.data import input_shape
from relattn.models.anchor import anchor_shifts
from relattn.training import Run

AttentionMaps = tuple[Float[Array, "batch rows columns"], Int[Array, "batch 2"]]


def make_maps_fn(run: Run) -> Callable[[Array], AttentionMaps] | None:
    """Makes a compiled function from preprocessed images to attention maps.

    Args:
        run: A trained run.

    Returns:
        None if the model has no attention. Otherwise the function. It returns the
        weights of the patches in the last layer, averaged over the heads: those of the
        query CLS or, in a model without CLS, the mean over all queries. It also returns
        the row and column, in pixels, where the first patch starts: (0, 0) unless
        ``anchor="polyphase"``.
    """
    if not hasattr(run.model, "num_prefix"):
        return None
    size, num_prefix = input_shape(run.config.data, run.data)[:2], run.model.num_prefix
    grid = models.patch_grid(size, run.model.patch_size)

    @jax.jit
    def maps(variables, inputs):
        weights = models.attention_weights(run.model, variables, inputs)[-1]
        read = weights.mean(axis=1)
        read = read[:, 0] if run.model.has_class_token else read.mean(axis=1)
        starts = jnp.zeros((len(inputs), 2), jnp.int32)
        if run.model.anchor == "polyphase":
            starts = anchor_shifts(inputs, run.model.patch_size)
        return read[:, num_prefix:].reshape(-1, *grid), starts

    variables = jax.device_put(run.variables)
    return lambda inputs: maps(variables, inputs)
