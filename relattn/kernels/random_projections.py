"""Draws and redraws of the random projections of feature maps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key

from relattn.kernels.checks import check_size
from relattn.messages import check_choice, shorten

NORMS = ("chi", "fixed")
# Without a template, Orbax and Flax restore dicts of arrays.
RESTORE = "restore a checkpoint with the variables of `model.init` as its template"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomFeatures:
    """Stores a projection and the settings needed to redraw it.

    A pytree with one leaf, the projection; the settings are static.

    Attributes:
        projection: Projection W, shape ``[num_features, head_dim]``; with leading axes
            in a stack of layers, as `flax.linen.scan` and `flax.nnx.vmap` make them.
        layer: Number of the projection, different for every projection of a model. A
            stack has this number and the next ones.
        orthogonal: Whether the rows are orthogonal within blocks.
        norms: Norms of the rows: ``"chi"``, those of Gaussian vectors, or ``"fixed"``,
            always sqrt(head_dim).
        sign_corrected: Whether the signs of the QR decomposition are corrected, so that
            the rows are uniform among orthogonal ones.
    """

    # Any: JAX transformations put shardings, placeholders and stacked arrays here.
    projection: Any
    layer: int = dataclasses.field(metadata={"static": True})
    orthogonal: bool = dataclasses.field(default=True, metadata={"static": True})
    norms: str = dataclasses.field(default="chi", metadata={"static": True})
    sign_corrected: bool = dataclasses.field(default=True, metadata={"static": True})


# Lets `jax.export.Exported.serialize` store a model's variables. The name is taken
# where this module is reloaded, as in a notebook.
with contextlib.suppress(ValueError):
    jax.export.register_pytree_node_serialization(
        RandomFeatures,
        serialized_name="relattn.RandomFeatures",
        serialize_auxdata=lambda settings: json.dumps(settings).encode(),
        deserialize_auxdata=lambda stored: tuple(json.loads(stored)),
    )


def draw_gaussian(
    key: Key[Array, ""], num_features: int, head_dim: int
) -> Float[Array, "{num_features} {head_dim}"]:
    """Draws a projection with independent rows w ~ N(0, I).

    Args:
        key: A PRNG key.
        num_features: Number of rows.
        head_dim: Width of a row.

    Returns:
        The projection, float32, shape ``[num_features, head_dim]``.

    Raises:
        ValueError: If a size is less than one or no whole number.

    Example:
        >>> draw_gaussian(jax.random.key(0), 5, 3).shape
        (5, 3)

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 2.3.
    """
    check_size("num_features", num_features)
    check_size("head_dim", head_dim)
    return jax.random.normal(key, (num_features, head_dim), jnp.float32)


def draw_orthogonal(
    key: Key[Array, ""],
    num_features: int,
    head_dim: int,
    *,
    norms: str = "chi",
    sign_corrected: bool = True,
) -> Float[Array, "{num_features} {head_dim}"]:
    """Draws a projection whose rows are orthogonal within blocks of ``head_dim`` rows.

    W = diag(norms) [Q_1; Q_2; ...], each Q uniform (Haar) among the orthogonal
    matrices: the QR decomposition of a Gaussian matrix, columns times sign(diag R).
    With ``"chi"`` norms each row is N(0, I), so the features are unbiased.

    ``"fixed"`` norms make the features biased: the mean of phi(q) . phi(k) is about
    exp(-|q + k|^4 / (4 head_dim (head_dim + 2))) times exp(q . k / sqrt(head_dim)). At
    head_dim 48 it is 7% too small for |q + k| = 5.3, 11% for |q + k| = 6, and 52% for
    |q + k| = sqrt(2 head_dim), typical of independent normal q and k.

    Args:
        key: A PRNG key.
        num_features: Number of rows; the last block is cut if ``head_dim`` does not
            divide it.
        head_dim: Width of a row.
        norms: ``"chi"``, independent norms of Gaussian vectors, or ``"fixed"``, always
            sqrt(head_dim), which is biased.
        sign_corrected: Whether the columns of Q are multiplied by sign(diag R). False,
            as in the code of Horn et al., makes Q not uniform and the features biased.

    Returns:
        The projection, float32, shape ``[num_features, head_dim]``.

    Raises:
        ValueError: If a size is less than one or no whole number, or ``norms`` is
            unknown.

    Example:
        >>> w = draw_orthogonal(jax.random.key(0), 2, 3, norms="fixed")
        >>> bool(jnp.allclose(w @ w.T, 3 * jnp.eye(2), atol=1e-5))
        True

    Source:
        Yu et al., Orthogonal Random Features, section 3; the signs: Mezzadri, How to
        generate random matrices from the classical compact groups, section 5.
    """
    check_size("num_features", num_features)
    check_size("head_dim", head_dim)
    check_choice("norms", norms, NORMS)
    # Q_1, Q_2, ...: enough square blocks for all rows.
    block_key, norm_key = jax.random.split(key)
    num_blocks = -(-num_features // head_dim)
    gaussian = jax.random.normal(
        block_key, (num_blocks, head_dim, head_dim), jnp.float32
    )
    rows, diagonal = _qr(gaussian)
    # Q diag(sign(diag R)), transposed, is uniform (Haar).
    if sign_corrected:
        rows = rows * jnp.where(diagonal < 0, -1.0, 1.0)[..., None]
    rows = rows.reshape(num_blocks * head_dim, head_dim)[:num_features]
    # diag(norms) [Q_1; Q_2; ...], with the norms |g| of g ~ N(0, I), or sqrt(head_dim).
    if norms == "fixed":
        return rows * math.sqrt(head_dim)
    gaussian = jax.random.normal(norm_key, (num_features, head_dim), jnp.float32)
    return rows * jnp.linalg.norm(gaussian, axis=-1, keepdims=True)


def draw_random_features(
    key: Key[Array, ""],
    *,
    layer: int,
    index: int | Int[Array, ""] = 0,
    num_features: int,
    head_dim: int,
    orthogonal: bool = True,
    norms: str = "chi",
    sign_corrected: bool = True,
) -> RandomFeatures:
    """Draws the projection of a layer, a pure function of (key, layer, index).

    W = draw(fold_in(fold_in(key, layer), index)), with `draw_orthogonal` or
    `draw_gaussian` as draw.

    Args:
        key: The model's key for random features, the same for all layers.
        layer: Number of the projection, different for every projection of a model.
        index: Number of redraws so far; may be traced.
        num_features: Number of rows.
        head_dim: Width of a row.
        orthogonal: Whether the rows are orthogonal within blocks; otherwise they are
            independent.
        norms: Norms of orthogonal rows: ``"chi"``, those of Gaussian vectors, or
            ``"fixed"``, always sqrt(head_dim), which is biased.
        sign_corrected: Whether the columns of Q are multiplied by sign(diag R). False
            makes Q not uniform and the features biased.

    Returns:
        The projection with its settings.

    Raises:
        ValueError: If a size is less than one or no whole number, ``norms`` is unknown,
            or ``index`` is negative or no whole number.

    Example:
        >>> features = draw_random_features(
        ...     jax.random.key(0), layer=1, num_features=5, head_dim=3)
        >>> features.projection.shape
        (5, 3)

    Source:
        Yu et al., Orthogonal Random Features, section 3; Choromanski et al., Rethinking
        Attention with Performers, section 2.3.
    """
    shape = jax.ShapeDtypeStruct((num_features, head_dim), jnp.float32)
    features = RandomFeatures(shape, layer, orthogonal, norms, sign_corrected)
    return dataclasses.replace(features, projection=_draw(features, key, layer, index))


def _draw(
    features: RandomFeatures,
    key: Key[Array, ""],
    layer: int | Array,
    index: int | Array,
) -> Array:
    """Draws the projection of a layer, like ``features`` in shape and settings."""
    whole = jnp.issubdtype(jnp.result_type(index), jnp.integer)
    if not whole or (not isinstance(index, Tracer) and index < 0):
        raise ValueError(
            "index must be a whole number of at least 0, such as step // redraw_every, "
            f"got {shorten(index)}"
        )
    shape = features.projection.shape[-2:]

    # One by one under vmap, in which keys of "rbg" draw other numbers than alone.
    @jax.custom_batching.sequential_vmap
    def draw(key: Key[Array, ""], layer: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(key, layer), index)
        if not features.orthogonal:
            return draw_gaussian(key, *shape)
        return draw_orthogonal(
            key, *shape, norms=features.norms, sign_corrected=features.sign_corrected
        )

    # A call counts as a use of its key in `jax.debug_key_reuse`: each gets its own.
    return draw(jax.random.clone(key), jnp.asarray(layer), jnp.asarray(index))


def redraw(collection: Any, key: Key[Array, ""], index: int | Int[Array, ""]) -> Any:
    """Redraws every projection of a collection.

    W_layer = draw_random_features(key, layer, index). The old projections have no
    influence, so every process gets the same projections for the same index.

    A projection with leading axes belongs to a stack of layers. They get the
    projections of separate layers ``layer``, ``layer + 1``, ..., in row-major order.

    Args:
        collection: A pytree with `RandomFeatures`; other leaves are kept.
        key: The model's key for random features.
        index: Number of redraws so far, ``step // redraw_every``; may be traced.

    Returns:
        The collection, with the same structure, shapes and dtypes.

    Raises:
        ValueError: If it has leaves, but no `RandomFeatures`, or ``index`` is negative
            or no whole number.

    Example:
        >>> key = jax.random.key(0)
        >>> first = draw_random_features(key, layer=0, num_features=5, head_dim=3)
        >>> again = redraw({"layer": first}, key, 1)["layer"]
        >>> bool(jnp.array_equal(first.projection, again.projection))
        False

    Source:
        Choromanski et al., Rethinking Attention with Performers (feature redrawing).
    """

    def draw(leaf: Any) -> Any:
        if not isinstance(leaf, RandomFeatures):
            return leaf
        old = leaf.projection
        if old.ndim == 2:
            projection = _draw(leaf, key, leaf.layer, index)
        else:
            layers = leaf.layer + jnp.arange(math.prod(old.shape[:-2]))
            projection = jax.vmap(lambda i: _draw(leaf, key, i, index))(layers)
        projection = projection.reshape(old.shape).astype(old.dtype)
        return dataclasses.replace(leaf, projection=projection)

    leaves, treedef = jax.tree.flatten(
        collection, is_leaf=lambda leaf: isinstance(leaf, RandomFeatures)
    )
    if leaves and not any(isinstance(leaf, RandomFeatures) for leaf in leaves):
        raise ValueError(
            "the collection has no RandomFeatures to redraw: pass "
            f"variables['random_features'], and {RESTORE}"
        )
    return jax.tree.unflatten(treedef, map(draw, leaves))


def draw_constant(draw: Callable[[Key[Array, ""]], Any]) -> Any:
    """Draws a random constant of a model, which checkpoints do not store.

    So it must be the same wherever the model is used: under every setting of JAX, and
    inside compiled functions, where it is a constant.

    Args:
        draw: Maps a PRNG key to arrays.

    Returns:
        What it draws.

    Example:
        >>> draw = lambda key: draw_gaussian(key, 2, 3)
        >>> with jax.default_prng_impl("rbg"):
        ...     other = draw_constant(draw)
        >>> bool((draw_constant(draw) == other).all())
        True
    """
    with jax.ensure_compile_time_eval(), jax.threefry_partitionable(True):
        return draw(jax.random.key(0, impl="threefry2x32"))


@jax.jit
def _qr(
    matrices: Float[Array, "blocks head_dim head_dim"],
) -> tuple[Float[Array, "blocks head_dim head_dim"], Float[Array, "blocks head_dim"]]:
    """Computes Q transposed and diag(R) by Householder reflections, without LAPACK.

    Since version 0.10, jaxlib computes the matrices of a LAPACK call on XLA's pool of
    threads, and the call waits for them on a thread of this pool. Where as many calls
    as there are threads run at once, they wait forever: seen with `jnp.linalg.qr` and
    jaxlib 0.10.2 on 2 cores, and with `jnp.linalg.det` on 4
    (https://github.com/qiskit-community/ffsim/pull/684).

    Reflections H_j = I - 2 v v^T / |v|^2 make a matrix A triangular, column by column:
    H_(n-1) .. H_1 A = R, so H_(n-1) .. H_1 I = Q^T. The signs are LAPACK's: diag(R)_j =
    -sign(pivot) |x|, except in the last column, which is not reflected.
    """
    head_dim = matrices.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(head_dim, dtype=matrices.dtype), matrices.shape)

    def reflect(j: Array, carry: Array) -> Array:
        # v = x + sign(x_j) |x| e_j for x, column j from the diagonal down.
        column = jax.lax.dynamic_index_in_dim(carry, j, axis=-1, keepdims=False)
        column = jnp.where(jnp.arange(head_dim) < j, 0.0, column)
        norm = jnp.sqrt(jnp.sum(jnp.square(column), axis=-1, keepdims=True))
        pivot = jax.lax.dynamic_slice_in_dim(column, j, 1, axis=-1)
        is_pivot = jnp.arange(head_dim) == j
        v = column + jnp.where(is_pivot, jnp.where(pivot < 0, -norm, norm), 0.0)
        # (I - 2 v v^T / |v|^2) carry. No matmul: its default precision may be lower.
        v, scale = v[..., None], 2.0 / jnp.sum(jnp.square(v), axis=-1)
        products = jnp.sum(v * carry, axis=-2, keepdims=True)
        return carry - scale[..., None, None] * v * products

    # Reflecting [A, I] gives [R, Q^T].
    both = jnp.concatenate([matrices, identity], axis=-1)
    both = jax.lax.fori_loop(0, head_dim - 1, reflect, both)
    diagonal = jnp.diagonal(both[..., :head_dim], axis1=-2, axis2=-1)
    return both[..., head_dim:], diagonal
