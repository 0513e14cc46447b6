"""The command ``relattn``, and the programs ``train.py`` and ``eval_shift.py``.

    relattn train --config=performer:mnist,constrained_sincos --workdir=runs/performer

is ``python train.py`` with a configuration of the package. `COMMANDS` lists the others.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import relattn
from relattn import command
from relattn.messages import check_choice, printable

# The module and function of each command, and what it does. Some modules need the extra
# `train`.
COMMANDS = {
    "train": ("relattn.cli", "train", "trains a model"),
    "eval-shift": (
        "relattn.cli",
        "eval_shift",
        "measures accuracy on shifted test images",
    ),
    "predict": (
        "relattn.evaluation.predict",
        "main",
        "writes a table of predicted classes",
    ),
    "report": ("relattn.evaluation.report", "main", "writes a page about a run"),
    "sample": ("relattn.evaluation.sample", "main", "continues a text"),
    "perplexity": (
        "relattn.evaluation.perplexity",
        "main",
        "measures the perplexity on a text",
    ),
    "convert": ("relattn.convert", "main", "converts a checkpoint of another library"),
    "export": ("relattn.export", "main", "writes a model for other libraries"),
    "prepare": ("relattn.data.prepare", "main", "prepares a full image set"),
    "prepare-text": (
        "relattn.data.prepare_text",
        "main",
        "writes a text as tokens to train on",
    ),
    "config": ("relattn.cli", "show_config", "lists the configurations, or prints one"),
}


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command, ``relattn NAME --option=value ...``; or prints the version."""
    name, *options = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print("usage: relattn COMMAND [--help] [--option=value ...], or --version\n")
        for name, (*_, title) in COMMANDS.items():
            print(f"  {name:<14}{title}")
        sys.exit(0)
    if name == "--version":
        print(f"relattn {relattn.__version__}")
        sys.exit(0)
    check_choice("command", name, COMMANDS)
    module, function, _ = COMMANDS[name]
    given = sys.argv
    # The programs take their name in the help from it.
    sys.argv = [f"relattn {name}", *options]
    try:
        getattr(importlib.import_module(module), function)(options)
    finally:
        sys.argv = given


@command.entry_point
def train(argv: Sequence[str] | None = None) -> None:
    """Trains a model.

    The exit code is 0 at the end of training, 2 after an error that the user can fix,
    75 (EX_TEMPFAIL) after SIGTERM and 130 after Ctrl-C. During updates, a signal ends
    training once a checkpoint is written. The same command resumes an interrupted run.
    """
    from relattn import training
    from relattn.training.config_file import read_config
    from relattn.training.distributed import initialize

    parser = command.Parser("python train.py", "Trains a model.", overrides=True)
    add = parser.add_argument
    add(
        "--config",
        required=True,
        help="the configuration: configs/X.py[:argument], or X[:argument] for one of "
        "the package, which `relattn config` lists",
    )
    add("--workdir", required=True, help="the run directory")
    add(
        "--distributed",
        action="store_true",
        help="train with the processes that the cluster's environment describes",
    )
    add("--coordinator", default="", help="HOST:PORT of process 0")
    add("--num_processes", type=int, default=0, help="number of processes")
    add("--process_id", type=int, default=-1, help="index of this process, from 0")
    add(
        "--heartbeat_seconds",
        type=int,
        default=100,
        help="seconds without a heartbeat after which a process counts as dead",
    )
    add(
        "--profile",
        type=int,
        default=0,
        metavar="STEPS",
        help="number of updates to trace with jax.profiler, into profile in the run "
        "directory",
    )
    given = parser.parse_args(argv)
    config = read_config(given.config, given.overrides, given.workdir)
    command.keep_heap()
    processes = (given.coordinator, given.num_processes, given.process_id)
    if given.distributed or processes != ("", 0, -1):
        initialize(*processes, heartbeat_seconds=given.heartbeat_seconds)
    training.train_and_evaluate(config, given.workdir, profile=given.profile)


@command.entry_point
def show_config(argv: Sequence[str] | None = None) -> None:
    """Prints a configuration, every key with its value, or lists the configurations."""
    from relattn.training import config as config_lib
    from relattn.training import config_file

    parser = command.Parser(
        "python -m relattn config", show_config.__doc__, overrides=True
    )
    add = parser.add_argument
    add(
        "--config",
        help="the configuration, as for training; without it, those of the package are "
        "listed",
    )
    add("--json", action="store_true", help="print JSON")
    given = parser.parse_args(argv)
    if given.config is None:
        if given.overrides or given.json:
            raise ValueError("--config is missing: name the configuration to print")
        for name, title in config_file.package_titles().items():
            print(f"{name}: {title}")
        return
    config = config_file.read_config(given.config, given.overrides)
    config_lib.check_config(config)
    if given.json:
        print(json.dumps(config_lib.to_json(config), indent=2))
        return
    for key, value in config_lib.flatten(config).items():
        print(f"config.{key} = {value!r}")


@command.entry_point
def eval_shift(
    argv: Sequence[str] | None = None,
    *,
    find_published: Callable[..., Any] | None = None,
) -> None:
    """Measures accuracy on shifted test images, as in figure 1 of Horn et al.

    Writes shift.csv, shift.png and summary.md, and prints the summary: accuracy, and
    consistency, the fraction of images predicted as when unshifted. In a clone,
    ``python eval_shift.py`` adds the curves of the figure to its class and axis.

    Args:
        argv: Command-line arguments, by default the process's.
        find_published: Returns the published curve of a run, to compare with; None for
            no such curves.

    Raises:
        ValueError: If a run is given twice, or an option is invalid.
    """
    from relattn.evaluation.compare import shift_report
    from relattn.evaluation.page import Page
    from relattn.evaluation.shift_runs import open_shift_runs
    from relattn.training.workdir import usable_folder

    parser = command.Parser("python eval_shift.py", eval_shift.__doc__)
    add = parser.add_argument
    add("--workdir", action="append", default=[], help="a run directory; repeatable")
    add("--output", required=True, help="folder to write to")
    add("--max_shift", type=int, default=8, help="largest shift in pixels")
    add(
        "--axis",
        default="x",
        help="x (right), y (down), or xy: every pair of shifts, as heat maps",
    )
    add(
        "--classes",
        default="1",
        help="a class, by number or name, that has its own curves next to those of all "
        "classes, from the test images that can move max_shift pixels both ways; or "
        "all: every image at the shifts that it allows, without curves of a class",
    )
    add("--checkpoint", default="best", help="best or latest")
    add(
        "--image_size",
        type=int,
        help="side of the images in pixels, by default that of training; the models' "
        "position tables are resized",
    )
    add(
        "--num_images",
        type=int,
        help="number of test images to use, from the first; by default all",
    )
    add(
        "--boundary",
        default="zeros",
        help="what moves into an image: zeros; circular (what leaves on the other "
        "side); or, for photographs, crop (the rest of a larger image). With circular "
        "and crop, all images allow all shifts",
    )
    add("--draws", type=int, help=command.DRAWS_HELP)
    add("--data_dir", help="folder of the data set, if it has moved")
    add(
        "--page",
        action="store_true",
        help="also write page.html, to move test images and see the predictions",
    )
    given = parser.parse_args(argv)
    folders = [Path(workdir).resolve() for workdir in given.workdir]
    for workdir, folder in zip(given.workdir, folders, strict=True):
        if folders.count(folder) > 1:
            # It would count as two runs that differ in their seed.
            raise ValueError(f"--workdir={workdir} is given twice: pass it once")
    # Checked before the runs are opened.
    output = usable_folder(given.output, "--output")
    runs = open_shift_runs(
        given.workdir,
        checkpoint=given.checkpoint,
        image_size=given.image_size,
        data_dir=given.data_dir,
    )
    page = None
    if given.page:
        page = Page(
            runs,
            max_shift=given.max_shift,
            boundary=given.boundary,
            draws=given.draws,
        )
    summary = shift_report(
        runs,
        output,
        max_shift=given.max_shift,
        axis=given.axis,
        classes=given.classes,
        num_images=given.num_images,
        boundary=given.boundary,
        draws=given.draws,
        find_published=find_published,
        on_load=page and page.add,
    )
    print(summary)
    written = ["shift.csv", "shift.png", "summary.md"]
    if page is not None:
        written.append("page.html")
        page.write(output / "page.html")
    print(printable(f"Written to {given.output}: {', '.join(written)}"))
