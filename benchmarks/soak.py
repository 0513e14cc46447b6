"""Trains for hours and checks for leaks of memory, file handles and threads.

    python -m benchmarks.soak --config=configs/X.py[:argument] \
        --workdir=DIR --hours=2 --output=results/soak.json

from the project's root, on Linux, runs ``train.py`` with frequent evaluations and
checkpoints, samples the resources of the process from ``/proc`` every ten seconds, ends
it, and writes the samples, their slopes and a figure. Options ``--config.key=value``,
such as ``--config.batch_size=8``, are passed to ``train.py``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from relattn import command
from relattn.evaluation.figures import save_figure
from relattn.files import usable_file
from relattn.markdown import markdown_table
from relattn.training.config_file import read_config
from relattn.training.workdir import usable_workdir, write_json
from studies.launcher import Training, leaving_on_sigterm, stop

# Allowed growth per hour: above the noise, below a leak that would end a week-long run.
LIMITS = {"resident_mb": 10.0, "file_handles": 1.0, "threads": 1.0, "memory_maps": 10.0}
WARM_UP = 0.1
CRITERION = (
    "least squares over the samples after the first tenth: flat if the slope plus 2 "
    "standard errors is within the limit; otherwise growing if the slope minus 2 "
    "standard errors is above zero; otherwise undecided"
)
MIN_SAMPLES, MAX_SAMPLES = 8, 200
OPTIONS = (
    "--config.num_steps=1000000000",
    "--config.early_stopping_epochs=0",
    "--config.eval_every_steps=200",
    "--config.checkpoint_every_steps=100",
    "--config.progress=False",
)
# Returns freed memory to the system at once. By default glibc keeps tens of MB and
# releases them at irregular times, which hides a leak of a few MB per hour.
GIVE_BACK = ":".join(
    f"glibc.malloc.{option}"
    for option in ("arena_max=1", "mmap_threshold=65536", "trim_threshold=131072")
)
_TAIL_BYTES = 1 << 16

Sample = dict[str, int | float]


def run_soak(
    training: Training, output: str | Path, *, hours: float, interval: float = 10.0
) -> dict[str, Any]:
    """Runs a training for a time and writes the resources it used.

    Args:
        training: The training, longer than the time.
        output: The JSON file; the figure has the same name with suffix ``.png``.
        hours: Time from the first row of metrics.
        interval: Seconds between two samples.

    Returns:
        The content of the file: under ``quantities`` the output of `summarize` for each
        of `LIMITS`, and at most `MAX_SAMPLES` samples.

    Raises:
        ValueError: If a time is not positive, the run directory is not empty, the
            output is a folder or a ``.png``, or there is no ``/proc``.
        WorkdirError: If a folder cannot be written to.
        ChildProcessError: If the training ends before the time is up.
    """
    for name, value in {"hours": hours, "interval": interval}.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive, got {value:g}")
    if any(usable_workdir(training.workdir).iterdir()):
        raise ValueError(
            f"--workdir {training.workdir} is not empty: a soak starts a new run"
        )
    if not Path("/proc/self/status").exists():
        raise ValueError("a soak reads /proc, which needs Linux")
    output = usable_file(output, "--output")
    if output.suffix == ".png":
        raise ValueError(
            f"--output {output} would be replaced by the figure: name the JSON file"
        )
    samples = _watch(training, 3600 * hours, interval)
    start = training.record()["starts"][-1]
    every = math.ceil(len(samples) / MAX_SAMPLES)
    result = {
        "config": training.config,
        "options": training.options,
        "malloc": os.environ.get("GLIBC_TUNABLES", ""),
        "hours": hours,
        "interval_s": interval,
        "steps": samples[-1]["step"] - samples[0]["step"],
        "machine": start,
        "criterion": CRITERION,
        "limits_per_hour": LIMITS,
        "quantities": {name: summarize(samples, name) for name in LIMITS},
        "samples": samples[::every],
    }
    write_json(output, result)
    _plot_soak(samples, result["quantities"], output.with_suffix(".png"))
    return result


def _watch(training: Training, seconds: float, interval: float) -> list[Sample]:
    """Runs a training for a time and samples the resources of its process.

    The time begins with the first row of metrics. There are at least `MIN_SAMPLES`
    samples: ``seconds``, ``step`` and the output of `_measure_process`.
    """
    metrics = training.workdir / "metrics.jsonl"
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(leaving_on_sigterm())
        stack.callback(stop, [training])
        training.start()
        bar = stack.enter_context(contextlib.closing(training.bar))
        began, past = None, 0.0
        while past < seconds or len(samples) < MIN_SAMPLES:
            time.sleep(interval)
            if training.process.poll() is not None:
                training.finish()
                raise ChildProcessError(
                    f"training {training.name} ended before the time was up: give it a "
                    "larger --config.num_steps"
                )
            step = last_step(metrics)
            if step is None:
                continue
            began = time.monotonic() if began is None else began
            past = time.monotonic() - began
            held = _measure_process(training.process.pid)
            samples.append({"seconds": round(past, 3), "step": step, **held})
            bar.set_postfix({"step": step, **held}, refresh=False)
            bar.update(min(1.0, past / seconds) - bar.n)
    return samples


def _measure_process(pid: int) -> Sample:
    """Reads the resources of a process from ``/proc``, those of `LIMITS`.

    Example:
        >>> sorted(_measure_process(os.getpid())) == sorted(LIMITS)
        True
    """
    folder = Path("/proc") / str(pid)
    lines = (folder / "status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return {
        "resident_mb": int(status["VmRSS"].split()[0]) * 1024 / 1e6,
        "file_handles": len(os.listdir(folder / "fd")),
        "threads": int(status["Threads"]),
        "memory_maps": (folder / "maps").read_bytes().count(b"\n"),
    }


def last_step(path: Path) -> int | None:
    """Reads the step of the last complete row of a ``metrics.jsonl``.

    Args:
        path: The file; may not exist yet.

    Returns:
        The step; None if there is no row yet.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            *_, last = [None, *file.read().split(b"\n")[:-1]]
    except FileNotFoundError:
        return None
    return json.loads(last)["step"] if last else None


def summarize(samples: Sequence[Sample], name: str) -> dict[str, Any]:
    """Summarises one quantity over time.

    Args:
        samples: Samples in order of time.
        name: Key of `LIMITS`.

    Returns:
        ``first``, ``last`` and ``max``; ``slope_per_hour`` and its ``standard_error``
        after the warm-up; the same for the second half; and the ``verdict`` by
        `CRITERION`.

    Example:
        >>> times = range(0, 7200, 600)
        >>> steady = [{"seconds": t, "threads": 9 + t % 1200 // 600} for t in times]
        >>> summarize(steady, "threads")["verdict"]
        'flat'
        >>> leaking = [{"seconds": t, "threads": 9 + t // 60} for t in times]
        >>> summarize(leaking, "threads")["verdict"]
        'growing'
    """
    values = [sample[name] for sample in samples]
    slope, error = fit_slope(samples, name, WARM_UP)
    late_slope, late_error = fit_slope(samples, name, 0.5)
    if slope + 2 * error <= LIMITS[name]:
        verdict = "flat"
    else:
        verdict = "growing" if slope - 2 * error > 0 else "undecided"
    return {
        "first": values[0],
        "last": values[-1],
        "max": max(values),
        "slope_per_hour": slope,
        "standard_error": error,
        "second_half_slope_per_hour": late_slope,
        "second_half_standard_error": late_error,
        "verdict": verdict,
    }


def fit_slope(
    samples: Sequence[Sample], name: str, start: float
) -> tuple[float, float]:
    """Fits a line to a quantity over time by least squares.

    Args:
        samples: Samples in order of time.
        name: Name of the quantity.
        start: Fraction of the samples to skip; at least 3 must remain.

    Returns:
        The slope per hour and its standard error. For autocorrelated residuals e_t the
        variance is multiplied by (1 + r) / (1 - r) with
        r = max(0, sum_t e_t e_(t-1) / sum_t e_t^2).

    Example:
        >>> fit_slope([{"seconds": 1800 * i, "a": i} for i in range(4)], "a", 0.1)
        (2.0, 0.0)

    Source:
        Bartlett, Some Aspects of the Time-Correlation Problem in Regard to Tests of
        Significance, 1935.
    """
    kept = samples[int(start * len(samples)) :]
    hours = np.array([sample["seconds"] for sample in kept]) / 3600
    values = np.array([sample[name] for sample in kept], np.float64)
    hours, values = hours - hours.mean(), values - values.mean()
    spread = hours @ hours
    slope = hours @ values / spread
    residuals = values - slope * hours
    squares = residuals @ residuals
    r = max(0.0, residuals[1:] @ residuals[:-1] / squares) if squares else 0.0
    variance = squares / (len(kept) - 2) / spread * (1 + r) / (1 - r)
    return round(float(slope), 6), round(math.sqrt(variance), 6)


def _plot_soak(
    samples: Sequence[Sample], quantities: dict[str, dict[str, Any]], path: Path
) -> None:
    """Plots memory, and the numbers of handles, threads and maps, over time."""
    hours = [sample["seconds"] / 3600 for sample in samples]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    memory, counts = figure.subplots(1, 2)
    for name, row in quantities.items():
        axes = memory if name == "resident_mb" else counts
        label = (
            f"{name.replace('_', ' ')}: {row['slope_per_hour']:+.2f} ± "
            f"{row['standard_error']:.2f} an hour"
        )
        axes.plot(hours, [sample[name] for sample in samples], label=label, lw=1)
    memory.set(ylabel="resident memory in MB")
    counts.set(ylabel="number", yscale="log")
    for axes in (memory, counts):
        axes.set(xlabel="hours")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    memory.set_ylim(0)
    save_figure(figure, path)


def _soak_table(result: dict[str, Any]) -> str:
    """Formats the result as a table in Markdown, with one row per quantity."""
    header = ["quantity", "first", "last", "largest", "an hour", "limit", "verdict"]
    rows = []
    for name, row in result["quantities"].items():
        held = (f"{row[key]:,.0f}" for key in ("first", "last", "max"))
        slope = f"{row['slope_per_hour']:+.2f} ± {row['standard_error']:.2f}"
        rows.append([name, *held, slope, f"{LIMITS[name]:g}", row["verdict"]])
    return markdown_table(header, rows) + "\n"


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the soak; fails if a quantity grows."""
    parser = command.Parser("python -m benchmarks.soak", __doc__, overrides=True)
    parser.add_argument("--config", required=True, help="configs/X.py[:argument]")
    parser.add_argument("--workdir", required=True, help="the run directory")
    parser.add_argument("--output", default="results/soak.json", help="the JSON file")
    parser.add_argument("--hours", type=float, default=2.0, help="duration")
    parser.add_argument(
        "--interval", type=float, default=10.0, help="seconds between samples"
    )
    arguments = parser.parse_args(argv)
    training = Training(
        label="soak",
        config=arguments.config,
        workdir=Path(arguments.workdir),
        overrides=[*OPTIONS, *arguments.overrides],
    )
    os.environ.setdefault("GLIBC_TUNABLES", GIVE_BACK)
    read_config(training.config, training.options)
    result = run_soak(
        training,
        arguments.output,
        hours=arguments.hours,
        interval=arguments.interval,
    )
    print(f"{result['steps']:,} steps in {arguments.hours:g} hours\n")
    print(_soak_table(result))
    print(f"Written to {arguments.output} and its figure, .png")
    quantities = result["quantities"].items()
    growing = [name for name, row in quantities if row["verdict"] == "growing"]
    if growing:
        sys.exit(f"error: growing: {', '.join(growing)}")


if __name__ == "__main__":
    main()
