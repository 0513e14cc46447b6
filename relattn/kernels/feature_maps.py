"""Feature maps for linear attention.

A feature map returns `Features`, which keeps factors and exponents separate. The
kernels of `relattn.kernels.linear` can then stabilise the exponentials without mixing
examples and without leaking later tokens into earlier outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.export
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from relattn.kernels.checks import check_arguments, check_size
from relattn.kernels.precision import wide_einsum, widen

# A causal sum is at most n exp(80) / sqrt(features), finite for 6,000 equal keys.
_MAX_EXPONENT = 80.0
# Exponents of Hedgehog are at most 0: sums of keys stay far from overflow, and weights
# underflow below exp(-143) instead of exp(-83).
_HEDGEHOG_SHIFT = 60.0
# Squared norm below which `unit_norm` does not make vectors unit vectors.
_MIN_SQUARED_NORM = 1e-6


class Features(NamedTuple):
    """Stores features of tokens as ``phi = values * exp(exponents)``.

    Attributes:
        values: Factors, shape ``[*batch, n, features]``; None if all are one.
        exponents: Exponents, shape ``[*batch, n, features]``, or ``[*batch, n, 1]`` if
            the features of a token share one.
        bound: Shift for every feature, independent of the tokens, shape ``[features]``:
            ``exp(exponents - bound)`` cannot overflow. None if the features of a token
            share one exponent.
    """

    values: Float[Array, "*batch n features"] | None
    exponents: Float[Array, "*batch n features"] | Float[Array, "*batch n 1"]
    bound: Float[Array, " features"] | None = None

    @property
    def num_features(self) -> int:
        """The number of features of a token."""
        return (self.exponents if self.values is None else self.values).shape[-1]

    def dense(self) -> Float[Array, "*batch n features"]:
        """Computes the features ``values * exp(exponents)`` without a stabiliser."""
        scale = jnp.exp(self.exponents)
        return scale if self.values is None else self.values * scale


# Maps [*batch, n, head_dim] to features; a plain array gets exponents of zero. A
# pair has a map of queries and one of keys.
_Map = Callable[[Array], Features | Array]
FeatureMap = _Map | tuple[_Map, _Map]


@check_arguments
def positive_features(
    x: Float[Array, "*batch n head_dim"],
    projection: Float[Array, "features projection_dim"],
    *,
    eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
) -> Features:
    """Computes positive random features of the softmax kernel (FAVOR+).

    phi(x) = (exp(W x~ - |x~|^2 / 2) + eps) / sqrt(features), x~ = x / head_dim^(1/4).
    With eps = 0, E[phi(q) . phi(k)] = exp(q . k / sqrt(head_dim)).

    A positive ``eps`` pulls attention towards the mean of the values: more bias, less
    noise. It is a constant, so it neither mixes examples nor leaks later tokens.
    The code of Horn et al., like performer-pytorch of its time, divides the features by
    the largest one, of the token for queries and of the batch for keys, and then adds
    1e-4. This depends on the batch, and is about as much as eps = 0.3 here
    (docs/attentions.md has measurements).

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        projection: W, from `draw_orthogonal` or `draw_gaussian`, shape
            ``[features, head_dim]``.
        eps: Added to every feature; finite, and at least zero.
        precision: Passed to einsum; the highest by default.

    Returns:
        Features without factors: exponents, shape ``[*batch, n, features]``, and their
        bound, max(0, log(exp(|w|^2 / 2) + eps) - 80), shape ``[features]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, ``x`` and the projection
            differ in head_dim, or ``eps`` is negative or not finite.

    Example:
        >>> from relattn.kernels import draw_orthogonal
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> positive_features(jnp.ones((7, 3)), w).dense().shape
        (7, 5)

    Source:
        Choromanski et al., Rethinking Attention with Performers, lemma 1.
    """
    _check_eps(eps)
    # W x~ - |x~|^2 / 2 - log sqrt(features): phi(x) is its exponential.
    projected, half_norm = _project(x, projection, precision)
    log_scale = 0.5 * math.log(projection.shape[0])
    exponents = projected - (half_norm + log_scale)
    # w . x~ - |x~|^2 / 2 = |w|^2 / 2 - |x~ - w|^2 / 2 is at most |w|^2 / 2.
    largest = 0.5 * jnp.sum(jnp.square(widen(projection)), axis=-1)
    # exp(a) + eps = exp(log(exp(a) + exp(log eps))).
    if eps:
        exponents = jnp.logaddexp(exponents, math.log(eps) - log_scale)
        largest = jnp.logaddexp(largest, math.log(eps))
    # Not the whole of |w|^2 / 2, which would let features of usual keys underflow.
    bound = jnp.maximum(0.0, largest - _MAX_EXPONENT).astype(exponents.dtype)
    return Features(None, exponents, bound)


@check_arguments
def trigonometric_features(
    x: Float[Array, "*batch n head_dim"],
    projection: Float[Array, "features projection_dim"],
    *,
    precision: jax.lax.PrecisionLike = None,
) -> Features:
    """Computes trigonometric random features of the softmax kernel (FAVOR).

    phi(x) = exp(|x~|^2 / 2) [cos W x~, sin W x~] / sqrt(features),
    x~ = x / head_dim^(1/4), and E[phi(q) . phi(k)] = exp(q . k / sqrt(head_dim)).
    The estimate can be negative: see `relattn.kernels.linear_attention`.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        projection: W, from `draw_orthogonal` or `draw_gaussian`, shape
            ``[features, head_dim]``.
        precision: Passed to einsum; the highest by default.

    Returns:
        Features: values, shape ``[*batch, n, 2 features]``, and one exponent per token,
        shape ``[*batch, n, 1]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``x`` and the projection
            differ in head_dim.

    Example:
        >>> from relattn.kernels import draw_orthogonal
        >>> w = draw_orthogonal(jax.random.key(0), 5, 3)
        >>> trigonometric_features(jnp.ones((7, 3)), w).dense().shape
        (7, 10)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.1.
    """
    # [cos W x~, sin W x~] / sqrt(features) are factors, |x~|^2 / 2 the one exponent.
    projected, half_norm = _project(x, projection, precision)
    values = jnp.concatenate([jnp.cos(projected), jnp.sin(projected)], axis=-1)
    return Features(values / math.sqrt(projection.shape[0]), half_norm)


@check_arguments
def relu_features(
    x: Float[Array, "*batch n head_dim"],
    projection: Float[Array, "features projection_dim"],
    bias: Float[Array, " features"] | None = None,
    *,
    eps: float = 1e-3,
    precision: jax.lax.PrecisionLike = None,
) -> Features:
    """Computes ReLU features, with a random or a learned projection.

    phi(x) = relu(W x~ + b) + eps, x~ = x / head_dim^(1/4). They do not estimate softmax
    attention.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        projection: W, drawn or learned, shape ``[features, head_dim]``.
        bias: b, shape ``[features]``; zero if None.
        eps: Added to every feature; finite, and at least zero. If positive, it keeps
            the sum of weights above zero.
        precision: Passed to einsum; the highest by default.

    Returns:
        Features: values, shape ``[*batch, n, features]``, and exponents of zero, shape
        ``[*batch, n, 1]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, ``x`` and the projection
            differ in head_dim, or ``eps`` is negative or not finite.

    Example:
        >>> relu_features(-jnp.ones((1, 2)), jnp.eye(2)).dense().tolist()
        [[0.0010000000474974513, 0.0010000000474974513]]

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 4 (ReLU).
    """
    _check_eps(eps)
    # relu(W x~ + b) + eps.
    projected, half_norm = _project(x, projection, precision)
    if bias is not None:
        projected = projected + widen(bias)
    # Not jax.nn.relu: second derivatives through a scan lose its rule at zero.
    rectified = jnp.where(projected <= 0, 0.0, projected)
    return Features(rectified + eps, jnp.zeros_like(half_norm))


@check_arguments
def hedgehog_features(
    x: Float[Array, "*#batch n head_dim"],
    projection: Float[Array, "*#batch half projection_dim"],
    *,
    precision: jax.lax.PrecisionLike = None,
) -> Features:
    """Computes learned exponential features (Hedgehog).

    phi(x) = softmax([W x, -W x]), over the features of a token. With a W for each head,
    separate for queries and keys, phi(q) . phi(k) can be trained to imitate the weights
    of softmax attention.

    The sum of a query's features cancels in the quotient of linear attention. That of a
    key bounds its features, so that no key takes all weight because it is long.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.
        projection: W, learned, shape ``[*batch, half, head_dim]``, such as ``[heads,
            half, head_dim]``; the identity is a good start.
        precision: Passed to einsum; the highest by default.

    Returns:
        Features without factors: exponents of at most 0, shape ``[*batch, n, 2 half]``,
        and their bound, shape ``[2 half]``.

    Raises:
        ValueError: If shapes or dtypes do not fit together, or ``x`` and the projection
            differ in head_dim.

    Example:
        >>> x, w = jnp.array([[0.0, 9.0]]), jnp.array([[0.0, 1.0]])
        >>> hedgehog_features(x, w).dense().round(3).tolist()
        [[1.0, 0.0]]

    Source:
        Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with
        Softmax Mimicry, section 4.2 (where W x has a bias), normalised over the
        features; LoLCATs (Zhang et al.) normalises W x and -W x separately.
    """
    # log softmax([W x, -W x])
    projected = _multiply(widen(x), projection, precision)
    scores = jnp.concatenate([projected, -projected], axis=-1)
    exponents = jax.nn.log_softmax(scores, axis=-1)
    bound = jnp.full(scores.shape[-1], -_HEDGEHOG_SHIFT, scores.dtype)
    return Features(None, exponents, bound)


@check_arguments
def unit_norm(
    x: Float[Array, "*batch n head_dim"],
) -> Float[Array, "*batch n head_dim"]:
    """Scales vectors so that feature maps project unit vectors.

    x' = head_dim^(1/4) x / |x|. `positive_features` and `trigonometric_features`
    project x' / head_dim^(1/4), which then has norm 1: their weights estimate
    exp(cos(q, k)), with bounded variance.

    A vector shorter than 1e-3 is scaled as if it had that length, so zeros stay zeros.
    It has no gradient, which would grow as 1 / |x|.

    Args:
        x: Queries or keys, shape ``[*batch, n, head_dim]``.

    Returns:
        Scaled vectors, in the shape and dtype of ``x``.

    Raises:
        ValueError: If shapes or dtypes do not fit together.

    Example:
        >>> unit_norm(jnp.ones((1, 16))).round(3)[0, :3].tolist()
        [0.5, 0.5, 0.5]

    Source:
        Luo et al., Stable, Fast and Accurate: Kernelized Attention with Relative
        Positional Encoding, section 3.3.
    """
    wide = widen(x)
    # |x|^2, without gradient where it is small.
    squared = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    wide = jnp.where(squared < _MIN_SQUARED_NORM, jax.lax.stop_gradient(wide), wide)
    squared = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    # head_dim^(1/4) / |x|
    scale = x.shape[-1] ** 0.25 * jax.lax.rsqrt(jnp.maximum(squared, _MIN_SQUARED_NORM))
    return (wide * scale).astype(x.dtype)


def query_features(
    feature_map: FeatureMap, q: Float[Array, "*batch n head_dim"]
) -> Features:
    """Computes the features of queries; a plain array gets exponents of zero."""
    query_map = feature_map[0] if isinstance(feature_map, tuple) else feature_map
    return _evaluate(query_map, q)


def key_features(
    feature_map: FeatureMap, k: Float[Array, "*batch m head_dim"]
) -> Features:
    """Computes the features of keys, as `query_features`."""
    key_map = feature_map[1] if isinstance(feature_map, tuple) else feature_map
    return _evaluate(key_map, k)


def check_feature_maps(feature_map: FeatureMap, q: Array, k: Array) -> None:
    """Checks that a pair of feature maps returns features of one kind and number."""
    if not isinstance(feature_map, tuple):
        return
    if len(feature_map) != 2:
        raise ValueError(
            "feature_map must be one function, or a tuple of two, for queries and for "
            f"keys, got {len(feature_map)}"
        )
    token = [jax.ShapeDtypeStruct((1, x.shape[-1]), x.dtype) for x in (q, k)]
    maps = [functools.partial(f, feature_map) for f in (query_features, key_features)]
    shapes = [
        jax.tree.map(lambda x: x.shape, jax.eval_shape(*each))
        for each in zip(maps, token, strict=True)
    ]
    # Only the keys' bound is used; batch axes, which matrices have, may broadcast.
    last = [[shape and shape[-1] for shape in found[:2]] for found in shapes]
    if last[0] != last[1]:
        raise ValueError(
            "the feature maps of queries and keys must return features of the same "
            f"shape, got {shapes[0]} and {shapes[1]} for one token"
        )


def feature_shapes(
    feature_map: FeatureMap, k: Array | jax.ShapeDtypeStruct
) -> Features:
    """Returns the shapes and dtypes of one token's features."""
    return jax.eval_shape(
        functools.partial(key_features, feature_map),
        jax.ShapeDtypeStruct((*k.shape[:-2], 1, k.shape[-1]), k.dtype),
    )


def _evaluate(feature_map, x):
    if not callable(feature_map):
        raise ValueError(
            "feature_map must be a function from tokens to features, such as "
            f"jax.nn.relu, or a tuple of two, got {type(feature_map).__name__}"
        )
    features = feature_map(x)
    given = isinstance(features, Features)
    found = features.exponents if given else features
    shape = getattr(found, "shape", None)
    # Batch axes, which matrices have, may broadcast.
    if shape is None or len(shape) < x.ndim or shape[-2] != x.shape[-2]:
        what = type(found).__name__ if shape is None else f"shape {shape}"
        raise ValueError(
            "feature_map must return features [*batch, n, features] for tokens "
            f"[*batch, n, head_dim], here {x.shape}, got {what}"
        )
    if given:
        return jax.tree.map(widen, features)
    values = widen(cast(Array, features))
    return Features(values, jnp.zeros_like(values[..., :1]))


def default_num_features(head_dim: int) -> int:
    """Computes the default number of features, at least one.

    num_features = int(head_dim * ln(head_dim)).

    Args:
        head_dim: Width of the queries of a head, including concatenated positions.

    Returns:
        The number of features.

    Raises:
        ValueError: If ``head_dim`` is less than one or no whole number.

    Example:
        >>> default_num_features(48)
        185

    Source:
        Choromanski et al., Rethinking Attention with Performers, theorem 4.
    """
    check_size("head_dim", head_dim)
    return max(1, int(head_dim * math.log(head_dim)))


def _check_eps(eps: float) -> None:
    """Raises ValueError if the constant of features is negative or not finite."""
    if not isinstance(eps, Tracer) and not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and at least 0, got {eps}")


def _project(
    x: Float[Array, "*batch n head_dim"],
    projection: Float[Array, "features projection_dim"],
    precision: jax.lax.PrecisionLike,
) -> tuple[Float[Array, "*batch n features"], Float[Array, "*batch n 1"]]:
    """Computes W x~ and |x~|^2 / 2, float32 or wider, with x~ = x / head_dim^(1/4)."""
    x = widen(x) * x.shape[-1] ** -0.25
    projected = _multiply(x, projection, precision)
    return projected, 0.5 * jnp.sum(jnp.square(x), axis=-1, keepdims=True)


def _multiply(
    x: Float[Array, "*#batch n head_dim"],
    projection: Float[Array, "*#batch features projection_dim"],
    precision: jax.lax.PrecisionLike,
) -> Float[Array, "*batch n features"]:
    """Computes W x."""
    if x.shape[-1] != projection.shape[-1]:
        raise ValueError(
            f"the projection takes vectors of head_dim {projection.shape[-1]}, got "
            f"{x.shape[-1]}: draw it with head_dim={x.shape[-1]}"
        )
    # Exponentials multiply the error of this small product.
    precision = jax.lax.Precision.HIGHEST if precision is None else precision
    subscripts = "...d,fd->...f" if projection.ndim == 2 else "...nd,...fd->...nf"
    return wide_einsum(precision)(subscripts, x, widen(projection))
