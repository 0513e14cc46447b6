"""Measures kernels and training steps on this machine's GPU, most informative first.

    python -m benchmarks.gpu --minutes=9 --output=DIR

DIR/gpu.json is written after every row; the same command resumes with the rows that are
missing. Times are those of the device: the median of several runs of a program that
calls the kernel many times. ``share`` is the least time, by the rates that the card
reached in a copy and in products of large matrices, divided by the measured time. On a
CPU everything is small, to try the command.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks import device_time
from benchmarks.compiled import STEPS, row_platform
from benchmarks.measure import describe_machine, forward_backward, torch_passes
from benchmarks.memory import abstract_step, describe_data
from benchmarks.speed_cases import CASES, Sizes
from relattn import command
from relattn.json_files import Range, read_json
from relattn.training.config_file import read_config
from relattn.training.cost import device_bytes, matmul_flops, tree_bytes
from relattn.training.mesh import MeshParallel
from relattn.training.task import Task
from relattn.training.workdir import usable_folder, write_json
from tests.helpers import compare
from tests.mechanisms import MECHANISMS

# A row is prepared (traced, compiled) in a thread beside others, and measured alone.
Measure = Callable[[], dict[str, Any]]
Prepare = Callable[["Card"], Measure]

_DTYPES = ("bfloat16", "float32")
# Head dimension and features of long sequences; 65,536 tokens in every batch.
_LONG = {"num_heads": 8, "head_dim": 64, "num_features": 256}
_TOKENS = 65536
_WIDE = {"num_heads": 3, "head_dim": 64}
_STEPS_PER_RUN = 10
# A filled batch takes this share of the memory: other rows need the rest.
_FILLED = 0.25
_MOST_EXAMPLES = 4096
# Rows that are compiled at a time, and how long the first ones wait for the others.
# More would disturb XLA, which times matrix products when it compiles.
_WORKERS = 4
_LONGEST_WAIT = 30.0
# The schema of the output.
_RATE = Range(1, 1e30, float)
_RECORD = {
    "machine": dict,
    "ceilings": dict.fromkeys(("copy", "float32", "tf32", "bfloat16"), _RATE),
    "rows": {"*": dict},
}
# Kernels without products that JAX can count, or that compute more than they must: the
# case that counts for them, and the share of it that is necessary.
_COUNTED_AS = {
    "softmax": ("dense_softmax", 1.0),
    "cudnn_softmax": ("dense_softmax", 1.0),
    "softmax_pallas": ("dense_softmax", 1.0),
    "softmax_pytorch": ("dense_softmax", 1.0),
    "causal_softmax": ("dense_softmax", 0.5),
    "causal_cudnn_softmax": ("dense_softmax", 0.5),
    "causal_softmax_pallas": ("dense_softmax", 0.5),
    "causal_softmax_pytorch": ("dense_softmax", 0.5),
    "relative_bias": ("dense_softmax", 1.0),
    "relative_bias_pallas": ("dense_softmax", 1.0),
    "causal_relative_bias": ("dense_softmax", 0.5),
    "causal_relative_bias_pallas": ("dense_softmax", 0.5),
    "causal_linear": ("linear", 1.0),
    "causal_linear_pallas": ("linear", 1.0),
    "linear_pallas": ("linear", 1.0),
    "scan_per_token": ("linear", 1.0),
    "fla_causal_linear": ("linear", 1.0),
}


@dataclasses.dataclass(frozen=True)
class Card:
    """The device, what it can do, and the rows that are measured.

    Attributes:
        device: JAX's device.
        ceilings: Output of `device_time.measure_ceilings`.
        rows: Measured rows by name.
    """

    device: jax.Device
    ceilings: Mapping[str, float]
    rows: dict[str, dict[str, Any]]

    @property
    def is_small(self) -> bool:
        """Whether all sizes are small: the device is a CPU."""
        return self.device.platform == "cpu"

    def least_ms(self, flops: float, moved: float, dtype: str) -> float:
        """Returns the least milliseconds of operations, and of bytes to move.

        Args:
            flops: Operations of matrix products.
            moved: Bytes read and written.
            dtype: The dtype of the products; float32 counts as TF32.

        Returns:
            The larger of both.
        """
        computing = flops / self.ceilings["tf32" if dtype == "float32" else dtype]
        return 1e3 * max(computing, moved / self.ceilings["copy"])


def _kernel_row(kernel: str, sizes: Sizes) -> Prepare:
    """Returns a row that times a kernel's forward and backward pass."""

    def prepare(card: Card) -> Measure:
        case = CASES[kernel]
        if missing := case.missing():
            raise ImportError(f"{' and '.join(missing)} not installed")
        given = _small(sizes) if card.is_small else sizes
        make = _torch_programs if case.framework == "torch" else _jax_programs
        programs = make(kernel, given)
        flops, moved = _least_work(kernel, given)

        def measure() -> dict[str, Any]:
            row = {**dataclasses.asdict(given)}
            for name, (run, temporary) in programs.items():
                factor = 3 if name == "forward_backward" else 1
                spent = device_time.median_ms(run)
                least = card.least_ms(factor * flops, factor * moved, given.dtype)
                row[f"{name}_ms"] = spent
                row[f"{name}_share"] = least / spent
                if temporary is not None:
                    row[f"{name}_temporary_mb"] = temporary / 1e6
            return row

        return measure

    return prepare


def _small(sizes: Sizes) -> Sizes:
    length = min(sizes.length, 16)
    return dataclasses.replace(
        sizes, length=length, batch=1, head_dim=8, num_features=12
    )


def _jax_programs(kernel: str, sizes: Sizes) -> dict[str, Any]:
    function, inputs = CASES[kernel].make(sizes)
    out = jax.eval_shape(function, *inputs)
    leaves, tree = jax.tree.flatten(out)
    cotangent = tree.unflatten(
        [jax.random.normal(jax.random.key(1), x.shape, x.dtype) for x in leaves]
    )
    both = forward_backward(function)
    return {
        "forward": device_time.compile_calls(function, inputs),
        "forward_backward": device_time.compile_calls(both, [cotangent, *inputs]),
    }


def _torch_programs(kernel: str, sizes: Sizes) -> dict[str, Any]:
    import torch

    def calls(run):
        def run_and_wait():
            for _ in range(device_time.CALLS):
                run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()

        return run_and_wait

    passes = torch_passes(CASES[kernel], sizes)
    names = ("forward", "forward_backward")
    return {name: (calls(run), None) for name, run in zip(names, passes, strict=True)}


def _least_work(kernel: str, sizes: Sizes) -> tuple[float, float]:
    """Returns the operations of a forward pass, and the bytes of inputs and output."""
    counted, share = _COUNTED_AS.get(kernel, (kernel, 1.0))
    function, inputs = CASES[counted].make(sizes)
    moved = tree_bytes([*inputs, jax.eval_shape(function, *inputs)])
    return share * matmul_flops(function, *inputs), moved


def _step_row(name: str, *overrides: str, fill: bool = False) -> Prepare:
    """Returns a row that times a training step, with ``--config.key=value`` options.

    With ``fill``, on as many examples as fill a quarter of the memory, by that of the
    row of the same name at the published batch.
    """

    def prepare(card: Card) -> Measure:
        options = list(overrides)
        if card.is_small:
            options.append("--config.model.num_layers=1")
        if fill:
            options.append(f"--config.batch_size={_filled_batch(name, card)}")
        elif card.is_small:
            options.append("--config.batch_size=2")
        config = read_config(STEPS[name], options)
        info = describe_data(config, num_classes=10, vocab_size=50257, channels=1)
        task = Task.build(config, info)
        parallel = MeshParallel([card.device])
        step, abstract = abstract_step(task, parallel)
        with row_platform(name, card.device.platform):
            flops = matmul_flops(step, *abstract)
            compiled = step.lower(*abstract).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        batch = parallel.shard(_draw_batch(abstract[1]))
        key = parallel.place_key(task.key)

        def measure() -> dict[str, Any]:
            state = parallel.create(task.create_state)

            def run():
                nonlocal state
                for _ in range(_STEPS_PER_RUN):
                    state, metrics = compiled(state, batch, key)
                jax.block_until_ready((state, metrics))

            spent = device_time.median_ms(run, calls=_STEPS_PER_RUN)
            dtype = str(config.model.get("dtype") or "float32")
            least = card.least_ms(flops, 2 * tree_bytes(state), dtype)
            return {
                "config": STEPS[name],
                "overrides": options,
                "batch_size": config.batch_size,
                "step_ms": spent,
                "examples_per_s": 1e3 * config.batch_size / spent,
                "share": least / spent,
                "temporary_mb": temporary / 1e6,
                **device_time.profile(run, _STEPS_PER_RUN),
            }

        return measure

    return prepare


def _filled_batch(name: str, card: Card) -> int:
    """Returns the examples that fill the memory, by what the published batch needs."""
    measured = card.rows.get(f"step:{name}", {})
    if "temporary_mb" not in measured:
        raise ValueError(f"step:{name} was not measured")
    room = _FILLED * (device_bytes(card.device) or 0) / 1e6
    factor = max(1, int(room / max(1.0, measured["temporary_mb"])))
    most = 4 if card.is_small else _MOST_EXAMPLES
    return min(most, factor * measured["batch_size"])


def _draw_batch(shapes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    sizes = {"image": 256, "tokens": 50257, "label": 10}
    if "tokens" in shapes:
        sizes["label"] = sizes["tokens"]
    return {
        name: generator.integers(sizes[name], size=x.shape).astype(x.dtype)
        for name, x in shapes.items()
    }


def _accuracy_row(mechanism: Any) -> Prepare:
    """Returns a row with a kernel's errors, compared with its float64 reference."""

    def prepare(card: Card) -> Measure:
        kernel, inputs = mechanism.kernel_and_inputs()
        allowed = mechanism.allowed(np.ones(mechanism.num_keys, bool))
        row = {}
        for name, dtype, precision in (
            ("float32, highest precision", jnp.float32, "highest"),
            ("float32", jnp.float32, None),
            ("bfloat16", jnp.bfloat16, None),
        ):
            given = [np.asarray(x).astype(dtype) for x in inputs]
            with jax.default_device(jax.local_devices(backend="cpu")[0]):
                expected = compare.expected_results(mechanism.naive, given, allowed)
            with jax.default_matmul_precision(precision):
                results = compare.value_and_gradients(kernel, given, jax.jit)
            errors = [
                float(np.abs(np.float64(ours) - theirs).max() / np.abs(theirs).max())
                for ours, theirs in zip(results, expected, strict=True)
            ]
            row[name] = {"values": errors[0], "gradients": max(errors[1:])}
        return lambda: row

    return prepare


def _kernel_rows(
    kernels: Sequence[str],
    length: int,
    *,
    batch: int | None = None,
    dtypes: Sequence[str] = _DTYPES,
    **sizes: Any,
) -> Iterator[tuple[str, Prepare]]:
    batch = batch or max(1, _TOKENS // length)
    for dtype in dtypes:
        for kernel in kernels:
            # cuDNN computes in half precision only.
            if "cudnn" in kernel and dtype == "float32":
                continue
            given = Sizes(length, batch=batch, dtype=dtype, **sizes)
            yield f"{kernel}@{length}x{batch}, {dtype}", _kernel_row(kernel, given)


_CAUSAL = (
    *("causal_linear", "causal_linear_pallas"),
    *("causal_softmax", "causal_softmax_pallas", "causal_cudnn_softmax"),
)
_ALL_PAIRS = (
    *("linear", "linear_pallas"),
    *("softmax", "softmax_pallas", "cudnn_softmax"),
)
_PYTORCH = ("causal_softmax_pytorch", "fla_causal_linear")
_LOR = (
    "lor_translution",
    "lor_translution_pallas",
    "gather_lor_translution",
    "lor_translution_by_rows",
    "self_attention",
    "lor_translution_by_offsets",
)
_CAUSAL_LOR = (
    "causal_lor_translution",
    "causal_lor_translution_pallas",
    "gather_causal_lor_translution",
    "causal_lor_translution_by_rows",
)
_BIASES = (
    *("relative_bias", "relative_bias_pallas"),
    *("causal_relative_bias", "causal_relative_bias_pallas"),
    *("toeplitz", "causal_toeplitz"),
)


def _rows() -> Iterator[tuple[str, Prepare]]:
    """Yields the rows, the most informative first."""
    yield from _kernel_rows(_CAUSAL, 4096, **_LONG)
    yield from _kernel_rows(_PYTORCH, 4096, dtypes=["bfloat16"], **_LONG)
    yield from _kernel_rows(_ALL_PAIRS, 4096, **_LONG)
    yield from _kernel_rows(_CAUSAL, 16384, **_LONG)
    yield from _kernel_rows(_LOR, 49, batch=256, **_WIDE)
    yield from _kernel_rows(_CAUSAL_LOR, 160, batch=8, **_WIDE)
    for name in (
        "gpt_a160_self_attention",
        "gpt_a160_lor_translution",
        "gpt_a160_lor_translution_pallas",
        "vit_a12_self_attention",
        "vit_a12_lor_translution",
        "vit_a12_lor_translution_pallas",
        "performer_learnable_sincos",
        "performer_constrained_sincos",
        "performer_banded",
        "rpe_vit_favor_rope2d",
        "rpe_vit_relu_string_gate",
    ):
        yield f"step:{name}", _step_row(name)
    for mechanism in MECHANISMS:
        yield f"accuracy:{mechanism.name}", _accuracy_row(mechanism)
    yield from _kernel_rows(_BIASES, 4096, **_LONG)
    yield from _kernel_rows(["banded", "gather_band"], 1024, **_LONG)
    yield from _kernel_rows(["dense_softmax"], 4096, **_LONG)
    for name in (
        "gpt_a160_self_attention",
        "gpt_a160_lor_translution",
        "vit_a12_lor_translution",
        "performer_learnable_sincos",
    ):
        yield f"step:{name}, filled", _step_row(name, fill=True)
    yield from _kernel_rows(
        ["translution", "gather_translution"], 49, batch=256, **_WIDE
    )
    yield from _kernel_rows(_LOR[:3], 144, batch=256, **_WIDE)
    yield from _kernel_rows(
        ["causal_translution", "gather_causal_translution"], 160, batch=8, **_WIDE
    )
    yield from _kernel_rows(_ALL_PAIRS, 16384, **_LONG)
    yield from _kernel_rows([*_CAUSAL, *_ALL_PAIRS[:1]], 65536, **_LONG)
    yield from _kernel_rows([*_CAUSAL, *_ALL_PAIRS[:1]], 1024, **_LONG)
    yield from _kernel_rows(_PYTORCH, 16384, dtypes=["bfloat16"], **_LONG)
    yield from _kernel_rows(_BIASES, 1024, **_LONG)
    for name in ("vit_a12_translution", "gpt_a160_translution", "linformer", "routing"):
        yield f"step:{name}", _step_row(name)
    for name in ("gpt_a160_self_attention", "gpt_a160_lor_translution"):
        yield (
            f"step:{name}, bfloat16",
            _step_row(name, "--config.model.dtype=bfloat16"),
        )


ROWS: dict[str, Prepare] = dict(_rows())


def choose_rows(only: str, done: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Chooses the rows to measure.

    Args:
        only: Patterns of names, separated by semicolons; empty for all.
        done: Rows that are measured already; those that failed are tried again.

    Returns:
        The names of rows that match and are missing.

    Raises:
        ValueError: If a pattern matches none.

    Example:
        >>> choose_rows("accuracy:softmax; step:routing", {"step:routing": {}})
        ['accuracy:softmax']
    """
    patterns = [pattern.strip() for pattern in only.split(";") if pattern.strip()]
    for pattern in patterns:
        if not fnmatch.filter(ROWS, pattern):
            similar = difflib.get_close_matches(pattern, ROWS, n=1, cutoff=0.5)
            hint = "".join(f", did you mean {name!r}?" for name in similar)
            raise ValueError(
                f"--only={only}: no row {pattern!r}{hint or '.'} Rows have names like "
                "'linear@4096x16, float32', 'step:routing' and 'accuracy:softmax'"
            )
    return [
        name
        for name in ROWS
        if ("failed" in done.get(name, {"failed": ""}))
        and (not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns))
    ]


def _measure_rows(
    names: Sequence[str], card: Card, deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measures rows until the deadline, and compiles others in between.

    Yields the name and the numbers of a row, or ``failed``, the reason.
    """
    waiting, running = list(names), {}
    workers = min(_WORKERS, os.cpu_count() or 1)
    executor = ThreadPoolExecutor(workers)
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < workers:
                name = waiting.pop(0)
                running[executor.submit(ROWS[name], card)] = name
            left = deadline - time.monotonic()
            ready, _ = wait(running, timeout=min(_LONGEST_WAIT, max(0.0, left)))
            for future in sorted(
                ready, key=lambda future: names.index(running[future])
            ):
                yield running.pop(future), _measure(future)
            # A future keeps its inputs on the device.
            del ready
    finally:
        executor.shutdown(wait=False, cancel_futures=True)


def _measure(future: Future[Measure]) -> dict[str, Any]:
    # A row that cannot be measured on this machine must not end the others.
    try:
        return future.result()()
    except Exception as error:
        return {"failed": command.one_line(f"{type(error).__name__}: {error}")}


def describe(row: Mapping[str, Any]) -> str:
    """Describes a row in a line.

    Args:
        row: Numbers of a row.

    Returns:
        Its times, rates or errors, or why it failed.

    Example:
        >>> describe({"forward_ms": 1.5, "forward_share": 0.25})
        'forward 1.500 ms (25%)'
        >>> describe({"step_ms": 20.0, "examples_per_s": 400.0, "share": 0.1})
        '20.0 ms, 400 examples/s (10%)'
    """
    if "failed" in row:
        return f"failed: {row['failed']}"
    if "step_ms" in row:
        rate = f"{row['examples_per_s']:,.0f} examples/s"
        return f"{row['step_ms']:.1f} ms, {rate} ({row['share']:.0%})"
    if "bfloat16" in row:
        return ", ".join(
            f"{name}: {errors['values']:.0e} and {errors['gradients']:.0e}"
            for name, errors in row.items()
        )
    passes = {"forward": "forward", "forward_backward": "forward + backward"}
    return ", ".join(
        f"{label} {row[f'{name}_ms']:.3f} ms ({row[f'{name}_share']:.0%})"
        for name, label in passes.items()
        if f"{name}_ms" in row
    )


def _open_card(path: Path) -> tuple[dict[str, Any], Card]:
    """Describes the device and measures its ceilings, or reads them from the file.

    Returns what to write to the file, and the card, which shares its rows.
    """
    device = jax.devices()[0]
    machine = describe_machine(device)
    if path.exists():
        try:
            # Errors of a kernel may be NaN.
            record = read_json(path, _RECORD, allow_nan=True)
        except ValueError as error:
            raise ValueError(
                f"{error}: delete it, or choose another --output"
            ) from error
        if record["machine"] != machine:
            raise ValueError(
                f"{path} was measured on another machine or with other versions: "
                "choose another --output"
            )
    else:
        small = {"copied": 2**20, "side": 64} if device.platform == "cpu" else {}
        ceilings = device_time.measure_ceilings(**small)
        record = {"machine": machine, "ceilings": ceilings, "rows": {}}
        write_json(path, record)
    return record, Card(device, record["ceilings"], record["rows"])


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Measures rows, prints them and writes them as JSON."""
    started = time.monotonic()
    parser = command.Parser("python -m benchmarks.gpu", __doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="time after which no row begins")
    add("--only", default="", help="patterns of rows, separated by semicolons")
    add("--output", default="runs/gpu", help="output folder")
    given = parser.parse_args(argv)
    if given.minutes < 0:
        raise ValueError(f"--minutes must be at least 0, got {given.minutes:g}")
    choose_rows(given.only, {})
    path = usable_folder(given.output, "--output") / "gpu.json"
    # PyTorch needs memory of the same card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    record, card = _open_card(path)
    rows = record["rows"]
    names = choose_rows(given.only, rows)
    if not names:
        print(f"{path} has these rows: choose another --output to measure them again")
        return
    print(", ".join(f"{name} {x:.3g}/s" for name, x in card.ceilings.items()))
    with tqdm(total=len(names), unit=" rows", disable=None) as progress:
        deadline = started + 60 * given.minutes
        for name, row in _measure_rows(names, card, deadline):
            rows[name] = row
            record["rows"] = {key: rows[key] for key in ROWS if key in rows}
            write_json(path, record)
            tqdm.write(f"{name}: {describe(row)}")
            progress.update()
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
