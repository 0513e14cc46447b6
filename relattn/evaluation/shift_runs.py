"""Opens runs with their test images, to evaluate them under shifts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from relattn.data import (
    DataSource,
    ImageInfo,
    ImageSplit,
    StreamedSplit,
    input_shape,
    load_data,
)
from relattn.evaluation.shift import check_shiftable
from relattn.training import Run
from relattn.training.given_data import check_source, data_config, require_data
from relattn.training.resume import check_fits
from relattn.training.saved_run import SavedRun, open_run

OPEN_CALL = "relattn.evaluation.shift_runs.open_shift_runs(workdirs, data=...)"


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftRun:
    """A run on images, before its arrays are read, and its test images.

    Attributes:
        name: The run's name: that of its folder; where names are equal, the path below
            the folder that all runs share.
        saved: The run.
        dataset: The name of the data set.
        split: The test images.
    """

    name: str
    saved: SavedRun
    dataset: str
    split: ImageSplit | StreamedSplit

    @property
    def workdir(self) -> Path:
        """The run directory."""
        return self.saved.workdir

    @property
    def info(self) -> ImageInfo:
        """The description of the training data."""
        return cast(ImageInfo, self.saved.task.info)

    @property
    def image_size(self) -> tuple[int, ...]:
        """Height and width, in pixels, of the images that the model sees."""
        return input_shape(self.saved.task.config.data, self.info)[:2]

    def load(self) -> list[Run]:
        """Reads the run of each seed."""
        return self.saved.load()

    def load_first(self) -> Run:
        """Reads the run of the first seed."""
        (run,) = self.saved.load(self.saved.seeds[:1])
        return run


def open_shift_runs(
    workdirs: Sequence[str | Path] | str | Path,
    *,
    checkpoint: str = "best",
    image_size: int | tuple[int, int] | None = None,
    data_dir: str | None = None,
    data: DataSource | None = None,
) -> list[ShiftRun]:
    """Opens runs on images with their test images; each data set is loaded once.

    Args:
        workdirs: The run directories, or a single one.
        checkpoint: ``"best"`` or ``"latest"``.
        image_size: Side, or height and width, of the images, in pixels, for which the
            models are resized; None for the size of training.
        data_dir: The folder of the data set; None for the folder of training.
        data: The data set of all runs; None for that of training, unless it was given
            in memory.

    Returns:
        The runs, in the order of ``workdirs``.

    Raises:
        ValueError: If there is no run, one is not of images, there are no test images,
            or an argument does not fit.
        CheckpointError: If a folder has no run with a checkpoint, or the data have
            other classes than a run predicts.
    """
    check_source(data)
    if isinstance(workdirs, str | os.PathLike):
        workdirs = [workdirs]
    if not workdirs:
        raise ValueError("no run: name at least one folder by --workdir")
    names = run_names(workdirs)
    # All runs are checked before the first data set is loaded.
    opened = [open_run(workdir, checkpoint, image_size) for workdir in workdirs]
    for saved in opened:
        check_shiftable(saved.task.info, saved.workdir)
        if data is None:
            require_data(saved.given, saved.task.info, saved.workdir, OPEN_CALL)
        elif data_dir is not None:
            raise ValueError(f"data_dir={data_dir!r} does not apply to data in memory")
    sources: dict[str, DataSource] = {}
    runs = []
    for name, saved in zip(names, opened, strict=True):
        source = data
        if source is None:
            config = data_config(saved.task.config, data_dir, saved.workdir)
            key = config.to_json()
            if key not in sources:
                sources[key] = load_data(config)
            source = sources[key]
        check_fits(saved.task.info, source.info, saved.workdir)
        split = cast(ImageSplit | StreamedSplit, source.eval_splits["test"])
        if not len(split):
            raise ValueError(
                f"the test split of {source.info.name} is empty: shifts need test "
                "images"
            )
        runs.append(ShiftRun(name, saved, source.info.name, split))
    return runs


def run_names(workdirs: Sequence[str | Path]) -> list[str]:
    """Returns short names of runs, those of their folders if these are different.

    Args:
        workdirs: The run directories.

    Returns:
        The names; where those of two folders are equal, the paths below the folder that
        all runs share.

    Example:
        >>> run_names(["runs/a", "runs/b"]), run_names(["runs/a/0", "runs/b/0"])
        (['a', 'b'], ['a/0', 'b/0'])
    """
    names = [Path(workdir).name for workdir in workdirs]
    if len(set(names)) == len(names):
        return names
    # Without the folders of this machine that all have.
    paths = [Path(workdir).absolute() for workdir in workdirs]
    common = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(common).as_posix() for path in paths]


def check_runs(runs: Sequence[ShiftRun]) -> None:
    """Raises ValueError unless there is a run, and all are from `open_shift_runs`."""
    other = next((run for run in runs if not isinstance(run, ShiftRun)), None)
    if other is not None or not len(runs):
        got = "no run" if other is None else f"a {type(other).__name__}"
        raise ValueError(f"got {got}: pass a list of runs, from {OPEN_CALL}")
