"""Defaults that depend on the platform, each with its measurement.

Every form computes the same function. It is chosen when a kernel is traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

# A platform and changes of its defaults. Part of the key of `jax.jit`'s cache, unlike a
# global variable.
_PLATFORM = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class PlatformDefaults:
    """How kernels compute on a platform.

    Attributes:
        block_scores: Most scores of softmax attention that exist at once; more are
            computed in blocks of queries. Forward and backward on a CPU, batch 2 and 8
            heads of 32: 0.95 times the time of all scores at once at 4,096 tokens, with
            67 MB of temporaries instead of 4.3 GB; 1.1 times at batch 64, 4 heads of 16
            and 257 tokens. With an offset bias, 32x32 tokens and CLS: 0.96 times,
            with 2^24 scores instead of 2^22 2.3 times. For a v5e blocks of 2^22 scores
            stay in VMEM: with an offset bias, 4,096 tokens, forward and backward,
            they move 2.3 instead of 46.1 GB. On an H200, 16 times 4,096 tokens, 8 heads
            of 64, float32, forward and backward: 84 ms, 6% of what the card can do.
        flash_length: Number of keys from which softmax attention without masks or bias
            is flash attention; None for never. For a v5e, float32, 8 heads of 32,
            forward and backward, 23 executed instructions and 2.8 GB moved at 16,384
            tokens, instead of 8,205 and 0.7 GB in blocks, and 30 and 1.2 GB at 4,096
            (batch 2) instead of 1,039 and 0.07 GB. With a bias it moves 8.9 instead of
            2.8 GB there, and takes 2.4 instead of 0.03 GB of temporaries. On an H200,
            16 times 4,096 tokens, 8 heads of 64, bfloat16, forward and backward: 4.6
            ms, and in blocks with an offset bias 64 ms.
        linear_chunk: Number of tokens whose features linear attention computes at a
            time. For a v5e and 4,096 tokens, forward and backward, 31 executed
            instructions and 92 MB moved, instead of 462 and 67 MB in chunks of 512. For
            an H100 and 16,384 tokens 33 and 4.1 GB, with 463 MB of temporaries, instead
            of 213, 6.9 GB and 206 MB in chunks of 4,096.
        causal_chunk: Number of tokens in a chunk of causal linear attention. For a v5e
            and 4,096 tokens 351 executed instructions and 84 MB moved, instead of 661
            and 67 MB in chunks of 64.
        pairs_size: Number of tokens up to which linear attention with a bias of the
            offset sums pair by pair, not by FFT. Modelled for a v5e: the pairs of
            65,536 tokens, 110 features and heads of 32 are 1.2 TFLOP a head, 6 ms at
            its peak; to write the FFT's 3.8 GB of spectra once takes 5 ms.
        gather_bias: Whether a gather takes the bias of an offset to its pairs. On CPUs
            it is up to twice as fast as slices. Its derivative is a scatter: on GPUs
            with jaxlib 0.10.2 to 0.11.0 hundreds of times slower; for a v5e and 32x32
            tokens, both ways move 2.3 times the bytes of slices.
        causal_in_vmem: Whether kernels keep the features and sums of causal linear
            attention in VMEM. For a v5e and 16,384 tokens they move half of the bytes
            and compile in a fifth of the time. They ran on no device yet.
        fused_linear: Whether kernels for GPUs compute linear attention with positive,
            trigonometric or ReLU features, causal or not, with key masks and segments,
            without writing features to memory. A prototype with positive features on an
            H200 with jax 0.11.2, 16,384 tokens, batch 2, 8 heads of 64 and 256
            features: causal, bfloat16, forward 1.02 instead of 2.78 ms and with
            backward 2.2 instead of 8.5 (cuDNN's causal softmax attention 1.34 and 4.6);
            float32 1.54 instead of 2.91 and 6.0 instead of 9.0; not causal, forward,
            bfloat16 0.77 instead of 1.44, float32 1.11 instead of 1.48. These kernels
            themselves ran on no device yet.
        fused_softmax: Whether kernels for GPUs compute softmax attention without a mask
            of pairs, but with key masks, segments and a bias of the offset; in half
            precision without any of these cuDNN's remain. For an H100, float32, forward
            and backward, they move 0.25 instead of 29.5 GB with a bias at 4,096 tokens,
            and 0.58 instead of 336 GB without one at 16,384. They ran on no device yet.
        fused_translution: Whether kernels for GPUs compute LoR-Translution without
            writing the projections of pairs to memory. For an H100, 7x7 tokens and CLS,
            batch 256, forward and backward, they move 1.1 instead of 2.4 GB; a training
            step of ViT-A/12 moves 11.7 instead of 19.0 GB, one of GPT-A-160 5.5 instead
            of 7.4 GB. They ran on no device yet.
        translution: How Translution and LoR-Translution compute: ``"offsets"``, a loop
            over the offsets; ``"rows"``, over rows of queries; or ``"pairs"``, blocks
            of queries with a matrix for every pair, or, if causal, of offsets. For a
            v5e, 7x7 tokens and CLS, batch 256, forward and backward, LoR by rows takes
            49 instead of 273 s to compile, 671 instead of 10,530 executed instructions
            and 0.3 instead of 1.5 GB moved; Translution 27 instead of 424 s and 758
            instead of 10,653 instructions, but 19.3 instead of 2.1 GB. On a CPU, batch
            8, rows take 1.4 and 1.9 times the time; on an H200 LoR takes 1.7 instead of
            11.4 ms. For an H100 pairs have 79 instead of 405 executed instructions and
            move 2.4 instead of 3.2 GB with LoR; 153 instead of 356 and 20.9 instead of
            31.8 GB with Translution; causal, 160 tokens, batch 8, 84 instead of 593 and
            0.6 instead of 1.7 GB, and 164 instead of 554 and 3.8 instead of 35.1 GB.
            Pairs ran on no device yet.
        pair_bytes: Most bytes of the matrices and projections of a block of pairs. All
            pairs of LoR-Translution above are one block, of 0.13 GB.
        unroll_layers: Whether equal layers of a model, compiled as a loop, are unrolled
            unless they are expensive to compile. A loop copies what the backward pass
            needs: 15% of a training step of ViT-A/12 on a CPU core. For an H100, batch
            256, 537 instead of 844 executed instructions, 9.6 instead of 16.3 GB moved,
            1.1 instead of 1.9 GB of temporaries and 9 instead of 5 s to compile.
    """

    block_scores: int = 2**24
    flash_length: int | None = None
    linear_chunk: int = 4096
    causal_chunk: int = 128
    pairs_size: int = 65536
    gather_bias: bool = False
    causal_in_vmem: bool = False
    fused_linear: bool = False
    fused_softmax: bool = False
    fused_translution: bool = False
    translution: str = "rows"
    pair_bytes: int = 2**29
    unroll_layers: bool = False


PLATFORM_DEFAULTS = {
    "cpu": PlatformDefaults(
        block_scores=2**22,
        linear_chunk=512,
        causal_chunk=64,
        pairs_size=8192,
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
    if name not in PLATFORM_DEFAULTS:
        known = ", ".join(sorted(PLATFORM_DEFAULTS))
        raise ValueError(f"unknown platform {name!r}: choose one of {known}")
    fields = [field.name for field in dataclasses.fields(PlatformDefaults)]
    for field in changes:
        if field not in fields:
            known = ", ".join(fields)
            raise ValueError(f"unknown setting {field!r}: choose one of {known}")
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
