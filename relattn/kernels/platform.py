"""Defaults that depend on the platform, with the measurements behind them.

Every form computes the same function. It is chosen when a kernel is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from relattn.messages import check_choice

# A platform and changes of its defaults. Part of the key of `jax.jit`'s cache, unlike a
# global variable.
_PLATFORM = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class PlatformDefaults:
    """How kernels compute on a platform.

    The comment at each field has the measurements behind its values: numbers *on* a
    device were measured, numbers *for* a device follow from the compiled program.

    Attributes:
        block_scores: Largest number of scores of softmax attention in memory at once;
            more are computed in blocks of queries.
        flash_length: Number of keys from which softmax attention without masks or bias
            is flash attention; None for never.
        linear_chunk: Number of tokens whose features linear attention computes at a
            time.
        causal_chunk: Number of tokens in a chunk of causal linear attention.
        pairs_size: Number of tokens up to which linear attention with an offset bias
            sums pair by pair, not by FFT.
        gather_bias: Whether a gather takes an offset bias to its pairs; otherwise
            slices do.
        causal_in_vmem: Whether kernels for TPUs keep the features and sums of causal
            linear attention in VMEM.
        fused_linear: Whether kernels for GPUs compute linear attention with positive,
            trigonometric or ReLU features, causal or not, with key masks and segments,
            without writing features to memory.
        fused_softmax: Whether kernels for GPUs compute softmax attention without a mask
            of pairs, but with key masks, segments and an offset bias. Without any of
            these, cuDNN still computes it in half precision.
        fused_translution: Whether kernels for GPUs compute Translution of tokens of at
            most 128 components, such as the low-rank tokens of LoR-Translution, without
            writing the projections of pairs to memory.
        translution: How Translution and LoR-Translution compute: ``"offsets"``, a loop
            over the offsets; ``"rows"``, over rows of queries; or ``"pairs"``, blocks
            of queries with a matrix for every pair or, if causal, blocks of offsets.
        pair_bytes: Largest number of bytes of the matrices and projections of a block
            of pairs.
        unroll_layers: Whether equal layers of a model, compiled as a loop, are unrolled
            unless they are expensive to compile.
    """

    # Forward and backward on a CPU, batch 2 and 8 heads of 32, 4,096 tokens: 0.95 times
    # the time of all scores at once, with 67 MB of temporaries instead of 4.3 GB; 1.1
    # times at batch 64, 4 heads of 16 and 257 tokens. With an offset bias, 32x32 tokens
    # and CLS: 0.96 times, and 2.3 times with 2^24 scores instead of 2^22. For a v5e,
    # blocks of 2^22 scores stay in VMEM: with an offset bias and 4,096 tokens, forward
    # and backward move 2.3 instead of 46.1 GB. On an H200, 16 times 4,096 tokens, 8
    # heads of 64, float32, forward and backward: 84 ms, 6% of what the card can do.
    block_scores: int = 2**24
    # For a v5e, float32, 8 heads of 32, forward and backward: 23 executed instructions
    # and 2.8 GB moved at 16,384 tokens, instead of 8,205 and 0.7 GB in blocks; 30 and
    # 1.2 GB at 4,096 tokens (batch 2) instead of 1,039 and 0.07 GB. With a bias it
    # moves 8.9 instead of 2.8 GB there, and takes 2.4 instead of 0.03 GB of
    # temporaries. On an H200, 16 times 4,096 tokens, 8 heads of 64, bfloat16, forward
    # and backward: 4.6 ms, and 64 ms in blocks with an offset bias.
    flash_length: int | None = None
    # For a v5e, 4,096 tokens, forward and backward: 31 executed instructions and 92 MB
    # moved, instead of 462 and 67 MB in chunks of 512. For an H100, 16,384 tokens: 33
    # and 4.1 GB, with 463 MB of temporaries, instead of 213, 6.9 GB and 206 MB in
    # chunks of 4,096.
    linear_chunk: int = 4096
    # For a v5e, 4,096 tokens: 351 executed instructions and 84 MB moved, instead of 661
    # and 67 MB in chunks of 64.
    causal_chunk: int = 128
    # Modelled for a v5e: the pairs of 65,536 tokens, 110 features and heads of 32 are
    # 1.2 TFLOP a head, 6 ms at its peak; to write the FFT's 3.8 GB of spectra once
    # takes 5 ms. On CPUs, forward and backward, pairs of 16,384 tokens take 0.4 times
    # the time of FFTs, and those of 32,768 as long, in less memory.
    pairs_size: int = 65536
    # On CPUs up to twice as fast as slices. Its derivative is a scatter: hundreds of
    # times slower on GPUs with jaxlib 0.10.2 to 0.11.0; for a v5e with 32x32 tokens,
    # forward and backward move 2.3 times the bytes of slices.
    gather_bias: bool = False
    # For a v5e, 16,384 tokens: half of the bytes moved, and a fifth of the time to
    # compile. Not yet run on a device.
    causal_in_vmem: bool = False
    # A prototype with positive features on an H200 with jax 0.11.2, 16,384 tokens,
    # batch 2, 8 heads of 64 and 256 features: causal, bfloat16, forward 1.02 instead of
    # 2.78 ms and with backward 2.2 instead of 8.5 (cuDNN's causal softmax attention:
    # 1.34 and 4.6); float32 1.54 instead of 2.91 and 6.0 instead of 9.0; not causal,
    # forward, bfloat16 0.77 instead of 1.44, float32 1.11 instead of 1.48. These
    # kernels themselves have not yet run on a device.
    fused_linear: bool = False
    # For an H100, float32, forward and backward: 0.25 instead of 29.5 GB moved with a
    # bias at 4,096 tokens, and 0.58 instead of 336 GB without one at 16,384. Not yet
    # run on a device.
    fused_softmax: bool = False
    # For an H100, 7x7 tokens and CLS, batch 256, forward and backward: 1.1 instead of
    # 2.4 GB moved; a training step of ViT-A/12 moves 11.7 instead of 19.0 GB, one of
    # GPT-A-160 5.5 instead of 7.4 GB. Not yet run on a device.
    fused_translution: bool = False
    # For a v5e, 7x7 tokens and CLS, batch 256, forward and backward, by rows: LoR takes
    # 49 instead of 273 s to compile, 671 instead of 10,530 executed instructions and
    # 0.3 instead of 1.5 GB moved; Translution 27 instead of 424 s and 758 instead of
    # 10,653 instructions, but 19.3 instead of 2.1 GB. On a CPU, batch 8, rows take 1.4
    # and 1.9 times the time; on an H200 LoR takes 1.7 instead of 11.4 ms. For an H100,
    # by pairs: 79 instead of 405 executed instructions and 2.4 instead of 3.2 GB moved
    # with LoR; 153 instead of 356 and 20.9 instead of 31.8 GB with Translution; causal,
    # 160 tokens, batch 8, 84 instead of 593 and 0.6 instead of 1.7 GB, and 164 instead
    # of 554 and 3.8 instead of 35.1 GB. Pairs have not yet run on a device.
    translution: str = "rows"
    # All pairs of LoR-Translution above are one block, of 0.13 GB.
    pair_bytes: int = 2**29
    # A loop copies what the backward pass needs: 15% of a training step of ViT-A/12 on
    # a CPU core. For an H100, batch 256, unrolled: 537 instead of 844 executed
    # instructions, 9.6 instead of 16.3 GB moved, 1.1 instead of 1.9 GB of temporaries,
    # and 9 instead of 5 s to compile.
    unroll_layers: bool = False


PLATFORM_DEFAULTS = {
    "cpu": PlatformDefaults(
        block_scores=2**22,
        linear_chunk=512,
        causal_chunk=64,
        pairs_size=32768,
        gather_bias=True,
        translution="offsets",
        unroll_layers=True,
    ),
    "gpu": PlatformDefaults(
        flash_length=1, linear_chunk=16384, translution="pairs", unroll_layers=True
    ),
    "tpu": PlatformDefaults(block_scores=2**22, flash_length=2048, causal_in_vmem=True),
}


def current_platform() -> str:
    """Returns the platform to compile for: that of `use_platform`, or the default."""
    return _PLATFORM.value[0] if _PLATFORM.value else jax.default_backend()


def platform_defaults() -> PlatformDefaults:
    """Returns the defaults of `current_platform`; those of CPUs if it is unknown.

    Example:
        >>> with use_platform("tpu"):
        ...     platform_defaults() == PLATFORM_DEFAULTS["tpu"]
        True
    """
    _, changes = _PLATFORM.value or (None, ())
    found = PLATFORM_DEFAULTS.get(current_platform(), PLATFORM_DEFAULTS["cpu"])
    return dataclasses.replace(found, **dict(changes))


def use_platform(name: str, **changes: Any):
    """Returns a context in which kernels are traced for a platform.

    Needed to compile for a platform other than `jax.default_backend`, for example
    ahead of time, and to try other settings than the defaults of the platform.

    Args:
        name: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        **changes: Fields of `PlatformDefaults`, instead of the platform's.

    Returns:
        A context manager.

    Raises:
        ValueError: If the platform or a field is unknown.

    Example:
        >>> with use_platform("gpu", fused_linear=True):
        ...     current_platform(), platform_defaults().fused_linear
        ('gpu', True)
    """
    check_choice("platform", name, PLATFORM_DEFAULTS)
    fields = [field.name for field in dataclasses.fields(PlatformDefaults)]
    for field in changes:
        check_choice("setting", field, fields, " of a platform")
    return _PLATFORM((name, tuple(sorted(changes.items()))))


def has_program_per_device() -> bool:
    """Returns whether every device has a program of its own, as in `jax.pmap`.

    Only then can a Pallas kernel be part of it: the compiler cannot divide a kernel.
    `jax.shard_map` with ``check_vma`` does not count, also on one device, since it
    needs types of results.

    Returns:
        True if there is one device, or one program for each.
    """
    if _checks_what_varies():
        return False
    if jax.device_count() == 1:
        return True
    kinds = jax.sharding.get_abstract_mesh().axis_types
    manual = jax.sharding.AxisType.Manual
    return bool(kinds) and all(kind == manual for kind in kinds)


def _checks_what_varies() -> bool:
    """Returns whether this is traced in `jax.shard_map` with ``check_vma``."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names = [name for name, kind in kinds if kind == jax.sharding.AxisType.Manual]
    # Without check_vma, also in jax.pmap, nothing varies.
    return any(varying_axes(jax.lax.axis_index(name)) for name in names)


def varying_axes(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """Returns the axes of `jax.shard_map` with ``check_vma`` along which x varies."""
    # The name depends on the version of JAX.
    aval: Any = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    if hasattr(aval, "vma"):
        axes = aval.vma
    else:
        axes = aval.manual_axis_type and aval.manual_axis_type.varying
    return tuple(sorted(axes or ()))


def first_carry(body: Callable[..., Any], carry: Any, scanned: Any) -> Any:
    """Returns a carry with which `jax.lax.scan` can begin in `jax.shard_map`.

    With ``check_vma``, a carry must vary along the same axes before and after a step.
    Constants, with which most loops begin, vary along none.

    Args:
        body: Maps a carry and a slice of ``scanned`` to a carry and an output.
        carry: The first carry.
        scanned: What the loop goes through.

    Returns:
        The carry, which varies along all axes along which a carry after a step does.
    """
    if not _checks_what_varies():
        return carry
    first = jax.tree.map(lambda x: x[0], scanned)
    after = jax.tree.leaves(jax.eval_shape(body, carry, first)[0])
    axes = {axis for x in after for axis in varying_axes(x)}
    return _vary_along(axes, carry)


def vary_alike(*arrays: jax.Array | None) -> tuple[Any, ...]:
    """Returns arrays that vary along the axes along which one of them varies.

    For the arguments of a `jax.custom_vjp` in `jax.shard_map` with ``check_vma``, where
    a gradient must vary like its argument: the gradient of an array that is the same on
    all devices is summed outside of the function.

    Args:
        *arrays: The arguments.
    """
    axes = {axis for x in jax.tree.leaves(arrays) for axis in varying_axes(x)}
    return _vary_along(axes, arrays)


def _vary_along(axes: set[str], tree: Any) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes.difference(varying_axes(x))))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)
