"""Runs a study: trains the models of a published table and writes the results.

``python -m studies --preset=translution_text --output=DIR``, from the project's root,
trains the missing runs of the preset with ``train.py`` and writes ``results.json``,
``table.md``, ``table.csv`` and ``curves.png``. The same command continues where the
study stopped. If a run fails, it is reported and the others continue. The seeds of
a model train together in one process; ``--together`` changes this. ``--dataset`` and
``--models`` select some of the runs, such as ``--dataset=constant
--models=drawn_once,redraw_20`` of ``performer_pixels16``, whose runs differ in the
schedule of the learning rate instead of the data; the tables have those of earlier
commands with the same options, too. Options ``--config.key=value``, such as
``--config.num_steps=50``, are passed to ``train.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from relattn import command
from relattn.evaluation.compare import shift_report
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.files import replace_file
from relattn.json_files import read_json
from relattn.messages import check_choice
from relattn.training.config import check_config
from relattn.training.config_file import read_config
from relattn.training.errors import WorkdirError
from relattn.training.overrides import typed_keys
from relattn.training.workdir import usable_folder, write_json
from studies.figure1 import published_curve
from studies.launcher import Training, train
from studies.presets import PRESETS, Row
from studies.redraws import redraw_report
from studies.report import plot_study, study_results, study_table, write_study_csv


def run_study(
    preset: str,
    output: str | Path,
    *,
    dataset: str = "",
    models: Sequence[str] = (),
    seeds: int = 1,
    together: int = 0,
    jobs: int = 1,
    overrides: Sequence[str] = (),
) -> tuple[str, list[Training]]:
    """Trains the missing runs of a study and writes its tables and curves.

    Args:
        preset: A key of `studies.presets.PRESETS`.
        output: The output folder.
        dataset: The only data set to train on; "" for all.
        models: Names of the rows to train; empty for all.
        seeds: Number of runs per row and data set; the first has the seed of the
            configuration, the next that seed plus 1, and so on.
        together: Number of seeds that one process trains; 0 for all.
        jobs: Number of parallel processes; see `studies.launcher.train`.
        overrides: Options of ``train.py``.

    Returns:
        The table in Markdown, and the failed runs.

    Raises:
        ValueError: If the preset does not exist, an option is invalid, the output
            folder has results of another study, or the current folder is not the
            project's root.
        OSError: If the folder cannot be written to, or a run cannot be loaded.
    """
    check_choice("preset", preset, PRESETS)
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if not 0 <= together <= seeds:
        raise ValueError(f"together must be from 0 (all) to {seeds}, got {together}")
    if not Path("train.py").exists():
        raise ValueError("no train.py here: run the study from the project's root")
    if "num_seeds" in typed_keys(overrides):
        raise ValueError("--seeds and --together set --config.num_seeds: leave it out")
    study = PRESETS[preset]
    chosen = study.on(dataset) if dataset else study
    chosen = chosen.of(models) if models else chosen
    for row in chosen.rows:
        for config in row.runs.values():
            # Raises before a folder is made.
            check_config(read_config(config, overrides))
    asked = {(row.name, trained) for row in chosen.rows for trained in row.runs}
    output = usable_folder(output, "--output")
    _check_results(output / "results.json", preset)
    groups = {}
    for row in study.rows:
        for trained in row.runs:
            make = partial(_group, row, trained, output, seeds, together, overrides)
            is_asked = (row.name, trained) in asked
            if group := make() if is_asked else _earlier(make):
                groups[row.name, trained] = group
    # The first seeds of all runs come first.
    by_seeds = zip(*(groups[key] for key in groups if key in asked), strict=True)
    trainings = [training for group in by_seeds for training in group]
    missing = [training for training in trainings if not training.is_complete()]
    print(
        f"{preset}: {len(missing)} of {len(trainings)} runs to train; logs in "
        f"{output}/*/train.log",
        flush=True,
    )
    for training in trainings:
        if training not in missing:
            training.say_result()
    train(missing, jobs, keep_going=True)
    failed = [training for training in trainings if training.error]
    finished = {
        key: [training for training in group if not training.error]
        for key, group in groups.items()
    }
    study = study.with_runs(lambda *key: key in groups)
    results = study_results(study, finished, failed, overrides)
    results = {"preset": preset, **results}
    text = study_table(study, results)
    write_json(output / "results.json", results)
    write_study_csv(study, results, output / "table.csv")
    replace_file(output / "table.md", text)
    plot_study(results, output / "curves.png")
    workdirs = [run.workdir for group in finished.values() for run in group]
    if study.shifts is not None and workdirs:
        text += "\n" + shift_report(
            open_shift_runs(workdirs),
            output / "shift",
            find_published=published_curve,
            **study.shifts,
        )
        replace_file(output / "table.md", text)
    if study.redraws is not None and workdirs:
        text += "\n" + redraw_report(study, finished, output)
        replace_file(output / "table.md", text)
    return text, failed


def _group(
    row: Row,
    trained: str,
    output: Path,
    seeds: int,
    together: int,
    overrides: Sequence[str],
) -> list[Training]:
    """Makes the trainings of all seeds of a run."""
    config, group = row.runs[trained], []
    first = read_config(config, overrides).seed
    words = [row.name, *filter(None, [trained])]
    for done in range(0, seeds, together or seeds):
        num_seeds = min(together or seeds, seeds - done)
        seed = first + done
        named = [seed] if num_seeds == 1 else [seed, seed + num_seeds - 1]
        training = Training(
            label=", ".join(words),
            config=config,
            workdir=output / "-".join([*words, *map(str, named)]),
            seed=seed,
            num_seeds=num_seeds,
            overrides=[w for w in overrides if typed_keys([w]) != {"seed"}],
        )
        group.append(training)
    return group


def _earlier(make: Callable[[], list[Training]]) -> list[Training]:
    """Returns the trainings of an earlier command, if all are complete."""
    try:
        group = make()
        if all(training.is_complete() for training in group):
            return group
        name = group[0].label
        if any(group[0].workdir.parent.glob(f"{name.replace(', ', '-')}-[0-9]*")):
            print(
                f"left out of the tables: {name}, without complete runs of these seeds "
                "on data in this folder: add it to --models"
            )
    except WorkdirError as error:
        print(f"left out of the tables: {error}")
    except ValueError:
        # The options do not fit the configuration.
        pass
    return []


def _check_results(path: Path, preset: str) -> None:
    """Raises ValueError if a folder has results of another study."""
    if path.exists() and read_json(path, dict).get("preset") != preset:
        raise ValueError(
            f"{path} is of another study than {preset}: choose another --output"
        )


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Runs a study."""
    parser = command.Parser("python -m studies", __doc__, overrides=True)
    names = ", ".join(PRESETS)
    parser.add_argument("--preset", required=True, help=f"the study: {names}")
    parser.add_argument("--output", required=True, help="output folder")
    parser.add_argument(
        "--dataset",
        default="",
        help="train only the runs of this data set, or other key of the study",
    )
    parser.add_argument("--models", default="", help="train these rows only: NAME,NAME")
    parser.add_argument("--seeds", type=int, default=1, help="runs per model")
    parser.add_argument(
        "--together",
        type=int,
        default=0,
        help="seeds per process; 0 for all; fewer need less memory",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="parallel processes; if several, each uses one GPU, or one core",
    )
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    text, failed = run_study(
        arguments.preset,
        arguments.output,
        dataset=arguments.dataset,
        models=[name for name in arguments.models.split(",") if name],
        seeds=arguments.seeds,
        together=arguments.together,
        jobs=arguments.jobs,
        overrides=arguments.overrides,
    )
    print(f"\n{text}\nIn {time.monotonic() - start:.0f} s. Written to", end=" ")
    print(f"{arguments.output}: results.json, table.md, table.csv, curves.png")
    if failed:
        names = "; ".join(training.name for training in failed)
        raise ChildProcessError(f"not trained: {names}")


if __name__ == "__main__":
    main()
