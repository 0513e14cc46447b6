"""Sets of points in memory, and their source: arrays, or a file of arrays, ``.npz``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int32, Int64

from relattn.data.array_hints import labels_hint
from relattn.data.arrays import (
    CLASS_NAMES,
    check_labels_array,
    encode_labels,
    open_arrays,
)
from relattn.data.base import (
    ONE_SHARD,
    Batch,
    Loader,
    PointInfo,
    ShardIndex,
    batch_indices,
    check_eval_batch,
    fill_batch,
    shard_rows,
    steps_per_epoch,
)
from relattn.data.images import (
    check_class_names,
    check_labels,
    check_no_draw,
    draw_validation,
)
from relattn.messages import shorten

INPUTS = ("positions", "features", "mask")
PARTS = (*INPUTS, "labels")
SPLITS = ("train", "validation", "test")
# Sets are moved by multiples of it: those near zero, as most are, stay as they are.
_MOVES = 1024.0


@dataclasses.dataclass(frozen=True, eq=False)
class PointSplit:
    """Sets of equally many points, with their labels.

    Attributes:
        points: Positions and features, float32, shape ``[n, points, axes + channels]``;
            NaN for padding.
        labels: Labels, int32, shape ``[n]``.
        num_axes: Number of axes of a position.
    """

    points: Float32[np.ndarray, "n points columns"]
    labels: Int32[np.ndarray, " n"]
    num_axes: int

    @classmethod
    def from_arrays(
        cls,
        positions: np.ndarray,
        labels: np.ndarray,
        features: np.ndarray | None = None,
        mask: np.ndarray | None = None,
    ) -> PointSplit:
        """Joins arrays of your own.

        Near 1e6, float32 rounds positions by up to 0.03. So a set whose mean is more
        than 512 along an axis is moved by the nearest multiple of 1,024, which changes
        no offset between its points.

        Args:
            positions: Position of each point, shape ``[n, points, axes]``.
            labels: Integers from 0, shape ``[n]``.
            features: Features of each point, shape ``[n, points, channels]``; None for
                a single feature, 1 for every point.
            mask: True for points that exist, shape ``[n, points]``; None for all. The
                others are padding, whose values do not matter.

        Returns:
            The sets of points, copied.

        Raises:
            ValueError: If an array has another type or shape, or a point that exists
                is not finite.

        Example:
            >>> split = PointSplit.from_arrays(
            ...     np.zeros((5, 7, 3)), np.arange(5), mask=np.ones((5, 7), bool))
            >>> split.points.shape, split.num_axes
            ((5, 7, 4), 3)
        """
        points, labels = _join(positions, features, mask), np.asarray(labels)
        if labels.shape != points.shape[:1] or labels.dtype.kind not in "iu":
            raise ValueError(
                f"labels have shape {labels.shape} and dtype {labels.dtype}, expected "
                f"{len(points)} integers: {labels_hint(labels, len(points))}"
            )
        # Labels beyond int32 would wrap around: clipped, they are refused as too large.
        labels = np.clip(labels.astype(np.int64), -1, 2**31 - 1).astype(np.int32)
        return cls(points, labels, np.shape(positions)[-1])

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def point_shape(self) -> tuple[int, int, int]:
        """Returns the number of points, of axes and of channels."""
        _, num_points, columns = self.points.shape
        return num_points, self.num_axes, columns - self.num_axes

    def gather(self, indices: Int64[np.ndarray, " batch"] | slice) -> Batch:
        """Returns the batch of some sets: ``points`` and ``label``."""
        return {"points": self.points[indices], "label": self.labels[indices]}

    def select(self, indices: Int64[np.ndarray, " chosen"]) -> PointSplit:
        """Returns some of the sets."""
        return PointSplit(self.points[indices], self.labels[indices], self.num_axes)

    def batches(
        self, batch_size: int, shard: ShardIndex = ONE_SHARD
    ) -> Iterator[Batch]:
        """Yields every set once, in order, see `EvalSplit.batches`.

        Raises:
            ValueError: If ``batch_size`` is not positive.
        """
        check_eval_batch(batch_size)
        local = shard_rows(batch_size, shard)
        for start in range(0, len(self), batch_size):
            rows = slice(start + local.start, start + local.stop)
            yield fill_batch(self.gather(rows), local.stop - local.start)


@dataclasses.dataclass(frozen=True, eq=False)
class PointData:
    """Sets of points in memory, ready for training: a `DataSource`.

    Attributes:
        name: Name of the data.
        train: Training sets.
        validation: Sets held out from those of training; may be empty.
        test: Test sets.
        class_names: Class names in label order.
        origin: Where the points came from, in words.
        more_tests: More test sets, by names that start with ``"test_"``.

    Raises:
        ValueError: If a label is out of range, the splits differ in their numbers of
            points, axes or channels, or a name in ``more_tests`` does not start with
            ``"test_"``.
    """

    name: str
    train: PointSplit
    validation: PointSplit
    test: PointSplit
    class_names: tuple[str, ...]
    origin: str
    more_tests: Mapping[str, PointSplit] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in self.more_tests:
            if not name.startswith("test_"):
                raise ValueError(
                    f"more_tests has {shorten(name)}: choose a name that starts with "
                    "'test_'"
                )
        for name, split in {"train": self.train, **self.eval_splits}.items():
            check_labels(split.labels, len(self.class_names), name)
            found, expected = split.point_shape, self.train.point_shape
            if found != expected:
                fix = "pad the points and pass a mask"
                if found[1:] != expected[1:]:
                    fix = "pass the same axes and features for each"
                raise ValueError(
                    f"the (points, axes, channels) of {name} are {found}, but those of "
                    f"train {expected}: {fix}"
                )

    @classmethod
    def from_splits(
        cls,
        name: str,
        train: PointSplit,
        class_names: Sequence[str],
        *,
        num_validation: int = 0,
        validation: PointSplit | None = None,
        test: PointSplit | None = None,
        split_seed: int = 0,
        **others: Any,
    ) -> PointData:
        """Makes data of training and test sets.

        Args:
            name: Name of the data.
            train: Training sets, some of which may be held out for validation.
            class_names: Class names in label order.
            num_validation: Number of training sets to hold out.
            validation: Validation sets, in place of these.
            test: Test sets; None for those of validation.
            split_seed: Seed that selects the sets that are held out.
            **others: More attributes.

        Returns:
            The data.

        Raises:
            ValueError: If a split has no sets or is not a `PointSplit`,
                ``num_validation`` leaves no training set, a class has no name of
                its own, or the splits do not fit together.

        Example:
            >>> train = PointSplit.from_arrays(np.zeros((5, 7, 2)), np.arange(5) % 2)
            >>> names = ("a", "b")
            >>> data = PointData.from_splits("mine", train, names, num_validation=2)
            >>> len(data.train), data.info.point_shape
            (3, (7, 2, 1))
        """
        for key, split in {
            "train": train,
            "validation": train if validation is None else validation,
            "test": train if test is None else test,
        }.items():
            if not isinstance(split, PointSplit):
                raise ValueError(
                    f"{key} must be a PointSplit, such as PointSplit.from_arrays("
                    f"positions, labels), got {type(split).__name__}"
                )
            if not len(split):
                raise ValueError(f"{key} has no sets of points: pass at least one")
        if validation is None:
            chosen = np.sort(draw_validation(len(train), num_validation, split_seed))
            validation = train.select(chosen)
            train = train.select(np.setdiff1d(np.arange(len(train)), chosen))
        else:
            check_no_draw(num_validation)
        others.setdefault("origin", f"arrays of {len(train)} sets of points")
        test = validation if test is None else test
        names = check_class_names(class_names)
        return cls(name, train, validation, test, names, **others)

    @property
    def info(self) -> PointInfo:
        """Describes the points to the model."""
        return PointInfo(
            name=self.name,
            class_names=self.class_names,
            point_shape=self.train.point_shape,
            num_train=len(self.train),
            origin=self.origin,
        )

    @property
    def eval_splits(self) -> Mapping[str, PointSplit]:
        """Returns the evaluation splits by name."""
        return {"validation": self.validation, "test": self.test, **self.more_tests}

    def train_loader(
        self,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        place: Callable[[Batch], Any] | None = None,
        shard: ShardIndex = ONE_SHARD,
    ) -> Loader:
        """Iterates over training batches, see `DataSource.train_loader`.

        Raises:
            ValueError: If there are fewer sets than a batch needs.
        """
        n, rows = len(self.train), shard_rows(batch_size, shard)
        steps_per_epoch(n, batch_size, "sets of points")

        def make_batch(step: int) -> Batch:
            return self.train.gather(batch_indices(n, batch_size, seed, step)[rows])

        return Loader(make_batch, start_step, place=place)


def read_points(
    file: Path, name: str, num_validation: int = 0, split_seed: int = 0
) -> PointData:
    """Reads sets of points from a file that `numpy.savez` wrote.

    The arrays are ``train_positions``, ``train_labels`` and optionally
    ``train_features`` and ``train_mask``, as in `PointSplit.from_arrays`; optionally
    the same of ``validation`` and ``test``; and optionally ``class_names``. Labels are
    numbers or names.

    Args:
        file: The file.
        name: Name of the data.
        num_validation: Number of training sets to hold out for validation.
        split_seed: Seed that selects them.

    Returns:
        The data. Without ``class_names``, the classes are the different labels of
        training, see `relattn.data.arrays.encode_labels`.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is not such a file, its arrays do not fit together, or two
            classes have the same name.
    """
    names = [f"{split}_{part}" for split in SPLITS for part in PARTS]
    arrays, listed = open_arrays(file, {*names, CLASS_NAMES})
    splits, labels = {}, {}
    for split in SPLITS:
        given = {p: arrays[f"{split}_{p}"] for p in PARTS if f"{split}_{p}" in arrays}
        if not given and split != "train":
            continue
        for part in ("positions", "labels"):
            if part not in given:
                raise ValueError(
                    f"{file} has no array {split}_{part}, only {listed or 'none'}: "
                    "add it"
                )
        labels[split] = check_labels_array(
            given.pop("labels"), given["positions"], f"{split}_labels in {file}"
        )
        splits[split] = given
    class_names, labels = encode_labels(labels, arrays, file)
    found = {}
    for split, given in splits.items():
        try:
            found[split] = PointSplit.from_arrays(labels=labels[split], **given)
        except ValueError as error:
            raise ValueError(f"{split} in {file}: {error}") from error
    return PointData.from_splits(
        name,
        found["train"],
        class_names,
        num_validation=num_validation,
        validation=found.get("validation"),
        test=found.get("test"),
        split_seed=split_seed,
        origin=f"the arrays of {file}",
    )


def read_point_sets(
    points: Any, info: PointInfo
) -> Float32[np.ndarray, "n points columns"]:
    """Reads sets of points as a data set stores them.

    Args:
        points: A mapping with the array ``positions`` and optionally ``features`` and
            ``mask``, as in `PointSplit.from_arrays`; the path of a file of these, which
            `numpy.savez` wrote; an array of positions and features, ``[n, points, axes
            + channels]``, where points of NaN are padding; or a list of arrays
            ``[points, axes + channels]``, of any number of points each.
        info: Description of the training data.

    Returns:
        Positions and features, float32, shape ``[n, points, axes + channels]``; NaN for
        padding. Sets far from zero are moved, as in `PointSplit.from_arrays`.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: If it is not such a file, an array has another type or shape, or a
            point that exists is not finite.

    Example:
        >>> info = PointInfo("mine", ("a", "b"), (7, 2, 1), 5, "")
        >>> read_point_sets([np.zeros((4, 3)), np.zeros((9, 3))], info).shape
        (2, 9, 3)
    """
    if not isinstance(points, str | os.PathLike):
        return _read_arrays(points, info)
    file = Path(points)
    arrays, listed = open_arrays(file, {*PARTS}, "pass a file of numpy.savez")
    arrays.pop("labels", None)
    if "positions" not in arrays:
        raise ValueError(
            f"{file} has no array positions, only {listed or 'none'}: name the arrays "
            "positions and, optionally, features and mask"
        )
    try:
        return _read_arrays(arrays, info)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _read_arrays(
    points: Any, info: PointInfo
) -> Float32[np.ndarray, "n points columns"]:
    """Reads sets of points in memory, see `read_point_sets`."""
    _, axes, channels = info.point_shape
    if isinstance(points, Mapping):
        if "positions" not in points or {*points} - {*INPUTS}:
            raise ValueError(
                f"points has {', '.join(map(str, points)) or 'no arrays'}, expected "
                "positions and, optionally, features and mask"
            )
        joined, given_axes = _join(**points), np.shape(points["positions"])[-1]
    else:
        joined, given_axes = _stack(points, axes, channels), axes
    found = given_axes, joined.shape[-1] - given_axes
    if found != (axes, channels):
        raise ValueError(
            f"points have {found[0]} axes and {found[1]} channels, but the model was "
            f"trained on {axes} and {channels}: pass the same numbers"
        )
    return joined


def _join(
    positions: Any, features: Any = None, mask: Any = None
) -> Float32[np.ndarray, "n points columns"]:
    """Returns positions and features in one array, with NaN for padding."""
    positions = _as_array(positions, "positions")
    if positions.ndim != 3 or not all(positions.shape[1:]):
        raise ValueError(
            f"positions have shape {positions.shape}, expected [n, points, axes]"
            + ": for one axis pass positions[..., None]" * (positions.ndim == 2)
        )
    sets = positions.shape[:2]
    features = np.ones((*sets, 1)) if features is None else features
    mask = np.ones(sets, bool) if mask is None else mask
    features, mask = _as_array(features, "features"), _as_array(mask, "mask")
    if features.ndim != 3 or features.shape[:2] != sets or not features.shape[-1]:
        fix = ": pass features[..., None]" * (features.shape == sets)
        raise ValueError(
            f"features have shape {features.shape}, expected [{sets[0]}, {sets[1]}, "
            f"channels]{fix}"
        )
    if mask.shape != sets or mask.dtype != bool:
        fix = ": pass mask.astype(bool)" * (mask.shape == sets)
        raise ValueError(
            f"the mask has shape {mask.shape} and dtype {mask.dtype}, expected "
            f"{list(sets)} and bool{fix}"
        )
    for name, array in {"positions": positions, "features": features}.items():
        if array.dtype.kind not in "biuf":
            raise ValueError(f"{name} have dtype {array.dtype}, expected numbers")
    points = np.concatenate([_move(positions, mask), features], axis=-1)
    points = points.astype(np.float32)
    if not np.isfinite(points[mask]).all():
        raise ValueError("a point is not finite: set its mask to False, or correct it")
    points[~mask] = np.nan
    return points


def _as_array(values: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError as error:
        # NumPy makes no array of lists of different lengths.
        raise ValueError(
            f"{name} has sets of different numbers of points: pad them to the same "
            "number, and pass a mask, False for padding"
        ) from error


def _move(
    positions: np.ndarray, mask: np.ndarray
) -> Float64[np.ndarray, "n points axes"]:
    """Moves each set by multiples of `_MOVES`, such that its mean is near zero."""
    exists, count = mask[..., None], np.maximum(mask.sum(axis=1), 1)
    positions = positions.astype(np.float64)
    # What is not finite is refused later.
    with np.errstate(invalid="ignore"):
        total = positions.sum(axis=1, keepdims=True, where=exists)
        mean = total / count[:, None, None]
        return positions - _MOVES * np.round(mean / _MOVES)


def _stack(
    points: Any, axes: int, channels: int
) -> Float32[np.ndarray, "n points columns"]:
    """Returns arrays of sets of points in one array, with NaN for padding."""
    columns = axes + channels
    if not isinstance(points, Sequence):
        points = np.asarray(points)
        points = points[None] if points.ndim == 2 else points
        if points.ndim != 3:
            raise ValueError(
                f"points has shape {points.shape}, expected [n, points, {columns}] or "
                f"one set [points, {columns}]"
            )
    sets = [np.asarray(each) for each in points]
    for index, each in enumerate(sets):
        if each.ndim != 2 or not len(each) or each.shape[1] != columns:
            hint = ", or a 1 without features" * (channels == 1)
            raise ValueError(
                f"set {index} of the points has shape {each.shape}, expected [points, "
                f"{columns}]: the position and the features of each{hint}"
            )
        if each.dtype.kind not in "biuf":
            raise ValueError(
                f"set {index} of the points has dtype {each.dtype}, expected numbers"
            )
    longest = max(map(len, sets), default=1)
    stacked = np.full((len(sets), longest, columns), np.nan)
    for row, each in zip(stacked, sets, strict=True):
        row[: len(each)] = each
    positions, features = np.split(stacked, [axes], axis=-1)
    return _join(positions, features, ~np.isnan(stacked).all(axis=-1))
