"""How much arithmetic a step is, and how much of it a device can do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

# Peak operations a second of a device as JAX counts them, dense products in bfloat16
# (V100: float16), from the makers' data sheets.
# A part of a GPU (MIG) has none here. A device of TPU7x is one of its chip's two cores.
PEAKS = (
    (r"MIG", None),
    (r"B200", 2250e12),
    (r"H[12]00 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H100|H200|H800|GH200", 989e12),
    (r"A100|A800", 312e12),
    (r"A30\b", 165e12),
    (r"L40S", 362e12),
    (r"L4\b", 121e12),
    (r"V100", 125e12),
    (r"TPU7x", 1153e12),
    (r"TPU v6", 918e12),
    (r"TPU v5 lite|TPU v5e", 197e12),
    (r"TPU v5", 459e12),
    (r"TPU v4 lite|TPU v4i", 138e12),
    (r"TPU v4", 275e12),
    (r"TPU v3", 61.5e12),
    (r"TPU v2", 22.5e12),
)


def peak_flops(device_kind: str) -> float | None:
    """The most operations a second that a device does, by its maker.

    Args:
        device_kind: As JAX names it.

    Returns:
        Of dense products in bfloat16; None where it is not known, as of CPUs.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
        (989000000000000.0, None)
    """
    for pattern, peak in PEAKS:
        if re.search(pattern, device_kind):
            return peak
    return None


def training_flops(model: nn.Module, inputs: jax.ShapeDtypeStruct) -> int:
    """Operations of a model's matrix products, forward and backward.

    Three times those of the forward pass: the backward pass has two products for each,
    one by its inputs and one by its weights. What is computed anew to save memory does
    not count.

    Args:
        model: Called on the inputs, with ``deterministic=True``.
        inputs: Their shape and dtype, of one example or more.

    Returns:
        The number, of all these examples.

    Example:
        >>> images = jax.ShapeDtypeStruct((2, 3), "float32")
        >>> class Head(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x, *, deterministic=True):
        ...         return nn.Dense(5)(x)
        >>> training_flops(Head(), images)
        180

    Source:
        Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, appendix B.
    """
    key = jax.random.key(0)
    rngs = {"params": key, "random_features": key}
    variables = jax.eval_shape(lambda: model.init(rngs, _zeros(inputs)))
    return 3 * matmul_flops(model.apply, variables, _zeros(inputs))


def _zeros(inputs: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(inputs.shape, inputs.dtype)


def matmul_flops(function: Callable[..., Any], *arguments: Any) -> int:
    """Floating-point operations of a function's matrix products and convolutions.

    A product of [m, k] and [k, n] counts 2 m k n. The body of a scan counts as often as
    it runs, that of a while loop of unknown length once, of a branch the dearest.

    Args:
        function: Of JAX.
        *arguments: Arrays, or their shapes and dtypes.

    Returns:
        The number of operations of one call.

    Example:
        >>> import jax.numpy as jnp
        >>> matmul_flops(jnp.matmul, jnp.ones((3, 5)), jnp.ones((5, 7)))
        210
    """
    return _count(jax.make_jaxpr(function)(*arguments).jaxpr)


def _count(jaxpr: Jaxpr) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    out = equation.outvars[0].aval if equation.outvars else None
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * out.size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        channels = kernel.shape[parameters["dimension_numbers"].rhs_spec[0]]
        return 2 * out.size * kernel.size // channels
    inner = [_count(jaxpr) for jaxpr in _jaxprs(parameters)]
    if name == "cond":
        return max(inner)
    return parameters.get("length", 1) * sum(inner) if name == "scan" else sum(inner)


def _jaxprs(parameters: dict[str, Any]) -> list[Jaxpr]:
    found = []
    for value in jax.tree.leaves(
        list(parameters.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)
    ):
        if isinstance(value, ClosedJaxpr):
            value = value.jaxpr
        if isinstance(value, Jaxpr):
            found.append(value)
    return found
