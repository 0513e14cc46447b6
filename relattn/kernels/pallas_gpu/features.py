"""Feature maps of linear attention as kernels for GPUs compute them, block by block.

Kernels give a map the products W x~ of tokens and of a block of features, with
x~ = x / head_dim^(1/4), and a bias for each feature, of keys or of queries. They get
the features, and their derivatives by W x~ and by |x~|^2 / 2.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from relattn.kernels import feature_maps
from relattn.kernels.pallas_gpu.products import MIN_EXPONENT


class Biases(NamedTuple):
    """Biases of keys and queries, ``[features]``, and those that fill the last block.

    A feature that fills the last block has a W of zero, and must add nothing.
    """

    keys: Array
    queries: Array
    fill_keys: float
    fill_queries: float


@dataclasses.dataclass(frozen=True)
class BlockMap(abc.ABC):
    """A feature map in a kernel.

    Attributes:
        is_positive: Whether features are plain exponentials, of shifted exponents.
        is_signed: Whether features may be negative, and then keys have exponents of
            |k~|^2 / 2 in `token_weights`.
        norm_sign: Derivative of log phi(k) by |k~|^2 / 2.
    """

    is_positive: ClassVar[bool] = False
    is_signed: ClassVar[bool] = False
    norm_sign: ClassVar[int] = 0

    @abc.abstractmethod
    def biases(self, w: Array, bias: Array, *, causal: bool) -> Biases:
        """Returns the biases, of W and b of float32."""

    @abc.abstractmethod
    def keys(self, projected: Any, half_norm: Any, bias: Any) -> tuple[Any, Any]:
        """Returns phi(k), and its derivative by W k~, given |k~|^2 / 2."""

    @abc.abstractmethod
    def queries(self, projected: Any, bias: Any, largest: Any) -> tuple[Any, Any]:
        """Returns phi(q) and its derivative by W q~."""

    def queries_online(
        self, projected: Any, bias: Any, largest: Any
    ) -> tuple[Any, Any, Any]:
        """Returns phi(q), the new running maximum and what sums so far decay by."""
        return self.queries(projected, bias, None)[0], largest, None


@dataclasses.dataclass(frozen=True)
class PositiveMap(BlockMap):
    """exp(W x~ - |x~|^2 / 2): see `feature_maps.positive_features`.

    The biases are -c_f of keys, c_f of queries. |q~|^2 / 2 cancels in the outputs.

    Attributes:
        largest: Largest exponent of keys: if not causal, c_f is their maximum.
    """

    is_positive: ClassVar[bool] = True
    norm_sign: ClassVar[int] = -1

    largest: float

    def biases(self, w, bias, *, causal):
        """Returns biases of the bound; if not causal, without the maximum of keys."""
        del bias
        bound = feature_maps.positive_features(jnp.zeros((1, w.shape[1])), w).bound
        assert bound is not None
        queries = bound if causal else jnp.zeros_like(bound)
        keys = -(bound + 0.5 * math.log(len(w)))
        return Biases(keys, queries, 0.0, MIN_EXPONENT)

    def key_exponents(self, projected: Any, half_norm: Any) -> Any:
        """Returns a_jf = w_f . k~_j - |k~_j|^2 / 2."""
        return projected - half_norm[:, None]

    def keys(self, projected, half_norm, bias):
        """Returns exp(a_jf - c_f), twice."""
        exponents = self.key_exponents(projected, half_norm) + bias[None, :]
        phi = jnp.exp(jnp.minimum(exponents, self.largest))
        return phi, phi

    def queries(self, projected, bias, largest):
        """Returns exp(b_if + c_f - r_i), twice, given r_i."""
        phi = shifted_exp(projected + bias[None, :], largest[:, None])
        return phi, phi

    def queries_online(self, projected, bias, largest):
        """Returns exp(b_if + c_f - r_i), the new running maximum r_i and the decay."""
        exponents = projected + bias[None, :]
        before, largest = largest, jnp.maximum(largest, jnp.max(exponents, axis=1))
        phi = shifted_exp(exponents, largest[:, None])
        return phi, largest, jnp.exp(before - largest)


@dataclasses.dataclass(frozen=True)
class ReluMap(BlockMap):
    """relu(W x~ + b) + eps: see `feature_maps.relu_features`.

    Attributes:
        eps: Added to every feature.
    """

    eps: float

    def biases(self, w, bias, *, causal):
        """Returns b for both."""
        del w, causal
        return Biases(bias, bias, MIN_EXPONENT, MIN_EXPONENT)

    def keys(self, projected, half_norm, bias):
        """Returns the features, and 1 where relu has a slope."""
        del half_norm
        projected = projected + bias[None, :]
        # Features that fill the last block have no eps either.
        eps = jnp.where(bias > MIN_EXPONENT, self.eps, 0.0)
        phi = jnp.maximum(projected, 0.0) + eps[None, :]
        return phi, jnp.where(projected > 0, 1.0, 0.0)

    def queries(self, projected, bias, largest):
        """Returns the same as `keys`."""
        del largest
        return self.keys(projected, None, bias)


@dataclasses.dataclass(frozen=True)
class TrigonometricMap(BlockMap):
    """cos(W x~ + b), all of `feature_maps.trigonometric_features` but exp(|x~|^2 / 2).

    The sine is a cosine, with b = -pi / 2. |q~|^2 / 2 cancels in the outputs.
    """

    is_signed: ClassVar[bool] = True
    norm_sign: ClassVar[int] = 1

    def biases(self, w, bias, *, causal):
        """Returns b for both, and a cosine of zero for features that fill a block."""
        del w, causal
        return Biases(bias, bias, math.pi / 2, math.pi / 2)

    def keys(self, projected, half_norm, bias):
        """Returns cos y and -sin y."""
        del half_norm
        projected = projected + bias[None, :]
        return jnp.cos(projected), -jnp.sin(projected)

    def queries(self, projected, bias, largest):
        """Returns the same as `keys`."""
        del largest
        return self.keys(projected, None, bias)


def shifted_exp(exponents: Any, largest: Any) -> Any:
    """Returns exp(exponents - largest), at most one; see `guards.shifted_exp`."""
    return jnp.exp(jnp.minimum(exponents - largest, 0.0))


class Found(NamedTuple):
    """A feature map that kernels compute, its W, and its b, zero if it has none."""

    block_map: BlockMap
    projection: Float[Array, "features head_dim"]
    bias: Float[Array, " features"]


def find_map(
    feature_map: feature_maps.FeatureMap, *, causal: bool = False
) -> Found | None:
    """Returns what kernels need of a feature map, or None if they cannot compute it.

    They need a `functools.partial` with the projection as a keyword.

    Example:
        >>> phi = functools.partial(feature_maps.relu_features, projection=jnp.eye(3))
        >>> find_map(phi).block_map
        ReluMap(eps=0.001)
    """
    if not isinstance(feature_map, functools.partial) or feature_map.args:
        return None
    options = dict(feature_map.keywords)
    projection = options.pop("projection", None)
    if jnp.ndim(projection) != 2:
        return None
    projection = jnp.asarray(projection)
    bias, block_map = jnp.zeros(len(projection), projection.dtype), None
    if feature_map.func is feature_maps.positive_features:
        # Another eps would be the exponent of one more exponential.
        if not options.pop("eps", 0):
            block_map = PositiveMap(math.inf if causal else 0.0)
    elif feature_map.func is feature_maps.relu_features:
        given, eps = options.pop("bias", None), options.pop("eps", 1e-3)
        bias = bias if given is None else jnp.asarray(given)
        # A constant of the kernel.
        if isinstance(eps, int | float):
            block_map = ReluMap(float(eps))
    elif feature_map.func is feature_maps.trigonometric_features:
        bias = jnp.concatenate([bias, bias - 0.5 * math.pi])
        projection = jnp.concatenate([projection, projection])
        block_map = TrigonometricMap()
    # Other options change the features.
    if block_map is None or any(option is not None for option in options.values()):
        return None
    return Found(block_map, projection, bias) if bias.ndim == 1 else None
