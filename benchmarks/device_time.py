"""Device time of functions, and the peak rates of the device."""

from __future__ import annotations

import collections
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

# Calls of a function in one program: starting a program then costs little of its time.
CALLS = 10
# No further repeat starts after this time.
_LONGEST_SECONDS = 2.0


def compile_calls(
    function: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[Callable[[], Any], int]:
    """Compiles a program that calls a function `CALLS` times.

    Args:
        function: A function of arrays.
        inputs: The arrays.

    Returns:
        A function that runs the program, waits for it and returns the output of the
        last call; and the bytes that the program needs beside inputs and outputs.

    Example:
        >>> run, _ = compile_calls(jnp.square, [jnp.array(3.0)])
        >>> float(run())
        9.0
    """
    compiled = jax.jit(repeat(function, CALLS)).lower(*inputs).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(compiled(*inputs)), temporary


def repeat(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Returns a function that calls another one several times.

    Args:
        function: A function of arrays.
        calls: Number of calls.

    Returns:
        A function of the same arrays, with the output of the last call.

    Example:
        >>> float(repeat(jnp.square, 3)(jnp.array(3.0)))
        9.0
    """

    def repeated(*inputs):
        out = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *inputs)
        )

        def call(_, carry):
            # Without the barrier the compiler takes equal calls out of the loop.
            inputs, _ = jax.lax.optimization_barrier(carry)
            return inputs, function(*inputs)

        return jax.lax.fori_loop(0, calls, call, (inputs, out))[1]

    return repeated


def median_ms(run: Callable[[], Any], *, calls: int = CALLS, repeats: int = 5) -> float:
    """Times a program after a first run.

    Args:
        run: Runs the program and waits for it.
        calls: Number of calls in the program.
        repeats: Number of runs; fewer if they take long.

    Returns:
        Median milliseconds of a call.

    Example:
        >>> median_ms(lambda: time.sleep(0.01), calls=1, repeats=3) >= 10
        True
    """
    run()
    return statistics.median(times_ms(run, repeats, _LONGEST_SECONDS)) / calls


def times_ms(run: Callable[[], Any], repeats: int, longest: float) -> list[float]:
    """Times runs of a program, in milliseconds.

    Args:
        run: Runs the program and waits for it.
        repeats: Number of runs.
        longest: Seconds after which no further run starts.
    """
    times, start = [], time.perf_counter()
    while len(times) < repeats:
        before = time.perf_counter()
        run()
        after = time.perf_counter()
        times.append(1e3 * (after - before))
        if after - start > longest:
            break
    return times


def measure_ceilings(copied: int = 2**30, side: int = 8192) -> dict[str, float]:
    """Measures how fast the device copies and multiplies.

    Args:
        copied: Bytes of the array to copy.
        side: Rows and columns of the matrices.

    Returns:
        ``copy``, bytes read and written per second, and operations per second of
        products in ``float32``, ``tf32`` (what JAX's default precision takes for
        float32; on CPUs, float32 itself) and ``bfloat16``.

    Example:
        >>> sorted(measure_ceilings(2**10, 8))
        ['bfloat16', 'copy', 'float32', 'tf32']
    """
    x = jnp.ones(copied // 4, jnp.float32)
    run, _ = compile_calls(lambda x: x + 1, [x])
    ceilings = {"copy": 2e3 * copied / median_ms(run)}
    for name, dtype, precision in (
        ("float32", jnp.float32, "highest"),
        ("tf32", jnp.float32, "default"),
        ("bfloat16", jnp.bfloat16, "default"),
    ):
        # Products of zeros, or of few values, need less power and run faster.
        a, b = jax.random.normal(jax.random.key(0), (2, side, side), dtype)

        def multiply(a, b, precision=precision):
            return jnp.matmul(a, b, precision=precision)

        run, _ = compile_calls(multiply, [a, b])
        ceilings[name] = 2e3 * side**3 / median_ms(run)
    return ceilings


def profile(run: Callable[[], Any], calls: int) -> dict[str, Any]:
    """Traces a program and lists what the device executes.

    Args:
        run: Runs the program and waits for it.
        calls: Number of calls in the program, by which the numbers are divided.

    Returns:
        ``launches`` per call, ``busy_ms``, and ``longest``: the three kernels with the
        most time, each with its milliseconds. Empty where the profiler sees no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        traces = list(Path(folder).rglob("*.xplane.pb"))
        events = [event for path in traces for event in _gpu_events(path)]
    if not events:
        return {}
    spent: collections.Counter[str] = collections.Counter()
    for name, milliseconds in events:
        spent[name] += milliseconds
    return {
        "launches": round(len(events) / calls, 1),
        "busy_ms": sum(spent.values()) / calls,
        "longest": {name: ms / calls for name, ms in spent.most_common(3)},
    }


def _gpu_events(path: Path) -> Iterator[tuple[str, float]]:
    """Yields the name and the milliseconds of everything on the streams of a GPU."""
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    yield event.name, event.duration_ns / 1e6
