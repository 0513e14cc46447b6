"""Flash attention: cuDNN's or our kernels on GPUs, JAX's kernels on TPUs.

Only cuDNN's have run on a device, an H200, where they equal the reference. All have
only first derivatives, in reverse mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from relattn.kernels.platform import (
    current_platform,
    has_program_per_device,
    platform_defaults,
)
from relattn.kernels.precision import current_precision
from relattn.offsets import Grid

# Number of tokens in a block of the TPU's kernel.
_BLOCK = 512
# cuDNN takes head dimensions that are a multiple of this.
_CUDNN_WIDTH = 8
# JAX refuses the backward pass of cuDNN for lengths that are not a multiple of this.
_CUDNN_LENGTH = 2


def flash_branches(
    q: Array, k: Array, v: Array, *, causal: bool, precision: jax.lax.PrecisionLike
) -> dict[str, Callable[[Array, Array, Array], Array]]:
    """Finds the platform's flash attention for queries, keys and values.

    They must be long enough for it (`PlatformDefaults.flash_length`) and have one dtype
    and batch, and values as wide as keys. cuDNN computes in half precision only. A
    precision other than the default finds none.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, head_dim]``.
        causal: Whether a token attends only to itself and earlier tokens; then m is n.
        precision: Precision of the products; only the default finds flash attention.

    Returns:
        Branches of `jax.lax.platform_dependent`: one platform's, or none.

    Example:
        >>> x = jnp.ones((8192, 64), jnp.bfloat16)
        >>> flash_branches(x, x, x, causal=True, precision="highest")
        {}
    """
    shortest = platform_defaults().flash_length
    if any(is_symbolic_dim(size) for x in (q, k) for size in x.shape):
        return {}
    like = [(*x.shape[:-2], x.shape[-1], x.dtype) for x in (q, k, v)]
    if shortest is None or len(set(like)) > 1 or not q.size or k.shape[-2] < shortest:
        return {}
    if current_precision(precision) not in (None, "default", jax.lax.Precision.DEFAULT):
        return {}
    if current_platform() == "tpu":
        fits = q.shape[-1] <= 128 or q.shape[-1] % 128 == 0
        fits = fits and q.dtype in (jnp.float32, jnp.bfloat16)
        if fits and has_program_per_device():
            return {"tpu": functools.partial(attend_on_tpu, causal=causal)}
        return {}
    attend = functools.partial(attend_by_cudnn, causal=causal)
    try:
        # As in training, for which cuDNN takes fewer shapes.
        jax.eval_shape(lambda *inputs: jax.vjp(attend, *inputs)[0], q, k, v)
    except (RuntimeError, NotImplementedError):
        # No cuDNN, or it does not take such arrays.
        return {}
    return {"cuda": attend}


def fused_branches(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool,
    precision: jax.lax.PrecisionLike,
    bias: Array | None = None,
    grid: Grid | None = None,
    **options: Any,
) -> dict[str, Callable[..., Array]]:
    """Finds kernels for GPUs that take masks, segments and a bias of the offset.

    They are used where `PlatformDefaults.fused_softmax` says so.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, value_dim]``.
        causal: Whether a token attends only to itself and earlier tokens; then m is n.
        precision: Precision of the products.
        bias: The bias of the offset that the branches will get, or None.
        grid: Size of each axis of the tokens after the prefix; the kernels take at most
            two axes.
        **options: Other options of `relattn.kernels.pallas_gpu.softmax.attend_on_gpu`.

    Returns:
        Branches of `jax.lax.platform_dependent`, or none. Their arguments are q, k and
        v, and a key mask, segment numbers and a bias, each of which may be None.

    Example:
        >>> x = jnp.ones((7, 5))
        >>> fused_branches(x, x, x, causal=True, precision=None)
        {}
    """
    if not platform_defaults().fused_softmax or grid and len(grid) > 2:
        return {}
    from relattn.kernels import pallas_gpu

    if not pallas_gpu.is_available():
        return {}
    from relattn.kernels.pallas_gpu import softmax as fused

    if not fused.fits_gpu(q, k, v, bias, precision):
        return {}
    options |= {"causal": causal, "precision": precision, "grid": grid}
    return {"cuda": functools.partial(fused.attend_on_gpu, **options)}


def attend_by_cudnn(
    q: Float[Array, "*batch n head_dim"],
    k: Float[Array, "*batch m head_dim"],
    v: Float[Array, "*batch m head_dim"],
    *,
    causal: bool,
) -> Float[Array, "*batch n head_dim"]:
    """Computes softmax attention by cuDNN.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``, float16 or bfloat16.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, head_dim]``.
        causal: Whether a token attends only to itself and earlier tokens.

    Returns:
        Shape ``[*batch, n, head_dim]``.

    Raises:
        RuntimeError: If there is no cuDNN.
        NotImplementedError: If cuDNN does not take the dtype or ``head_dim``.
    """
    n, m, width = q.shape[-2], k.shape[-2], q.shape[-1]

    def pad(x):
        # Every head is a batch entry of one head, so that nothing is transposed.
        x = x.reshape(-1, x.shape[-2], 1, width)
        longer, wider = -x.shape[1] % _CUDNN_LENGTH, -width % _CUDNN_WIDTH
        return jnp.pad(x, [(0, 0), (0, longer), (0, 0), (0, wider)])

    q_heads, k_heads, v_heads = map(pad, (q, k, v))
    lengths = None
    # Causal queries do not see the zeros after the last key.
    if m % _CUDNN_LENGTH and not causal:
        lengths = jnp.full(len(k_heads), m, jnp.int32)
    out = jax.nn.dot_product_attention(
        q_heads,
        k_heads,
        v_heads,
        scale=width**-0.5,
        is_causal=causal,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return out[:, :n, :, :width].reshape(q.shape)


def attend_on_tpu(
    q: Float[Array, "*batch n head_dim"],
    k: Float[Array, "*batch m head_dim"],
    v: Float[Array, "*batch m head_dim"],
    *,
    causal: bool,
) -> Float[Array, "*batch n head_dim"]:
    """Computes softmax attention by the Pallas kernels of JAX for TPUs.

    Args:
        q: Queries, shape ``[*batch, n, head_dim]``, float32 or bfloat16.
        k: Keys, shape ``[*batch, m, head_dim]``.
        v: Values, shape ``[*batch, m, head_dim]``.
        causal: Whether a token attends only to itself and earlier tokens.

    Returns:
        Shape ``[*batch, n, head_dim]``.
    """
    # Pallas takes long to import.
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas

    n, m = q.shape[-2], k.shape[-2]

    def pad(x):
        x = x.reshape(-1, 1, *x.shape[-2:])
        return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[-2] % _BLOCK), (0, 0)])

    q_blocks, k_blocks, v_blocks = map(pad, (q, k, v))
    segments = None
    # Causal queries do not see the zeros after the last key.
    if m % _BLOCK and not causal:
        batch = len(q_blocks)
        exists = jnp.arange(k_blocks.shape[-2]) < m
        segments = pallas.SegmentIds(
            q=jnp.ones((batch, q_blocks.shape[-2]), jnp.int32),
            kv=jnp.broadcast_to(exists, (batch, len(exists))).astype(jnp.int32),
        )
    sizes = dict.fromkeys(pallas.BlockSizes.__dataclass_fields__, _BLOCK)
    out = pallas.flash_attention(
        q_blocks,
        k_blocks,
        v_blocks,
        segment_ids=segments,
        causal=causal,
        sm_scale=q.shape[-1] ** -0.5,
        block_sizes=pallas.BlockSizes(**sizes | {"block_b": 1}),
    )
    return out[..., :n, :].reshape(q.shape)
