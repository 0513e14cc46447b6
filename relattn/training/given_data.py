"""What a run remembers of its data, and of data that were given in memory."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from relattn.command import one_line
from relattn.data import (
    IMAGE_OPTIONS,
    DataInfo,
    DataSource,
    ImageSplit,
    PointSplit,
    TokenSplit,
    read_info,
)
from relattn.data.image_list import ImageRecords
from relattn.data.streaming import Photographs, StreamedSplit
from relattn.manifest import recorded_sha256, sha256
from relattn.messages import shorten
from relattn.training.errors import CheckpointError

# Number of examples that are hashed of a split that is not of a type of relattn.
NUM_EXAMPLES = 64


def fingerprint(data: DataSource) -> str:
    """Computes a hash of a data set.

    Args:
        data: The data set. Of images, points and texts in memory, everything is
            hashed; of texts in files, the files' checksums, from the manifest if there
            is one; of photographs that are read during training, the labels, the sizes
            of the files and the first evaluation batch; of a split of another type,
            the first evaluation batch.

    Returns:
        A hexadecimal number.

    Example:
        >>> from relattn.data import ImageData
        >>> def stripes(value):
        ...     images = np.full((5, 2, 2, 1), value, np.uint8)
        ...     return ImageData.from_arrays(
        ...         "stripes", images, np.arange(5) % 2, ("a", "b"), num_validation=2)
        >>> fingerprint(stripes(3)) == fingerprint(stripes(3))
        True
        >>> fingerprint(stripes(3)) == fingerprint(stripes(4))
        False
    """
    digest = hashlib.blake2b(digest_size=16)
    splits = {"train": getattr(data, "train", None), **data.eval_splits}
    for name, split in sorted(splits.items()):
        digest.update(name.encode())
        for array in _arrays(split):
            array = np.ascontiguousarray(array)
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def _arrays(split: Any) -> list[np.ndarray]:
    if isinstance(split, ImageSplit):
        return [split.images, split.labels]
    if isinstance(split, PointSplit):
        return [split.points, split.labels]
    if isinstance(split, TokenSplit):
        file = getattr(split.tokens, "filename", None)
        if not file:
            return [split.tokens]
        # The same whether the text has a manifest or not.
        checksum = recorded_sha256(Path(file)) or sha256(Path(file))
        return [np.frombuffer(checksum.encode(), np.uint8)]
    if isinstance(split, Photographs):
        if not isinstance(split.records, ImageRecords):
            return [split.indices]
        sizes = [source.size() for source in split.records.sources]
        return [split.indices, split.records.labels, np.array(sizes)]
    if isinstance(split, StreamedSplit):
        # Processes that read would take seconds to start.
        split = dataclasses.replace(split, num_workers=0)
    if split is None or not hasattr(split, "batches") or not len(split):
        return []
    batch = next(split.batches(min(len(split), NUM_EXAMPLES)))
    return [np.asarray(batch[key]) for key in sorted(batch)]


def check_source(data: Any) -> None:
    """Raises ValueError unless an argument is a data set, or None."""
    if data is not None and not isinstance(data, DataSource):
        raise ValueError(
            "data must be a data set, such as ImageData.from_arrays(...), got "
            f"{type(data).__name__}: see relattn.data.DataSource"
        )


def check_options(options: ConfigDict, data: DataSource) -> None:
    """Checks that data augment and place images as the configuration says.

    Args:
        options: ``config.data``.
        data: The data; without an attribute of an option's name, it has the default.

    Raises:
        ValueError: If an option differs: it would have no effect.
    """
    for option in ("augment", "placement"):
        default = IMAGE_OPTIONS[option]
        asked = options.get(option, default)
        found = getattr(data, option, default)
        if asked != found:
            raise ValueError(
                f"config.data.{option} is {shorten(asked)}, but the data "
                f"{shorten(data.info.name)} have {option}={shorten(found)}: give "
                "both the same value"
            )


def check_description(info: DataInfo) -> None:
    """Checks that a run can store the description of its data, and read it again.

    Args:
        info: The description.

    Raises:
        ValueError: If a field has a value that JSON does not have, or another type or
            range than it should have.

    Example:
        >>> from relattn.data import TextInfo
        >>> check_description(TextInfo("plays", "bytes", 256, 7, 100, "a file"))
    """
    try:
        read_info(json.loads(json.dumps(dataclasses.asdict(info))))
    except (TypeError, ValueError) as error:
        # At the end of training it would be too late.
        raise ValueError(
            f"a run cannot store the description of its data ({one_line(error)}): "
            "correct it; class_names, for example, must be strings"
        ) from error


def check_given(saved: dict[str, Any], given: bool, checkpoint: Path) -> None:
    """Checks that a run that was given its data resumes with given data.

    Args:
        saved: The metadata of the checkpoint.
        given: Whether data are given now.
        checkpoint: The checkpoint, for the message.

    Raises:
        CheckpointError: If the run was given data, and is not now.
    """
    if saved.get("given") and not given:
        name = saved["data"]["name"]
        raise CheckpointError(
            f"{checkpoint} was trained on data given in memory ({name!r}), which "
            "config.data does not load: resume it in Python by "
            "relattn.training.train_and_evaluate(config, workdir, data=...)"
        )


def check_contents(saved: dict[str, Any], contents: str, checkpoint: Path) -> None:
    """Checks that a run resumes with the data that it was trained on.

    Args:
        saved: The metadata of the checkpoint.
        contents: The `fingerprint` of the data.
        checkpoint: The checkpoint, for the message.

    Raises:
        CheckpointError: If it was trained on data with another fingerprint.
    """
    # Earlier versions saved only the fingerprint of data that were given.
    before = saved.get("contents") or saved.get("given")
    if before and contents != before:
        raise CheckpointError(
            f"{checkpoint} was trained on other data, of the same description but with "
            "other values, and nothing was changed: use the data that it was trained "
            "on, or choose another --workdir"
        )


def require_data(was_given: bool, info: DataInfo, workdir: Path, call: str) -> None:
    """Refuses to load the data of a run that were given in memory.

    Args:
        was_given: Whether they were.
        info: The description of the training data.
        workdir: The run directory, for the message.
        call: The Python call that takes the data, for the message.

    Raises:
        ValueError: If they were.

    Example:
        >>> from relattn.data import TextInfo
        >>> info = TextInfo("plays", "bytes", 256, 7, 100, "a file")
        >>> require_data(True, info, Path("runs/a"), "run.evaluate(data=...)")
        Traceback (most recent call last):
        ValueError: runs/a was trained on data given in memory ('plays'), which \
config.data does not load: pass them in Python by run.evaluate(data=...)
    """
    if was_given:
        raise ValueError(
            f"{workdir} was trained on data given in memory ({info.name!r}), which "
            f"config.data does not load: pass them in Python by {call}"
        )


def data_config(config: ConfigDict, data_dir: str | None, workdir: Path) -> ConfigDict:
    """Returns the options ``config.data`` of a run whose data may have moved.

    Args:
        config: The configuration of training.
        data_dir: The folder or file of the data; None for that of training.
        workdir: The run directory, for the message.

    Returns:
        A copy of the options.

    Raises:
        ValueError: If ``data_dir`` is given for data that ship with relattn.

    Example:
        >>> config = ConfigDict({"data": {"source": "folder", "data_dir": "old"}})
        >>> data_config(config, "new", Path("runs/a")).data_dir
        'new'
    """
    options = ConfigDict(config.data.to_dict())
    if data_dir is not None:
        if options.get("source", "embedded") == "embedded":
            raise ValueError(
                f"--data_dir={data_dir} does not apply to {workdir}, which was trained "
                "on data that ship with relattn: leave it out"
            )
        options.data_dir = data_dir
    return options
