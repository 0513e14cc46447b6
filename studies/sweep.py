"""Trains a configuration with several values of some keys, and compares the results.

``python -m studies.sweep --config=configs/demo.py --output=DIR
--config.optimizer.learning_rate=1e-4,3e-4,1e-3``, from the project's root, trains one
run for each value; with several such keys, for each combination. Commas in brackets or
quotes belong to a value. Other options ``--config.key=value`` hold for all runs. Writes
``table.md`` and ``results.json``, the best run first. The same command continues an
interrupted sweep; with other values of the same keys it adds to the table. A run that
fails does not end it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relattn import command
from relattn.files import replace_file
from relattn.json_files import read_json
from relattn.markdown import markdown_table
from relattn.spec import split_commas
from relattn.training.config import check_config, differences
from relattn.training.config_file import read_config
from relattn.training.metrics import BEST_METRICS, METRICS, format_value, title
from relattn.training.overrides import typed_keys
from relattn.training.workdir import usable_folder, write_json
from studies.launcher import Training, train
from studies.report import last_line

# Length limit of the name of a run's folder.
MAX_NAME = 100


def run_sweep(
    config: str, output: str | Path, *, jobs: int = 1, overrides: Sequence[str]
) -> tuple[str, list[Training]]:
    """Trains the missing runs and writes the table.

    Args:
        config: The configuration, as for ``train.py``.
        output: The output folder.
        jobs: Number of parallel processes; see `studies.launcher.train`.
        overrides: Options of ``train.py``, some of them with several values.

    Returns:
        The table in Markdown, and the failed runs.

    Raises:
        ValueError: If no key has several values, a value does not fit the
            configuration, the output folder has results of another sweep, or the
            current folder is not the project's root.
        OSError: If the folder cannot be written to.
    """
    if not Path("train.py").exists():
        raise ValueError("no train.py here: run the sweep from the project's root")
    output = usable_folder(output, "--output")
    grid, fixed = split_grid(overrides)
    made = {"config": config, "overrides": fixed, "keys": list(grid)}
    combinations = [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]
    earlier = [
        run
        for run in _read_runs(output / "results.json", made)
        if run["values"] not in combinations
    ]
    trainings = []
    for chosen in combinations:
        options = [f"--config.{key}={value}" for key, value in chosen.items()]
        given = read_config(config, [*fixed, *options])
        # Raises before anything is trained.
        check_config(given)
        label = ", ".join(f"{key}={value}" for key, value in chosen.items())
        trainings.append(
            Training(
                label=label,
                config=config,
                workdir=_run_folder(output, label, [run.workdir for run in trainings]),
                seed=given.seed,
                num_seeds=given.num_seeds,
                overrides=[*fixed, *options],
            )
        )
    missing = [training for training in trainings if not training.is_complete()]
    print(
        f"{len(missing)} of {len(trainings)} runs to train; logs in "
        f"{output}/*/train.log",
        flush=True,
    )
    train(missing, jobs, keep_going=True)
    failed = [training for training in trainings if training.error]
    runs = [
        {"values": chosen, "workdir": training.workdir.name, **_outcome(training)}
        for chosen, training in zip(combinations, trainings, strict=True)
    ]
    results = {**made, "runs": [*earlier, *runs]}
    kinds = {training.info().kind for training in trainings if not training.error}
    text = sweep_table(results, kinds.pop() if kinds else "images")
    write_json(output / "results.json", results)
    replace_file(output / "table.md", text)
    return text, failed


def _read_runs(path: Path, made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads the runs of earlier commands.

    Raises:
        ValueError: If they have other keys, other options or another configuration.
    """
    if not path.exists():
        return []
    schema = {**dict.fromkeys(made, object), "runs": [{"values": dict, "*": object}]}
    found = read_json(path, schema, allow_nan=True)
    if differing := differences({key: found[key] for key in made}, made, ()):
        raise ValueError(
            f"{path.parent} has results of another sweep ({'; '.join(differing)}): "
            "choose another --output"
        )
    return found["runs"]


def _outcome(training: Training) -> dict[str, Any]:
    if training.error:
        return {"error": last_line(training.error)}
    return {"results": training.results()}


def split_grid(
    overrides: Sequence[str],
) -> tuple[dict[str, list[str]], list[str]]:
    """Splits options with several values from those with one.

    Args:
        overrides: Options ``--config.key=value``.

    Returns:
        The values of each key that has several, and the other options.

    Raises:
        ValueError: If no key has several, one is given twice, or has a value twice.

    Example:
        >>> split_grid(["--config.model.dim=8,16", "--config.seed=3"])
        ({'model.dim': ['8', '16']}, ['--config.seed=3'])
    """
    typed_keys(overrides)
    grid, fixed = {}, []
    for option in overrides:
        name, equals, text = option.partition("=")
        values = split_commas(text)
        if len(values) == 1:
            fixed.append(f"{name}={values[0]}" if equals else option)
            continue
        if len(set(values)) < len(values):
            raise ValueError(f"{name} has a value twice: {text}")
        grid[name.partition("config.")[2]] = values
    if not grid:
        raise ValueError(
            "no key has several values: pass some, as in "
            "--config.optimizer.learning_rate=1e-4,3e-4"
        )
    return grid, fixed


def _run_folder(output: Path, label: str, before: Sequence[Path]) -> Path:
    """Returns the folder of a run: that of an earlier sweep, if it trained the values.

    Example:
        >>> _run_folder(Path("none"), "optimizer.b1=0.9, model.pool=mean", []).name
        '0-optimizer.b1=0.9_model.pool=mean'
    """
    plain = re.sub(r"[^\w.=+-]+", "_", label)
    name = f"{len(before)}-{plain}"
    if len(name) > MAX_NAME:
        return output / name[:MAX_NAME]
    earlier = set(output.glob(f"*-{plain}")) - {*before}
    same = [folder for folder in earlier if folder.name.partition("-")[2] == plain]
    return min(same, default=output / name)


def sweep_table(results: Mapping[str, Any], kind: str) -> str:
    """Formats the results, the best run first and failed runs last.

    Args:
        results: The contents of ``results.json``.
        kind: Kind of the data, ``"images"`` or ``"tokens"``.

    Returns:
        Markdown: one row for each run; with several seeds, the mean and the standard
        deviation.
    """
    name = BEST_METRICS[kind]
    columns = [f"validation_{name}", f"test_{name}", "best_step", "seconds"]
    sign = -1 if METRICS[name].higher_is_better else 1

    def order(run: Mapping[str, Any]) -> tuple[bool, float]:
        if "error" in run:
            return True, 0.0
        value = np.mean([result[columns[0]] for result in run["results"]])
        return False, sign * float(value) if np.isfinite(value) else math.inf

    rows = []
    for run in sorted(results["runs"], key=order):
        cells = [f"`{run['values'][key]}`" for key in results["keys"]]
        if "error" in run:
            rows.append([*cells, f"failed: {run['error']}", *[""] * (len(columns) - 1)])
            continue
        for column in columns:
            values = [float(result[column]) for result in run["results"]]
            cells.append(format_value(column, float(np.mean(values))))
            if len(values) > 1 and column.endswith(name):
                deviation = float(np.std(values, ddof=1))
                cells[-1] += f" ± {format_value(column, deviation)}"
        rows.append(cells)
    header = [*(f"`{key}`" for key in results["keys"]), *map(title, columns)]
    return markdown_table(header, rows) + "\n"


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Runs a sweep."""
    parser = command.Parser("python -m studies.sweep", __doc__, overrides=True)
    add = parser.add_argument
    add("--config", required=True, help="the configuration, as for training")
    add("--output", required=True, help="output folder, with one for each run")
    add("--jobs", type=int, default=1, help="parallel processes")
    given = parser.parse_args(argv)
    text, failed = run_sweep(
        given.config, given.output, jobs=given.jobs, overrides=given.overrides
    )
    print(f"\n{text}\nWritten to {given.output}: table.md, results.json")
    if failed:
        names = "; ".join(training.name for training in failed)
        raise ChildProcessError(f"these runs failed: {names}")


if __name__ == "__main__":
    main()
