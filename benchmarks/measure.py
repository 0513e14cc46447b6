"""Measures the time and memory of one kernel, for `benchmarks.speed`.

``python -m benchmarks.measure REQUEST`` takes a JSON object with the arguments of
`measure` and prints the result as the last line.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device_time import times_ms
from benchmarks.speed_cases import CASES, Case, Sizes
from relattn import command
from relattn.training.workdir import describe_cpu

# A function to time, and the bytes that XLA plans for it beside the inputs.
_Prepared = tuple[Callable[[], Any], int | None]
_MEGABYTE = 1e6
# No further repeat starts after this time.
_LONGEST_SECONDS = 60.0


def measure(
    kernel: str, sizes: dict[str, Any], *, repeats: int = 5, backward: bool = True
) -> dict[str, Any]:
    """Measures a kernel's time and its peak memory beyond the inputs.

    On a CPU the peak is that of the process, without compilation. Elsewhere, where no
    peak can be reset and tests of the compiler count too, it is what XLA plans, and for
    PyTorch what it allocates.

    Args:
        kernel: Key of `CASES`.
        sizes: The fields of `Sizes`.
        repeats: Number of runs after the first; the result is their median.
        backward: If True, also measures forward + backward.

    Returns:
        Times in milliseconds, memory in megabytes and ``machine``; or ``machine`` and
        ``skipped``, the reason why nothing was measured.

    Example:
        >>> row = measure("linear", {"length": 8, "head_dim": 4}, repeats=1)
        >>> row["forward_ms"] > 0 and "forward_backward_memory_mb" in row
        True
    """
    case, sizes = CASES[kernel], Sizes(**sizes)
    device = jax.devices()[0]
    row = {"machine": describe_machine(device)}
    if missing := case.missing():
        return row | {"skipped": f"{' and '.join(missing)} not installed"}
    needed = case.needs(sizes)[backward]
    available = _available_bytes(device)
    if needed > available:
        return row | {
            "skipped": f"about {needed / 1e9:.1f} GB for pairs do not fit in the "
            f"{available / 1e9:.1f} GB available"
        }
    prepare = {"jax": _prepare_jax, "torch": _prepare_torch}[case.framework]
    for name, (run, planned) in prepare(case, sizes, backward).items():
        base = _start_peak(device, case.framework)
        run()
        used = peak_memory(device, case.framework) - base
        if planned is not None and device.platform != "cpu":
            used = planned
        row[f"{name}_memory_mb"] = max(0, used) / _MEGABYTE
        times = times_ms(run, repeats, _LONGEST_SECONDS)
        row[f"{name}_ms"] = statistics.median(times)
        row[f"{name}_fastest_ms"] = min(times)
        row[f"{name}_repeats"] = len(times)
    return row


def describe_machine(device: jax.Device) -> dict[str, Any]:
    """Describes the machine: processor, cores, device and versions."""
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    for package in ("torch", "performer-pytorch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        **describe_cpu(),
        "platform": device.platform,
        "device": device.device_kind,
        **versions,
    }


def forward_backward(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Adds the backward pass to a function.

    Args:
        function: A function of arrays.

    Returns:
        A function of the gradient of the output and the arrays, which returns the
        output and the gradients of the arrays.

    Example:
        >>> float(forward_backward(jnp.square)(1.0, 3.0)[1][0])
        6.0
    """

    def both(cotangent, *inputs):
        out, pull_back = jax.vjp(function, *inputs)
        return out, pull_back(cotangent)

    return both


def _prepare_jax(case: Case, sizes: Sizes, backward: bool) -> dict[str, _Prepared]:
    """Makes compiled functions that block until the result is ready."""
    function, inputs = case.make(sizes)
    programs = {"forward": (function, inputs)}
    if backward:
        out = jax.eval_shape(function, *inputs)
        inputs = [jnp.ones(out.shape, out.dtype), *inputs]
        programs["forward_backward"] = (forward_backward(function), inputs)

    def prepared(function: Callable, inputs: Sequence[Any]) -> _Prepared:
        # Compiled ahead of time, so that the compiler's memory is not counted.
        compiled = jax.jit(function).lower(*inputs).compile()
        memory = compiled.memory_analysis()
        planned = memory.temp_size_in_bytes + memory.output_size_in_bytes
        return lambda: jax.block_until_ready(compiled(*inputs)), planned

    return {name: prepared(*program) for name, program in programs.items()}


def _prepare_torch(case: Case, sizes: Sizes, backward: bool) -> dict[str, _Prepared]:
    """Makes functions to time, after a warm-up call."""
    import torch

    torch.set_num_threads(describe_cpu()["cores"])
    forward, forward_backward = torch_passes(case, sizes)

    def finished(run):
        def run_and_wait():
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        return run_and_wait

    return {"forward": (finished(forward), None)} | (
        {"forward_backward": (finished(forward_backward), None)} if backward else {}
    )


def torch_passes(case: Case, sizes: Sizes) -> tuple[Callable, Callable]:
    """Makes the forward, and the forward and backward pass of a case in PyTorch.

    Args:
        case: A case whose framework is PyTorch.
        sizes: Sizes of the inputs.

    Returns:
        Two functions without arguments, after one call of the first. On a GPU they
        do not wait for the result.
    """
    import torch

    function, inputs = case.make(sizes)

    def forward():
        with torch.no_grad():
            return function(*inputs)

    cotangent = torch.ones_like(forward())

    def forward_backward():
        return torch.autograd.grad(function(*inputs), inputs, cotangent)

    return forward, forward_backward


def _available_bytes(device: jax.Device) -> int:
    statistics = device.memory_stats()
    if statistics and "bytes_limit" in statistics:
        return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
    information = Path("/proc/meminfo")
    if not information.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1024 * _kilobytes(information, "MemAvailable")


def _kilobytes(path: Path, field: str) -> int:
    """Reads a field of a file such as /proc/meminfo, in kB."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise ValueError(f"{path} has no field {field}")


def _start_peak(device: jax.Device, framework: str = "jax") -> int:
    """Resets `peak_memory` if the system allows it; returns the bytes in use."""
    if framework == "torch" and device.platform == "gpu":
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    try:
        # Free memory that malloc keeps would hide the use of the next run.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return 1024 * _kilobytes(Path("/proc/self/status"), "VmRSS")
    except (OSError, AttributeError):
        return peak_memory(device)


def peak_memory(device: jax.Device, framework: str = "jax") -> int:
    """Returns the peak number of bytes in use, of the process or of PyTorch's GPU."""
    if framework == "torch" and device.platform == "gpu":
        import torch

        return torch.cuda.max_memory_allocated()
    # ru_maxrss would include the parent's memory at the fork.
    status = Path("/proc/self/status")
    if status.exists():
        return 1024 * _kilobytes(status, "VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints one measurement."""
    parser = command.Parser("python -m benchmarks.measure", __doc__)
    parser.add_argument("request", type=_request, help="a JSON object")
    print(json.dumps(measure(**parser.parse_args(argv).request)))


def _request(text: str) -> dict[str, Any]:
    request = json.loads(text)
    if not isinstance(request, dict) or request.get("kernel") not in CASES:
        raise ValueError("no such request")
    return request


if __name__ == "__main__":
    main()
