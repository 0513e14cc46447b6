"""Runs the demo: trains Performers and compares them under shifts of the images.

``python -m studies.demo --output=demo``, from the project's root, trains each variant
and seed of ``configs/demo.py:VARIANT,quick`` with ``train.py``, and writes
``shift.png``, ``table.md`` and ``results.json``. The same command continues an
interrupted demo. ``index.html`` is a page on which one moves test images and sees what
the models say; its address is printed last. Options ``--config.key=value``, such as
``--config.num_epochs=3``, are passed to ``train.py``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relattn import command
from relattn.evaluation.compare import compare
from relattn.evaluation.page import write_page
from relattn.evaluation.shift_curves import ShiftCurve
from relattn.evaluation.shift_plots import plot
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.files import replace_file
from relattn.markdown import markdown_table
from relattn.training.config import check_config
from relattn.training.config_file import read_config
from relattn.training.overrides import typed_keys
from relattn.training.workdir import usable_folder, write_json
from studies.figure1 import published_curve
from studies.launcher import Training, train

CONFIG = "configs/demo.py"
# A name for people and a sentence on each model of the page.
MODELS = {
    "learnable_sincos": (
        "Absolute positions",
        "Learns where each patch is in the image, as usual in Transformers.",
    ),
    "sincos_bias": (
        "Relative positions",
        "Knows only how far apart two patches are: strategy 1 of Horn et al., as an "
        "exact bias.",
    ),
    "invariant": (
        "Relative positions on a torus",
        "Joins the borders and starts from a patch chosen by content: the same answer "
        "at every circular shift.",
    ),
}
VARIANTS = tuple(MODELS)
# Shifts in pixels, of images of 16x16.
CLASS_SHIFT = 4
ALL_SHIFT = 3


def run_demo(
    output: str | Path,
    *,
    variants: Sequence[str] = VARIANTS,
    seeds: int = 1,
    jobs: int = 2,
    overrides: Sequence[str] = (),
) -> str:
    """Trains the models, evaluates them under shifts, writes the figure and table.

    Args:
        output: The output folder.
        variants: Arguments of ``configs/demo.py``.
        seeds: Number of runs per variant, with seeds 0, 1, ...
        jobs: Number of parallel processes.
        overrides: Options of ``train.py``.

    Returns:
        The table in Markdown.

    Raises:
        ValueError: If there is no variant, a variant does not exist, options make two
            variants one model, or the current folder is not the project's root.
        OSError: If the folder cannot be written to, or a training fails.
    """
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    for key in {"seed", "num_seeds"} & typed_keys(overrides):
        raise ValueError(f"--seeds sets --config.{key}: leave it out")
    if not Path(CONFIG).exists():
        raise ValueError(f"no {CONFIG} here: run the demo from the project's root")
    variants = list(dict.fromkeys(variants))
    if not variants:
        raise ValueError("no variant: name at least one by --variants")
    # Raises before anything is trained.
    configs = [read_config(f"{CONFIG}:{name},quick", overrides) for name in variants]
    for config in configs:
        check_config(config)
    for one, other in itertools.combinations(range(len(variants)), 2):
        if configs[one] == configs[other]:
            raise ValueError(
                f"{variants[one]} and {variants[other]} are one model with these "
                "options: name one of them by --variants"
            )
    output = usable_folder(output, "--output")
    print(f"Training {', '.join(variants)} of {CONFIG}; logs in {output}/*/train.log")
    trainings = [
        Training(
            label=variant,
            config=f"{CONFIG}:{variant},quick",
            workdir=output / f"{variant}-{seed}",
            seed=seed,
            overrides=overrides,
        )
        for seed in range(seeds)
        for variant in variants
    ]
    steps = _Steps()
    train(trainings, jobs)
    steps.done("trained the models")
    # Sorted by variant, then seed: the order of the legend.
    trainings.sort(key=lambda training: variants.index(training.label))
    runs = open_shift_runs([training.workdir for training in trainings])
    comparison = compare(
        runs,
        max_shift=CLASS_SHIFT,
        class_name="1",
        find_published=published_curve,
    )
    one_class, every_class = comparison.one_class(), comparison.every_class()
    steps.done("shifted the test images")
    plot(comparison.panels([*one_class, *every_class]), output / "shift.png")
    results = {
        variant: _results([t for t in trainings if t.label == variant], one, every)
        for variant, one, every in zip(variants, one_class, every_class, strict=True)
    }
    write_json(output / "results.json", results)
    text = demo_table(results, comparison.class_name)
    replace_file(output / "table.md", text)
    steps.done("wrote the figure and the table")
    first = [training for training in trainings if training.seed == 0]
    write_page(
        [run for run, each in zip(runs, trainings, strict=True) if each.seed == 0],
        output / "index.html",
        names=[_page_name(training.label) for training in first],
        descriptions=[MODELS.get(t.label, ("", ""))[1] for t in first],
        max_shift=CLASS_SHIFT,
    )
    steps.done("wrote the page")
    return text


class _Steps:
    """Prints the seconds that each step took."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def done(self, name: str) -> None:
        """Prints the time since the last step."""
        now = time.monotonic()
        print(f"{now - self.start:4.0f} s: {name}", flush=True)
        self.start = now


def _page_name(variant: str) -> str:
    return f"{MODELS[variant][0]} ({variant})" if variant in MODELS else variant


def _results(
    trainings: Sequence[Training], one_class: ShiftCurve, every_class: ShiftCurve
) -> dict[str, Any]:
    results = [training.result() for training in trainings]
    return {
        "seeds": [training.seed for training in trainings],
        "test_accuracy": [result["test_accuracy"] for result in results],
        "seconds": [result["seconds"] for result in results],
        "one_class": _curve(one_class),
        "every_class": _curve(every_class),
    }


def _curve(curve: ShiftCurve) -> dict[str, Any]:
    return {
        "shift_px": [right for right, _ in curve.shifts],
        "accuracy_mean": curve.metrics.accuracy.tolist(),
        "accuracy_std": curve.metrics.accuracy_std.tolist(),
        "num_images": curve.metrics.num_images.tolist(),
    }


def demo_table(results: Mapping[str, Mapping[str, Any]], class_name: str) -> str:
    """Formats the demo's table.

    Args:
        results: Results by variant, as in ``results.json``.
        class_name: Name of the class with separate columns.

    Returns:
        Markdown: one row per variant, with means and standard deviations (if several
        seeds).
    """
    shown = [("one_class", CLASS_SHIFT), ("every_class", ALL_SHIFT)]
    header = ["model", "test images, unshifted"]
    header += [f"class {class_name}, {sign}{CLASS_SHIFT} px" for sign in "-+"]
    header += [f"all classes, {sign}{ALL_SHIFT} px" for sign in "-+"]
    rows = []
    for variant, result in results.items():
        seeds = len(result["seeds"])
        accuracies = result["test_accuracy"]
        spread = float(np.std(accuracies, ddof=1)) if seeds > 1 else 0.0
        cells = [variant, _cell(float(np.mean(accuracies)), spread, seeds)]
        for name, pixels in shown:
            curve = result[name]
            for shift in (-pixels, pixels):
                i = curve["shift_px"].index(shift)
                mean, std = curve["accuracy_mean"][i], curve["accuracy_std"][i]
                cells.append(_cell(mean, std, seeds))
        rows.append(cells)
    return markdown_table(header, rows) + "\n"


def _cell(mean: float, std: float, seeds: int) -> str:
    return f"{mean:.1%}" if seeds == 1 else f"{mean:.1%} ± {100 * std:.1f}"


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the demo."""
    parser = command.Parser("python -m studies.demo", __doc__, overrides=True)
    parser.add_argument("--output", default="demo", help="output folder")
    parser.add_argument(
        "--variants",
        default=",".join(VARIANTS),
        help="arguments of configs/demo.py, separated by commas",
    )
    parser.add_argument("--seeds", type=int, default=1, help="runs per variant")
    parser.add_argument("--jobs", type=int, default=2, help="parallel processes")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    text = run_demo(
        arguments.output,
        variants=[name for name in arguments.variants.split(",") if name],
        seeds=arguments.seeds,
        jobs=arguments.jobs,
        overrides=arguments.overrides,
    )
    output = Path(arguments.output).resolve()
    print(
        f"\n{text}\nIn {time.monotonic() - start:.0f} s. Written to {output}:", end=" "
    )
    print("index.html, shift.png, table.md, results.json")
    print(f"Move the images yourself: {(output / 'index.html').as_uri()}")


if __name__ == "__main__":
    main()
