"""Going on with a run: what was saved, and whether it is of the same run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from relattn.data import DataInfo
from relattn.training.checkpoint import read_meta
from relattn.training.config import complete, differences, to_json
from relattn.training.damage import read_latest
from relattn.training.errors import CheckpointError, WorkdirError
from relattn.training.history import History
from relattn.training.run import CHECKPOINTS, check_labels


def read_saved(workdir: Path, config: ConfigDict) -> dict[str, Any] | None:
    """What was saved beside the arrays of the latest intact checkpoint.

    Args:
        workdir: The run directory.
        config: What is to be trained there.

    Returns:
        The meta of `relattn.training.damage.read_latest` and ``step``; None where there
        is no checkpoint.

    Raises:
        WorkdirError: If the run is of another configuration.
        CheckpointError: If no checkpoint is intact, or not the best one.

    Example:
        >>> read_saved(Path("no/such/folder"), ConfigDict()) is None
        True
    """
    latest = read_latest(workdir / CHECKPOINTS)
    if latest is None:
        return None
    step, meta = latest
    differing = differences(to_json(complete(meta["config"])), to_json(config))
    if differing:
        raise WorkdirError(
            f"--workdir {workdir} holds a run of another configuration "
            f"({'; '.join(differing)}): choose another directory or the same values"
        )
    histories = History.list_from_json(meta["history"])
    # The final metrics are those of the best checkpoints: no use without them.
    for best in {history.best_step for history in histories} - {None, step}:
        read_meta(workdir / CHECKPOINTS, best)
    return {**meta, "step": step}


def check_same_data(trained: DataInfo, data: DataInfo, where: Path) -> None:
    """Raises unless a run goes on with the data that it was trained on.

    Args:
        trained: What the run was trained on.
        data: What it is to go on with; from elsewhere perhaps.
        where: The run's checkpoint, for the message.

    Raises:
        CheckpointError: If anything but ``origin`` differs, the statistics of the
            images by more than rounding.
    """
    check_labels(trained, data, where)
    before, now = dataclasses.asdict(trained), dataclasses.asdict(data)
    differing = [
        f"{name}: {before[name]} there, {now[name]} now"
        for name in before
        if name != "origin"
        and not (
            np.allclose(before[name], now[name], rtol=1e-4)
            if name in ("mean", "std")
            else before[name] == now[name]
        )
    ]
    if differing:
        raise CheckpointError(
            f"{where} was trained on other data ({'; '.join(differing)}), and nothing "
            "was changed: give the data it was trained on, or another --workdir"
        )
