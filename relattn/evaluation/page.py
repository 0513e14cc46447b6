"""Writes a page on which you move test images and see the predictions of runs.

The page is one HTML file that needs no other: `relattn/evaluation/page.html` with the
class probabilities and attention maps of every image at every shift.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Num
from tqdm import tqdm

from relattn import models
from relattn.data import ImageSplit, preprocess
from relattn.evaluation.attention_maps import make_maps_fn
from relattn.evaluation.shift import (
    Shift,
    allowed_shifts,
    check_boundary,
    check_logits,
    check_shift,
    make_shift_fn,
    shifts_along,
)
from relattn.evaluation.shift_runs import ShiftRun, check_runs
from relattn.files import usable_file
from relattn.messages import printable, shorten
from relattn.offsets import is_whole
from relattn.training import Run, make_predict_fn
from relattn.training.workdir import write_text

TEMPLATE = Path(__file__).with_name("page.html")
MAX_BYTES = 5_000_000


def write_page(runs: Sequence[ShiftRun], path: str | Path, **options: Any) -> None:
    """Writes the page of some runs on the same images, at most 5 MB.

    Args:
        runs: The runs, from `relattn.evaluation.shift_runs.open_shift_runs`.
        path: The file; its folder is created if needed.
        **options: Options of `Page`.

    Raises:
        OSError: If the file is not writable; raised before any work.
        ValueError: If the runs or an option do not fit, see `Page`.
        CheckpointError: If a checkpoint is damaged.
    """
    # Before minutes of predictions.
    path = usable_file(path, "the page")
    page = Page(runs, **options)
    for run in runs:
        page.add(run.load_first())
    page.write(path)


class Page:
    """A page of some runs on the same images: add each of them, then write it.

    If the page would be too large, it has no attention maps, and says so. If it can, it
    opens on an image that every run classifies correctly unshifted and that some run
    misclassifies at other shifts: the image on which the worst run is furthest behind
    the others.

    Args:
        runs: The runs, from `relattn.evaluation.shift_runs.open_shift_runs`.
        names: Names of the runs; by default those of their folders.
        descriptions: A sentence on each run; by default none.
        max_shift: The shifts are ``-max_shift..max_shift`` along x and y, in pixels.
        boundary: ``"zeros"`` or ``"circular"``, see
            `relattn.evaluation.shift.shifted_predictions`. With zeros, the page uses
            images that can move by every shift without losing a non-zero pixel.
        draws: Number of draws of the random features over which the probabilities are
            averaged; None for the ``config.eval_draws`` of each run. Attention maps are
            those of the draw that is saved with the model.
        num_shown: Number of images on the page.
        num_images: Number of images for the accuracy.
        progress: Whether to show progress bars on a terminal.

    Raises:
        ValueError: If there are names or descriptions for another number of runs, a
            number of images is less than 1, the runs differ in their images or have no
            images in memory, no image allows every shift, the page is too large, or
            the logits of a run are NaN.
    """

    def __init__(
        self,
        runs: Sequence[ShiftRun],
        *,
        names: Sequence[str] = (),
        descriptions: Sequence[str] = (),
        max_shift: int = 8,
        boundary: str = "circular",
        draws: int | np.integer | None = None,
        num_shown: int = 30,
        num_images: int = 40,
        progress: bool = True,
    ):
        check_runs(runs)
        for key, texts in (("names", names), ("descriptions", descriptions)):
            if texts and len(texts) != len(runs):
                raise ValueError(
                    f"got {len(texts)} {key} for {len(runs)} runs: pass one for each"
                )
        for key, number in (("num_shown", num_shown), ("num_images", num_images)):
            if not is_whole(number) or number < 1:
                raise ValueError(
                    f"{key}={shorten(number)} must be an integer of at least 1"
                )
        self._runs = runs
        self._names = names or [run.workdir.name for run in runs]
        self._descriptions = descriptions or [""] * len(runs)
        self._max_shift = max_shift
        self._boundary = boundary
        self._draws = draws
        self._num_shown = num_shown
        self._progress = progress
        self._shifts = shifts_along("xy", max_shift)
        _check_same_images(runs, max_shift, boundary)
        self._images, self._labels = _choose_images(
            runs[0], max_shift, boundary, num_images
        )
        self._has_maps = _has_room_for_maps(
            runs, self._images[:num_shown], len(self._shifts)
        )
        self._models: list[dict[str, Any]] = []
        self._correct: list[np.ndarray] = []

    def add(self, run: Run) -> None:
        """Predicts with the next of the runs, at every shift."""
        name = self._names[len(self._models)]
        num_maps = self._num_shown if self._has_maps else 0
        predict = make_predict_fn(run, self._draws)
        shift = make_shift_fn(run, self._boundary)
        steps = _predict(run, predict, shift, self._images, self._shifts, num_maps)
        with tqdm(
            total=len(self._images) * len(self._shifts),
            desc=printable(f"page of {name}"),
            unit=" images",
            disable=None if self._progress else True,
        ) as bar:
            model, correct = _model(run, steps, self._labels, self._num_shown, bar)
        model["name"] = name
        model["description"] = self._descriptions[len(self._models)]
        self._models.append(model)
        self._correct.append(correct[: self._num_shown])

    def write(self, path: str | Path) -> None:
        """Writes the page.

        Args:
            path: The file.
        """
        unshifted = self._shifts.index((0, 0))
        shown = {
            "classes": self._runs[0].info.class_names,
            "maxShift": self._max_shift,
            "boundary": self._boundary,
            "dataset": self._runs[0].info.name,
            "numImages": len(self._images),
            "first": _first_shown(np.stack(self._correct), unshifted),
            "mapsLeftOut": not self._has_maps,
            "shape": self._images.shape[1:],
            "images": _encode(np.round(255 * self._images[: self._num_shown])),
            "labels": self._labels[: self._num_shown].tolist(),
            "models": self._models,
        }
        # No tag ends within the data.
        data = json.dumps(shown).replace("<", "\\u003c")
        write_text(Path(path), TEMPLATE.read_text("utf-8").replace("__DATA__", data))


def _check_same_images(runs: Sequence[ShiftRun], max_shift: int, boundary: str) -> None:
    """Checks that a page can show the runs on the same images."""
    first = runs[0]
    for run in runs:
        check_boundary(boundary, run.info.streamed, str(run.workdir))
        if run.info.streamed or not isinstance(run.split, ImageSplit):
            raise ValueError(
                "a page needs images in memory, and the test images of "
                f"{run.workdir} are not: leave out the run, or the page"
            )
        pairs = {
            "image size": (run.image_size, first.image_size),
            "data set": (run.dataset, first.dataset),
        }
        for key, (here, there) in pairs.items():
            if here != there:
                raise ValueError(
                    f"{run.workdir} has the {key} {here!r}, {first.workdir} has "
                    f"{there!r}: a page needs runs on the same images"
                )
    check_shift(max_shift, "xy", first.image_size)


def _choose_images(
    run: ShiftRun, max_shift: int, boundary: str, num_images: int
) -> tuple[Float[np.ndarray, "n height width channels"], Int[np.ndarray, " n"]]:
    """Returns test images that allow every shift, and labels, class after class."""
    split = cast(ImageSplit, run.split)
    images = np.asarray(preprocess(split.images, image_size=run.image_size))
    labels = np.asarray(split.labels)
    if boundary == "zeros":
        corners = np.array([(a, b) for a in (-max_shift, max_shift) for b in (a, -a)])
        movable = allowed_shifts(images, corners).all(axis=1)
        images, labels = images[movable], labels[movable]
    if not len(images):
        raise ValueError(
            f"no test image can move {max_shift} pixels in every direction: choose a "
            "smaller max_shift, or boundary='circular'"
        )
    # The first image of each class, then the second of each, and so on.
    turn = np.array([(labels[:i] == label).sum() for i, label in enumerate(labels)])
    order = np.lexsort((labels, turn))[:num_images]
    return images[order], labels[order]


def _predict(
    run: Run,
    predict: Callable[..., jax.Array],
    shift: Callable[..., jax.Array],
    images: np.ndarray,
    shifts: Sequence[Shift],
    num_maps: int,
) -> Iterator[tuple[np.ndarray, Any, Any]]:
    """Yields probabilities, attention maps and their starts at every shift, by image.

    Maps and starts are those of the first ``num_maps`` images, None for the others.
    """
    make_maps = make_maps_fn(run)
    images = jax.device_put(images)
    for index in range(len(images)):
        inputs = shift(images, np.full(len(shifts), index), np.array(shifts))
        probabilities = np.asarray(jax.nn.softmax(predict(inputs)))
        check_logits(probabilities, run)
        maps, starts = None, None
        if make_maps is not None and index < num_maps:
            maps, starts = make_maps(inputs)
        yield probabilities, maps, starts


def _model(
    run: Run, steps: Any, labels: np.ndarray, num_shown: int, bar: tqdm
) -> tuple[dict[str, Any], Bool[np.ndarray, "n shifts"]]:
    """Returns the data of one run, and whether it classifies each image correctly."""
    probabilities, correct, maps, starts = [], [], [], []
    for index, (found, read, start) in enumerate(steps):
        best = found.argmax(axis=-1)
        correct.append(best == labels[index])
        if index < num_shown:
            rounded = np.round(255 * found)
            # The page names the first class of the largest number.
            rounded[np.arange(len(best)), best] += rounded.argmax(axis=-1) != best
            probabilities.append(rounded)
            if read is not None:
                grid = read.shape[1:]
                read = np.asarray(read).reshape(len(read), -1)
                largest = np.maximum(read.max(axis=-1, keepdims=True), 1e-9)
                maps.append(np.round(15 * np.maximum(read, 0) / largest))
                starts.append(start)
        bar.update(len(found))
    model = {
        "probabilities": _encode(np.stack(probabilities)),
        "accuracy": np.mean(correct, axis=0).tolist(),
    }
    if maps:
        # Two numbers of four bits in each byte.
        pairs = np.stack(maps).astype(np.uint8).ravel()
        pairs = np.pad(pairs, (0, len(pairs) % 2)).reshape(-1, 2)
        model |= {
            "grid": grid,
            "maps": _encode(16 * pairs[:, 0] + pairs[:, 1]),
            "starts": _encode(np.stack(starts), "<u2"),
            "reader": "CLS" if run.model.has_class_token else "all patches",
        }
    return model, np.stack(correct)


def _first_shown(correct: Bool[np.ndarray, "runs n shifts"], unshifted: int) -> int:
    """Chooses the image that the page shows first.

    Every run classifies it correctly unshifted, and over all shifts the worst run is
    furthest behind the others.

    Args:
        correct: Whether each run classifies each image correctly at each shift.
        unshifted: The index of the shift (0, 0).

    Returns:
        The index of the image; 0 if there is none.
    """
    accuracy = np.sort(correct.mean(axis=-1), axis=0)
    behind = (accuracy[1] if len(accuracy) > 1 else 1) - accuracy[0]
    return int(np.where(correct[..., unshifted].all(axis=0), behind, -1).argmax())


def _has_room_for_maps(
    runs: Sequence[ShiftRun],
    shown: Num[np.ndarray, "n height width channels"],
    shifts: int,
) -> bool:
    """Returns whether the page may have attention maps; raises if it is too large."""
    classes = [run.info.num_classes for run in runs]
    patches = [_num_patches(run) for run in runs]
    if _page_bytes(shown, shifts, classes, patches) <= MAX_BYTES:
        return True
    size = _page_bytes(shown, shifts, classes, [0] * len(runs))
    if size > MAX_BYTES:
        raise ValueError(
            f"a page of {len(runs)} runs with {len(shown)} images at {shifts} shifts "
            f"would have {size / 1e6:.1f} MB, at most {MAX_BYTES / 1e6:.1f} are "
            "allowed: choose a smaller max_shift or fewer runs"
        )
    return False


def _page_bytes(
    shown: Num[np.ndarray, "n height width channels"],
    shifts: int,
    classes: Sequence[int],
    patches: Sequence[int],
) -> int:
    """Estimates the size of the page; a run with no patches has no attention maps."""
    # Base64 has four characters for three bytes. An accuracy has about 20 digits.
    maps = sum(num / 2 + 4 for num in patches if num)
    encoded = shown.size + len(shown) * shifts * (sum(classes) + maps)
    text = TEMPLATE.stat().st_size + 20 * shifts * len(classes)
    return round(4 / 3 * encoded + text)


def _num_patches(run: ShiftRun) -> int:
    model = run.saved.task.model
    if not hasattr(model, "num_prefix"):
        # It has no attention maps.
        return 0
    return math.prod(models.patch_grid(run.image_size, model.patch_size))


def _encode(x: Num[np.ndarray, "..."], dtype: str = "u1") -> str:
    return base64.b64encode(x.astype(dtype).tobytes()).decode()
