"""Compares the time and memory of kernels with other implementations.

    python -m benchmarks.speed --kernel=linear,banded --lengths=1024,4096 \
        --against=softmax,gather_band --output=DIR
    python -m benchmarks.speed --model=vit,performer --against=torch --output=DIR

The second compares whole training steps with plain PyTorch on the CPU, on one core and
on all.
Every measurement runs in a separate process. Writes speed.jsonl, one line per
measurement, and, for kernels, speed.png to the output folder, and prints a table. An
output folder keeps the measurements of one command.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm

from benchmarks.speed_cases import CASES, Sizes
from benchmarks.steps import MODELS
from relattn import command
from relattn.evaluation.figures import save_figure
from relattn.files import open_new
from relattn.messages import closest
from relattn.training.workdir import describe_cpu, usable_folder
from studies.report import last_line

_DTYPES = ("float32", "bfloat16", "float16")
_PASSES = {"forward": "forward", "forward_backward": "forward + backward"}


def measure_apart(
    kernel: str, sizes: Sizes, *, repeats: int = 5, backward: bool = True
) -> dict[str, Any]:
    """Measures a kernel in a separate process.

    Args:
        kernel: Key of `CASES`.
        sizes: Sizes of the inputs.
        repeats: Number of runs after the first; the result is their median.
        backward: If True, also measures forward + backward.

    Returns:
        A row: the kernel, the sizes and the output of `benchmarks.measure.measure`. If
        the process failed, ``skipped`` has the reason.
    """
    measured = _run_apart(
        "benchmarks.measure",
        kernel=kernel,
        sizes=dataclasses.asdict(sizes),
        repeats=repeats,
        backward=backward,
    )
    return {"kernel": kernel} | dataclasses.asdict(sizes) | measured


def _run_apart(module: str, **request: Any) -> dict[str, Any]:
    """Runs a module in a separate process; returns its output, or ``skipped``."""
    command = [sys.executable, "-m", module, json.dumps(request)]
    # Preallocated GPU memory would count as used.
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    if process.returncode == 0:
        return json.loads(process.stdout.splitlines()[-1])
    if process.returncode < 0:
        reason = f"killed by signal {-process.returncode} (out of memory?)"
    else:
        reason = last_line(process.stderr) or "no message"
    return {"skipped": reason}


def _compare_steps(
    models: Sequence[str], cores: Sequence[int], **options: Any
) -> Iterator[dict[str, Any]]:
    """Measures training steps beside PyTorch, by model and number of cores."""
    with tqdm(total=len(models) * len(cores), disable=None) as progress:
        for model in models:
            for count in cores:
                progress.set_description(f"{model} on {count} cores")
                row = {"model": model, "cores": count}
                yield row | _run_apart("benchmarks.steps", **row, **options)
                progress.update()


def compare(
    names: Sequence[str], against: Sequence[str], lengths: Sequence[int], **options: Any
) -> Iterator[list[dict[str, Any]]]:
    """Measures kernels and alternatives by increasing length.

    Args:
        names: Keys of `CASES`.
        against: Keys of `CASES` to compare every kernel with.
        lengths: Numbers of tokens.
        **options: Fields of `Sizes` and arguments of `measure_apart`.

    Yields:
        The rows of one length. ``ratios`` has for every alternative and pass the
        alternative's time divided by the kernel's: above 1, the kernel is faster.
    """
    fields = {field.name for field in dataclasses.fields(Sizes)}
    sizes = {name: options.pop(name) for name in list(options) if name in fields}
    cases = list(dict.fromkeys([*names, *against]))
    with tqdm(total=len(cases) * len(lengths), disable=None) as progress:
        for length in sorted(lengths):
            rows = []
            for name in cases:
                progress.set_description(f"{name} at {length:,}")
                rows.append(measure_apart(name, Sizes(length, **sizes), **options))
                progress.update()
            _add_ratios(rows, against)
            yield rows


def _add_ratios(rows: Sequence[dict[str, Any]], against: Sequence[str]) -> None:
    """Adds ratios of times, alternative over kernel, to the rows of one length.

    Example:
        >>> rows = [{"kernel": "a", "forward_ms": 2}, {"kernel": "b", "forward_ms": 3}]
        >>> _add_ratios(rows, ["b"])
        >>> rows[0]["ratios"]
        {'b': {'forward': 1.5}}
    """
    by_name = {row["kernel"]: row for row in rows}
    for row in rows:
        row["ratios"] = {}
        for name in against:
            other = by_name[name]
            ratios = {
                kind: other[f"{kind}_ms"] / row[f"{kind}_ms"]
                for kind in _PASSES
                if f"{kind}_ms" in row and f"{kind}_ms" in other
            }
            if ratios and row["kernel"] not in against:
                row["ratios"][name] = ratios


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plots time and memory over the length, on logarithmic axes.

    Args:
        rows: Rows from `compare`.
        path: The file; its suffix selects the format.
    """
    measured = {key for row in rows for key in row}
    kind = "forward_backward" if "forward_backward_ms" in measured else "forward"
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    panels = {f"{kind}_ms": "time in ms", f"{kind}_memory_mb": "peak memory in MB"}
    for axes, (key, label) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for name in dict.fromkeys(row["kernel"] for row in rows):
            points = [
                (row["length"], row[key])
                for row in rows
                if row["kernel"] == name and row.get(key)
            ]
            if points:
                axes.loglog(*zip(*points, strict=True), "o-", label=name)
        axes.set(xlabel="length", ylabel=label, title=_PASSES[kind])
        lengths = sorted({row["length"] for row in rows})
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    save_figure(figure, path)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a table of times, memory and ratios.

    Args:
        rows: Rows from `compare`.

    Returns:
        Lines of aligned columns.

    Example:
        >>> print(table([{"kernel": "a", "length": 8, "skipped": "too long"}]))
        kernel  length  forward ms  forward + backward ms  MB  speed-up over
        a            8           -                      -   -  skipped: too long
    """
    times = [f"{name} ms" for name in _PASSES.values()]
    lines = [["kernel", "length", *times, "MB", "speed-up over"]]
    for row in rows:
        kind = "forward_backward" if "forward_backward_ms" in row else "forward"
        ratios = row.get("ratios", {}).items()
        speed_ups = ", ".join(f"{name} {ratio[kind]:.2f}x" for name, ratio in ratios)
        reason = f"skipped: {row['skipped']}" if "skipped" in row else ""
        numbers = [(f"{kind}_ms", ",.1f") for kind in _PASSES]
        numbers.append((f"{kind}_memory_mb", ",.0f"))
        cells = [
            format(row[key], style) if key in row else "-" for key, style in numbers
        ]
        lines.append([row["kernel"], f"{row['length']:,}", *cells, reason or speed_ups])
    return _aligned(lines)


def _steps_table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats a table of the times of training steps, rows of `_compare_steps`.

    Example:
        >>> row = {"model": "vit", "cores": 1, "relattn_ms": 3, "torch_ms": 2}
        >>> print(_steps_table([row | {"ratio": 1.5}]))
        model  cores  relattn ms  PyTorch ms  relattn / PyTorch
        vit        1         3.0         2.0  1.50
    """
    lines = [["model", "cores", "relattn ms", "PyTorch ms", "relattn / PyTorch"]]
    for row in rows:
        cells = [row["model"], str(row["cores"])]
        if "skipped" in row:
            lines.append([*cells, "-", "-", f"skipped: {row['skipped']}"])
            continue
        times = [f"{row[key]:,.1f}" for key in ("relattn_ms", "torch_ms")]
        lines.append([*cells, *times, f"{row['ratio']:.2f}"])
    return _aligned(lines)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Aligns columns: the first and the last to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rendered = []
    for name, *numbers, last in lines:
        cells = [cell.rjust(w) for cell, w in zip(numbers, widths[1:-1], strict=True)]
        rendered.append("  ".join([name.ljust(widths[0]), *cells, last]).rstrip())
    return "\n".join(rendered)


def _names(text: str, kind: str = "kernel", known: Iterable[str] = CASES) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            hint = closest(name, known)
            raise argparse.ArgumentTypeError(f"no {kind} {name!r}: {hint}")
    return names


def _kernels(text: str) -> list[str]:
    names = _names(text)
    if not names:
        known = ", ".join(CASES)
        raise argparse.ArgumentTypeError(f"name at least one kernel of {known}")
    return names


def _models(text: str) -> list[str]:
    return _names(text, "model", MODELS)


def _alternatives(text: str) -> list[str]:
    return _names(text, known=[*CASES, "torch"])


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _parser() -> command.Parser:
    parser = command.Parser(
        "python -m benchmarks.speed",
        __doc__,
        epilog="kernels and alternatives: " + ", ".join(CASES),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    default = Sizes(length=1)
    add = parser.add_argument
    add(
        "--kernel", type=_kernels, default="linear,causal_linear,banded", help="kernels"
    )
    add(
        "--against",
        type=_alternatives,
        default="softmax",
        help="kernels to compare with; torch with --model",
    )
    add(
        "--model",
        type=_models,
        default="",
        help=f"training steps instead of kernels: {', '.join(MODELS)}",
    )
    add("--lengths", type=_lengths, default="1024,4096", help="numbers of tokens")
    add("--batch", type=_positive, default=default.batch, help="batch size")
    add("--num_heads", type=_positive, default=default.num_heads, help="heads")
    add(
        "--head_dim",
        type=_positive,
        default=default.head_dim,
        help="components per head",
    )
    add(
        "--clip",
        type=_positive,
        default=default.clip,
        help="largest distance of banded, and near offset of clipped Translution",
    )
    add("--rank", type=_positive, default=default.rank, help="rank of LoR-Translution")
    add(
        "--num_features",
        type=_positive,
        default=0,
        help="0 for int(head_dim * ln(head_dim))",
    )
    add("--dtype", choices=_DTYPES, default=default.dtype, help="dtype of the inputs")
    add("--repeats", type=_positive, default=5, help="runs after the first")
    add(
        "--backward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also measure forward + backward",
    )
    add("--output", default="runs/speed", help="output folder")
    return parser


def _measure_models(models: Sequence[str], path: Path) -> None:
    rows = []
    with open_new(path, "w") as file:
        for row in _compare_steps(models, sorted({1, describe_cpu()["cores"]})):
            print(json.dumps(row), file=file, flush=True)
            rows.append(row)
    print(_steps_table(rows))
    print(f"Written to {path}")


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Measures kernels, writes the rows and the figure, and prints the table."""
    parser = _parser()
    options = vars(parser.parse_args(argv))
    output = options.pop("output")
    models, against = options.pop("model"), options.pop("against")
    if bool(models) != (against == ["torch"]):
        parser.error("--model and --against=torch belong together")
    for name, value in vars(parser.parse_args([])).items() if models else ():
        if options.get(name, value) != value:
            parser.error(f"--{name} is for kernels: leave it out with --model")
    output = usable_folder(output, "--output")
    path = output / "speed.jsonl"
    if path.exists():
        raise ValueError(
            f"{path} has other measurements: delete it, or choose another --output"
        )
    if models:
        _measure_models(models, path)
        return
    names = options.pop("kernel")
    rows: list[dict[str, Any]] = []
    with open_new(path, "w") as file:
        for measured in compare(names, against, options.pop("lengths"), **options):
            for row in measured:
                print(json.dumps(row), file=file, flush=True)
            rows += measured
    plot(rows, output / "speed.png")
    print(table(rows))
    print(f"Written to {output}: speed.jsonl, speed.png")


if __name__ == "__main__":
    main()
