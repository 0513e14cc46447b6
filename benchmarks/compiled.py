"""Compiles kernels and training steps for a TPU or GPU; the machine needs neither.

    python -m benchmarks.compiled --target=v5e --only='linear@*,vit_*' --output=DIR

A row is a kernel's forward and backward pass, or a whole training step: forward,
backward and update. DIR/compiled_v5e.json is written after every row; rows that it has
are compiled again only if ``--only`` names them. Nothing runs, so times are modelled:

    limit = max(flops / peak, bytes of arguments and results / bandwidth)
    time = max(flops / peak, bytes moved / bandwidth) + launch x executed instructions

and the roofline share is limit / time. The launch is an assumption: 1 us on a TPU, 2 us
on a GPU. For a GPU, XLA chooses kernels without measuring them, and matrix products are
those of cuBLAS: Triton's need a measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from benchmarks.hlo import count_executed
from benchmarks.measure import forward_backward
from benchmarks.memory import abstract_step, describe_data
from benchmarks.speed_cases import CASES, Sizes
from relattn import command
from relattn.json_files import read_json
from relattn.kernels.platform import use_platform
from relattn.messages import closest
from relattn.training.config_file import read_config
from relattn.training.cost import matmul_flops, peak_flops
from relattn.training.mesh import MeshParallel
from relattn.training.task import Task
from relattn.training.workdir import usable_folder, write_json

_MEGABYTE = 1e6

# XLA's description of a GPU; sizes in bytes, from CUDA's properties of the device.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  l2_cache_size: 52428800
  memory_bandwidth: 3352320000000
  device_memory_size: 84978434048
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """An accelerator to compile for.

    Attributes:
        platform: ``"tpu"`` or ``"gpu"``.
        extra: Extra of JAX that installs its compiler.
        package: The package of the compiler, whose version a row has.
        topology: Arguments of `topologies.get_topology_desc` for the smallest system.
        bandwidth: Bytes per second of its memory, from the maker's data sheet.
        launch: Assumed seconds from one instruction to the next.
        options: Options of the compiler.
    """

    platform: str
    extra: str
    package: str
    topology: Mapping[str, str]
    bandwidth: float
    launch: float
    options: Mapping[str, bool] = dataclasses.field(default_factory=dict)


TARGETS = {
    "v5e": Target(
        platform="tpu",
        extra="tpu",
        package="libtpu",
        topology={"topology_name": "v5e:2x2", "platform": "tpu"},
        bandwidth=819e9,
        launch=1e-6,
    ),
    "h100": Target(
        platform="gpu",
        extra="cuda13",
        package="jax_cuda13_plugin",
        topology={
            "topology_name": "h100",
            "platform": "cuda",
            "topology": "1x1x1",
            "target_config": _H100,
        },
        bandwidth=3.35e12,
        launch=2e-6,
        options={"xla_gpu_enable_triton_gemm": False},
    ),
}


def _at(
    length: int, *kernels: str, suffix: str = "", **sizes: Any
) -> dict[str, tuple[str, Sizes]]:
    """Names kernels at a length."""
    return {
        f"{kernel}{suffix}@{length}": (kernel, Sizes(length, **sizes))
        for kernel in kernels
    }


_LINEAR = ("linear", "causal_linear")
_SOFTMAX = ("softmax", "causal_softmax")
_BIASES = ("toeplitz", "causal_toeplitz", "relative_bias", "causal_relative_bias")
# Kernels that only GPUs have.
_PALLAS = ("linear_pallas", "causal_linear_pallas")
_PALLAS_BIASES = ("relative_bias_pallas", "causal_relative_bias_pallas")
_WIDE = {"num_heads": 3, "head_dim": 64}
# Sizes as in docs/speed.md, and for Translution the batches that its paper states for
# ImageNet and OpenWebText.
KERNELS: dict[str, tuple[str, Sizes]] = {
    **_at(4096, *_LINEAR, *_SOFTMAX),
    **_at(16384, *_LINEAR, *_SOFTMAX),
    **_at(16384, *_LINEAR, *_SOFTMAX, suffix="_bfloat16", dtype="bfloat16"),
    **_at(4096, *_BIASES),
    **_at(16384, *_BIASES[:2]),
    **_at(4096, *_PALLAS_BIASES),
    **_at(16384, *_PALLAS, "softmax_pallas", "causal_softmax_pallas"),
    **_at(1024, "banded", "banded_torus", "relative_bias_torus", batch=8),
    **_at(49, "self_attention", "lor_translution", "translution", batch=256, **_WIDE),
    **_at(49, "lor_translution_torus", "translution_torus", batch=256, **_WIDE),
    **_at(49, "lor_translution_pallas", batch=256, **_WIDE),
    **_at(144, "lor_translution", "translution", batch=256, **_WIDE),
    **_at(144, "lor_translution_pallas", batch=256, **_WIDE),
    **_at(160, "causal_lor_translution", "causal_translution", batch=8, **_WIDE),
    **_at(160, "causal_lor_translution_pallas", batch=8, **_WIDE),
}
STEPS = {
    "performer_learnable_sincos": "configs/performer.py:mnist,learnable_sincos",
    "performer_constrained_sincos": "configs/performer.py:mnist,constrained_sincos",
    "performer_banded": "configs/performer.py:mnist,banded",
    "linformer": "configs/baselines.py:linformer,mnist",
    "routing": "configs/baselines.py:routing,mnist",
    **{
        f"rpe_vit_{attention}_{position}": (
            f"configs/rpe_vit.py:mnist,{attention},{position}"
        )
        for attention, position in (("favor", "rope2d"), ("relu", "string_gate"))
    },
    **{
        f"{model}_{method}": f"configs/{config},{method}"
        for model, config in (
            ("vit_a12", "translution_vit.py:static,A/12"),
            ("gpt_a160", "translution_gpt.py:openwebtext,A-160"),
        )
        for method in ("self_attention", "lor_translution", "translution")
    },
}
# The same with kernels for GPUs that are off by default.
STEPS |= {
    f"{name}_pallas": STEPS[name]
    for name in ("vit_a12_lor_translution", "gpt_a160_lor_translution")
}
ROWS = (*KERNELS, *STEPS)


def row_platform(name: str, platform: str) -> Any:
    """Returns the context in which a row is traced.

    Args:
        name: One of `ROWS`. A kernel chooses its form itself, a step by its name.
        platform: ``"gpu"`` or ``"tpu"``.
    """
    fused = {"fused_translution": True} if name.endswith("_pallas") else {}
    return use_platform(platform, **fused)


def describe_device(target: Target) -> jax.Device:
    """Returns a device of a system that the machine need not have.

    Args:
        target: The accelerator.

    Returns:
        The device; JAX compiles for it, but cannot run on it.

    Raises:
        ImportError: If its compiler is not installed.
    """
    if importlib.util.find_spec(target.package) is None:
        raise ImportError(
            f"benchmarks.compiled needs {target.package}: pip install "
            f"'jax[{target.extra}]'"
        )
    # Else libtpu asks Google Cloud which machine this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # JAX registers the plugins of GPUs when it first lists devices.
    jax.devices("cpu")
    return topologies.get_topology_desc(**target.topology).devices[0]


def compile_row(name: str, target: Target, device: jax.Device) -> dict[str, Any]:
    """Compiles a kernel or a training step.

    Args:
        name: One of `ROWS`.
        target: What to compile for.
        device: Its device, see `describe_device`.

    Returns:
        ``seconds`` to trace and compile, ``code_mb``, ``temporary_mb``, the number of
        executed ``instructions`` and the ``moved_mb`` of `count_executed`, ``gflops``
        of matrix products, ``limit_ms``, ``time_ms`` and ``roofline_share`` of the
        model above, and the versions; or the versions and ``failed``, the compiler's
        reason.
    """
    make = _kernel if name in KERNELS else _step
    row = {
        "jax": jax.__version__,
        target.package: importlib.metadata.version(target.package),
    }
    # From JAX 0.12 on, Pallas needs a device that a mesh names. Steps have their own.
    mesh = Mesh([device], "d").abstract_mesh if name in KERNELS else None
    named = jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext()
    with row_platform(name, target.platform), named:
        function, arguments = make(name, device)
        start = time.perf_counter()
        try:
            compiled = function.lower(*arguments).compile(dict(target.options))
        except jax.errors.JaxRuntimeError as error:
            return {"failed": command.one_line(error), **row}
        seconds = time.perf_counter() - start
        flops = matmul_flops(function, *arguments)
    memory = compiled.memory_analysis()
    instructions, moved = count_executed(compiled.as_text())
    needed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    computing = flops / peak_flops(device.device_kind)
    limit = max(computing, needed / target.bandwidth)
    modelled = max(computing, moved / target.bandwidth)
    modelled += target.launch * instructions
    return {
        "seconds": round(seconds, 1),
        "code_mb": round(memory.generated_code_size_in_bytes / _MEGABYTE, 2),
        "temporary_mb": round(memory.temp_size_in_bytes / _MEGABYTE, 2),
        "instructions": instructions,
        "moved_mb": round(moved / _MEGABYTE, 2),
        "gflops": round(flops / 1e9, 3),
        "limit_ms": round(1e3 * limit, 4),
        "time_ms": round(1e3 * modelled, 4),
        "roofline_share": round(limit / modelled, 4),
        **row,
    }


def _kernel(name: str, device: jax.Device) -> tuple[Callable[..., Any], list[Any]]:
    kernel, sizes = KERNELS[name]
    function, inputs = CASES[kernel].make(sizes)
    out = jax.eval_shape(function, *inputs)
    sharding = NamedSharding(Mesh([device], "d"), PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        [out, *inputs],
    )
    return jax.jit(forward_backward(function)), arguments


def _step(name: str, device: jax.Device) -> tuple[Callable[..., Any], Sequence[Any]]:
    config = read_config(STEPS[name], [])
    # MNIST, and the tokens of GPT-2.
    info = describe_data(config, num_classes=10, vocab_size=50257, channels=1)
    return abstract_step(Task.build(config, info), MeshParallel([device]))


def choose_rows(only: str, done: Iterable[str]) -> list[str]:
    """Chooses the rows to compile.

    Args:
        only: Patterns of names, separated by commas, such as ``"linear@*"``; or empty.
        done: Rows that are compiled already.

    Returns:
        The rows that the patterns match; without patterns those that are missing.

    Raises:
        ValueError: If a pattern matches none.

    Example:
        >>> choose_rows("translution@*,vit_a12_self*", [])
        ['translution@49', 'translution@144', 'vit_a12_self_attention']
    """
    if not only:
        return [name for name in ROWS if name not in set(done)]
    patterns = [pattern.strip() for pattern in only.split(",")]
    for pattern in patterns:
        if not fnmatch.filter(ROWS, pattern):
            hint = closest(pattern, ROWS)
            raise ValueError(f"--only={only}: no row {pattern!r}: {hint}")
    return [
        name
        for name in ROWS
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


def describe(row: dict[str, Any]) -> str:
    """Describes a row in a line.

    Args:
        row: The output of `compile_row`.

    Returns:
        Its numbers, or why it failed.
    """
    if "failed" in row:
        return f"failed: {row['failed']}"
    return (
        f"{row['seconds']:.1f} s, {row['code_mb']:.1f} MB of code, "
        f"{row['temporary_mb']:,.1f} MB temporary, {row['instructions']:,} "
        f"instructions, {row['moved_mb']:,.1f} MB moved, {row['gflops']:,.1f} GFLOP, "
        f"{row['roofline_share']:.0%} of the roofline"
    )


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Compiles rows, prints them and writes them as JSON."""
    parser = command.Parser("python -m benchmarks.compiled", __doc__)
    add = parser.add_argument
    add("--target", choices=TARGETS, default="v5e", help="what to compile for")
    add(
        "--only",
        default="",
        help=f"patterns of rows, separated by commas: {', '.join(ROWS)}",
    )
    add("--output", default="runs/compiled", help="output folder")
    given = parser.parse_args(argv)
    path = usable_folder(given.output, "--output") / f"compiled_{given.target}.json"
    rows = read_json(path, {"*": dict}) if path.exists() else {}
    target = TARGETS[given.target]
    names = [
        name
        for name in choose_rows(given.only, rows)
        if target.platform == "gpu" or "_pallas" not in name
    ]
    jax.config.update("jax_platforms", "cpu")
    device = describe_device(target)
    # A cached program would take no time.
    jax.config.update("jax_enable_compilation_cache", False)
    with tqdm(names, unit=" rows", disable=None) as progress:
        for name in progress:
            progress.set_description(name)
            rows[name] = compile_row(name, target, device)
            tqdm.write(f"{name}: {describe(rows[name])}")
            write_json(path, {row: rows[row] for row in ROWS if row in rows})
            jax.clear_caches()
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
