"""The cost of training: operations and memory, and what a device can do."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

# JAX 0.12 exports Jaxpr under this name too, which pyright takes for private.
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]

from relattn.training.step import TrainState

# The memory limit of a container, in bytes.
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

# Peak operations per second of dense bfloat16 products (V100: float16) on a JAX device,
# from the makers' data sheets; unknown for a part of a GPU (MIG). A device of TPU7x is
# one of its chip's two cores.
PEAKS = (
    (r"MIG", None),
    (r"B200", 2250e12),
    (r"H[12]00 NVL", 835e12),
    (r"H100 PCIe", 756e12),
    (r"H100|H200|H800|GH200", 989e12),
    (r"A[18]00(?!0)", 312e12),
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
    """Returns the peak operations per second of a device, from its data sheet.

    Args:
        device_kind: JAX's name of the device.

    Returns:
        The peak of dense bfloat16 products; None if it is not known, as for CPUs.

    Example:
        >>> peak_flops("NVIDIA H100 80GB HBM3"), peak_flops("cpu")
        (989000000000000.0, None)
    """
    for pattern, peak in PEAKS:
        if re.search(pattern, device_kind):
            return peak
    return None


def training_flops(model: nn.Module, inputs: jax.ShapeDtypeStruct) -> int:
    """Counts the operations of a model's matrix products in a training step.

    The count is three times that of the forward pass: for each product, the backward
    pass has two, for the gradients of its inputs and of its weights. Recomputation to
    save memory does not count.

    Args:
        model: A model, called on the inputs with ``deterministic=True``.
        inputs: The shape and dtype of one or more examples.

    Returns:
        The number of operations for all these examples.

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
    """Counts the operations of a function's matrix products and convolutions.

    A product of [m, k] and [k, n] counts 2 m k n. The body of a scan counts once for
    each iteration, that of a while loop of unknown length once; of branches, the most
    expensive counts.

    Args:
        function: A JAX function.
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
    if name == "dot_general":
        out = equation.outvars[0].aval
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * out.size * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        out = equation.outvars[0].aval
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


def state_bytes(state: TrainState) -> int:
    """Counts the bytes of the parameters, their gradients and the optimiser's state.

    This is the least memory of an update; activations need more.

    Args:
        state: Arrays, or their shapes and dtypes.

    Returns:
        The bytes on one device.

    Example:
        >>> params = {"w": jax.ShapeDtypeStruct((3, 5), "float32")}
        >>> state_bytes(TrainState(0, params, (params, params), {}, {}))
        240
    """
    return 2 * tree_bytes(state.params) + tree_bytes(
        (state.opt_state, state.collections, state.ema)
    )


def tree_bytes(tree: Any) -> int:
    """Counts the bytes of the arrays of a pytree.

    Args:
        tree: Arrays, or their shapes and dtypes.

    Returns:
        The sum.

    Example:
        >>> tree_bytes({"w": jax.ShapeDtypeStruct((3, 5), "float32")})
        60
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def device_bytes(device: Any) -> int | None:
    """Returns the bytes of memory that a device may use; for a CPU, the machine's.

    Args:
        device: A JAX device.

    Returns:
        The bytes; None if they are not known.
    """
    if device.platform == "cpu":
        return _host_bytes()
    return (device.memory_stats() or {}).get("bytes_limit")


def _host_bytes() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        # The file holds "max" if the container has no limit.
        return min(total, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


def warn_if_too_large(state: TrainState, devices: Sequence[Any]) -> None:
    """Warns if a training state does not fit on the devices.

    Args:
        state: Shapes and dtypes of the state on one device.
        devices: The JAX devices to train on.
    """
    device = devices[0]
    available = device_bytes(device)
    # The devices of a CPU share the machine's memory.
    copies = len(devices) if device.platform == "cpu" else 1
    needed = copies * state_bytes(state)
    if available is None or needed <= available:
        return
    on_devices = f" on {copies} devices" if copies > 1 else ""
    warnings.warn(
        f"the parameters, their gradients and the optimiser's state need "
        f"{_gigabytes(needed)}{on_devices}, but {device.device_kind} has "
        f"{_gigabytes(available)}: expect to run out of memory; choose a smaller "
        "config.model or a device with more memory",
        stacklevel=2,
    )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
