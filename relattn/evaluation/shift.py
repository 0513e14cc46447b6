"""Predicts shifted test images (Horn et al., figure 1).

Images are resized to the model's size, shifted by whole pixels, and then standardised.
A shift is a pair (dx, dy) of pixels: positive ones move right and down.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from relattn import command
from relattn.data import (
    DataInfo,
    ImageInfo,
    ImageSplit,
    StreamedSplit,
    input_shape,
    preprocess,
    standardize,
)
from relattn.data.preprocess import channel_mean_std
from relattn.messages import check_choice, printable, shorten
from relattn.offsets import is_whole
from relattn.training import Run, make_predict_fn
from relattn.training.config import MAY_CHANGE_ON_RESUME, flatten

AXES = ("x", "y", "xy")
BOUNDARIES = {
    "zeros": "Zeros move into the image",
    "circular": "What leaves the image on one side enters on the other",
    "crop": "The image is a crop of a larger one, which moves",
}
# Random shifts of each image, drawn from a fixed seed: the same for every run.
NUM_RANDOM_SHIFTS = 8
# Prediction at a shift that the image does not allow.
NOT_ALLOWED = -1

Shift = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftedPredictions:
    """The classes that one run predicts for shifted test images.

    Attributes:
        run: The run's name.
        dataset: The data set's name.
        model: Name of the model.
        attention: Spec of its attention, "" if it has none.
        position: Spec of its position, "" if it has none.
        recipe: The run's configuration without its seed, and a hash of its training
            data; runs that share it are averaged.
        shifts: Shifts (dx, dy) in pixels; (0, 0) is among them.
        predicted: The predicted class at each shift, `NOT_ALLOWED` if the image would
            lose a non-zero pixel.
        random_predicted: The same under `NUM_RANDOM_SHIFTS` random shifts.
        labels: The images' classes.
        boundary: What moves into an image.
        settings: ``"torus"`` and ``"polyphase"`` where the model has them.
        draws: Number of draws of the random features over which the probabilities are
            averaged.
    """

    run: str
    dataset: str
    model: str
    attention: str
    position: str
    recipe: str
    shifts: tuple[Shift, ...]
    predicted: Int[np.ndarray, "shifts n"]
    random_predicted: Int[np.ndarray, "draws n"]
    labels: Int[np.ndarray, " n"]
    boundary: str = "zeros"
    settings: tuple[str, ...] = ()
    draws: int = 1

    @property
    def unshifted(self) -> Int[np.ndarray, " n"]:
        """Returns the predicted classes of the unshifted images."""
        return self.predicted[self.shifts.index((0, 0))]

    @property
    def all_allowed(self) -> Bool[np.ndarray, " n"]:
        """Returns which images allow every one of `shifts`."""
        return (self.predicted != NOT_ALLOWED).all(axis=0)


def check_shift(max_shift: int, axis: str, image_size: Sequence[int]) -> None:
    """Checks that images of this size can be shifted.

    Args:
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"``, ``"y"`` or ``"xy"``.
        image_size: Height and width of the images.

    Raises:
        ValueError: If the axis is unknown, or the shift is negative or moves every
            pixel out of the image, along x or y.

    Example:
        >>> check_shift(8, "x", image_size=(32, 48))
    """
    if axis not in AXES:
        raise ValueError(f"axis must be x, y or xy, got {axis!r}")
    height, width = image_size
    largest = min(height, width) - 1
    if not is_whole(max_shift) or not 0 <= max_shift <= largest:
        raise ValueError(
            f"max_shift={shorten(max_shift)} does not fit images of {width}x{height} "
            f"pixels: choose an integer from 0 to {largest}"
        )


def check_shiftable(info: DataInfo, where: str | Path) -> ImageInfo:
    """Checks that the inputs of a run are images, which can be shifted.

    Args:
        info: The description of the training data.
        where: The run, for the message.

    Returns:
        The description.

    Raises:
        ValueError: If the run is on volumes, points or text.
    """
    if info.kind == "images" and len(info.image_shape) == 3:
        return info
    kind = "volumes" if info.kind == "images" else info.kind
    raise ValueError(
        f"{where} was trained on {kind}: only runs on images can be shifted"
    )


def check_boundary(boundary: str, streamed: bool, where: str) -> None:
    """Checks that images can be shifted with this boundary.

    Args:
        boundary: A key of `BOUNDARIES`.
        streamed: Whether the images are photographs, see `relattn.data.ImageInfo`.
        where: The run, for the message.

    Raises:
        ValueError: If the boundary is unknown or does not fit the images.

    Example:
        >>> check_boundary("circular", streamed=True, where="runs/a")
    """
    check_choice("boundary", boundary, BOUNDARIES)
    if streamed and boundary == "zeros":
        raise ValueError(
            f"{where} was trained on photographs, which fill the image: choose "
            "--boundary=crop or --boundary=circular"
        )
    if not streamed and boundary == "crop":
        raise ValueError(
            f"{where} was trained on images in memory, which have no larger crop: "
            "choose --boundary=zeros or --boundary=circular"
        )


def shifts_along(axis: str, max_shift: int) -> tuple[Shift, ...]:
    """Lists the shifts along an axis, or along both.

    Args:
        axis: ``"x"``, ``"y"`` or ``"xy"``: every pair.
        max_shift: Largest shift in pixels, both ways.

    Returns:
        Shifts (dx, dy); those of ``"xy"`` are in the order of an image, row by row.

    Example:
        >>> shifts_along("y", 1)
        ((0, -1), (0, 0), (0, 1))
        >>> shifts_along("xy", 1)[:4]
        ((-1, -1), (0, -1), (1, -1), (-1, 0))
    """
    pixels = range(-max_shift, max_shift + 1)
    columns = pixels if "x" in axis else (0,)
    rows = pixels if "y" in axis else (0,)
    return tuple((dx, dy) for dy in rows for dx in columns)


def allowed_shifts(
    images: Float[np.ndarray, "n height width channels"],
    shifts: Int[np.ndarray, "*batch shifts 2"],
) -> Bool[np.ndarray, "n shifts"]:
    """Returns which shifts lose no non-zero pixel of an image.

    Args:
        images: Resized images before standardisation, shape
            ``[n, height, width, channels]``.
        shifts: Pairs (dx, dy) in pixels, shape ``[shifts, 2]``, or
            ``[n, shifts, 2]`` for different shifts of each image.

    Returns:
        Shape ``[n, shifts]``. An empty image allows every shift.

    Example:
        >>> image = np.zeros((1, 1, 5, 1), np.float32)
        >>> image[0, 0, 3] = 1
        >>> allowed_shifts(image, np.array([(-3, 0), (1, 0), (2, 0), (0, 1)])).tolist()
        [[True, True, False, False]]

    Source:
        Horn et al., figure 1.
    """
    allowed = np.ones((len(images), shifts.shape[-2]), bool)
    for axis, other in enumerate((1, 2)):
        occupied = (images != 0).any(axis=(other, 3))
        size = occupied.shape[1]
        first, last = occupied.argmax(1), size - 1 - occupied[:, ::-1].argmax(1)
        first, last = np.where(occupied.any(1), (first, last), [[size], [-1]])
        pixels = shifts[..., axis]
        allowed &= (first[:, None] + pixels >= 0) & (last[:, None] + pixels < size)
    return allowed


def shift_images(
    images: Float[Array, "batch height width channels"],
    shifts: Int[Array, "batch 2"] | Shift,
    boundary: str = "zeros",
) -> Float[Array, "batch height width channels"]:
    """Shifts images by whole pixels.

    out[b, i, j] = images[b, i - dy[b], j - dx[b]]

    Args:
        images: Shape ``[batch, height, width, channels]``.
        shifts: A pair (dx, dy) for all images, or one for each, shape ``[batch, 2]``:
            positive to the right and down. May be traced.
        boundary: ``"zeros"`` fills with zeros; with ``"circular"``, what leaves the
            image on one side enters on the other.

    Returns:
        The same shape.

    Raises:
        ValueError: If the boundary is neither.

    Example:
        >>> images = jnp.asarray([1.0, 2, 3]).reshape(1, 1, 3, 1)
        >>> shift_images(images, (-1, 0)).ravel()
        Array([2., 3., 0.], dtype=float32)
        >>> shift_images(images, (-1, 0), "circular").ravel()
        Array([2., 3., 1.], dtype=float32)
    """
    check_choice("boundary", boundary, ("zeros", "circular"))
    height, width = images.shape[1:3]
    dx, dy = jnp.broadcast_to(jnp.asarray(shifts), (len(images), 2)).T
    rows, columns = jnp.arange(height) - dy[:, None], jnp.arange(width) - dx[:, None]
    batch = jnp.arange(len(images))[:, None, None]
    shifted = images[batch, (rows % height)[:, :, None], (columns % width)[:, None]]
    if boundary == "circular":
        return shifted
    inside_rows, inside_columns = (rows // height == 0), (columns // width == 0)
    inside = inside_rows[:, :, None] & inside_columns[:, None]
    return jnp.where(inside[..., None], shifted, 0)


def shifted_predictions(
    run: Run,
    split: ImageSplit | StreamedSplit,
    *,
    name: str = "",
    max_shift: int = 8,
    axis: str = "x",
    boundary: str = "zeros",
    draws: int | np.integer | None = None,
    progress: bool = True,
) -> ShiftedPredictions:
    """Predicts every image at every shift that the image allows, and at random shifts.

    A random shift is drawn uniformly from ``-max_shift..max_shift`` along x and y,
    whatever ``axis`` is, from a fixed seed: the same draws for every run.

    Args:
        run: A trained model.
        split: Its test images.
        name: The run's name; by default that of its folder.
        max_shift: The shifts are ``-max_shift..max_shift``.
        axis: ``"x"``, ``"y"`` or ``"xy"``, every pair of shifts along both.
        boundary: What moves into an image. With ``"zeros"``, an image allows the shifts
            that lose no non-zero pixel. With ``"circular"``, pixels that leave the
            image come back on the other side, and with ``"crop"``, for photographs, the
            image is a crop of a larger one, which moves; both allow all shifts.
        draws: Number of draws of the random features, as for
            `relattn.training.Run.predict`.
        progress: Whether to show a progress bar on a terminal.

    Returns:
        The predicted classes at each shift.

    Raises:
        ValueError: If the run is not on images, the axis, the shift or the boundary
            does not fit them, ``draws`` is more than one for a model without random
            features, or the logits are NaN.
    """
    info = check_shiftable(run.data, run.workdir)
    size = input_shape(run.config.data, info)[:2]
    batch_size = run.config.eval_batch_size
    check_shift(max_shift, axis, size)
    check_boundary(boundary, info.streamed, str(run.workdir))
    margin = max_shift if boundary == "crop" else 0
    if margin:
        split = _with_margin(cast(StreamedSplit, split), size[0], margin)
    shifts = shifts_along(axis, max_shift)
    random_shifts = np.random.default_rng(0).integers(
        -max_shift, max_shift + 1, (len(split), NUM_RANDOM_SHIFTS, 2)
    )
    num_moves = len(shifts) + NUM_RANDOM_SHIFTS
    predicted = np.full((len(split), num_moves), NOT_ALLOWED, np.int32)
    resized = [side + 2 * margin for side in size]
    resize = functools.partial(preprocess, image_size=resized)
    num_draws = run.config.eval_draws if draws is None else draws
    predict = make_predict_fn(run, num_draws)
    shift = make_shift_fn(run, boundary, margin)
    name = name or Path(run.workdir).name
    labels = []
    with tqdm(
        total=predicted.size,
        desc=printable(f"shifts of {name}"),
        unit="image",
        disable=None if progress else True,
    ) as bar:
        for batch in split.batches(batch_size):
            images, real = resize(batch["image"]), batch["weight"] > 0
            done = sum(map(len, labels))
            labels.append(batch["label"][real])
            random_moves = random_shifts[done : done + len(labels[-1])]
            same_moves = np.broadcast_to(shifts, (len(random_moves), len(shifts), 2))
            moves = np.concatenate([same_moves, random_moves], axis=1)
            allowed = np.ones(moves.shape[:2], bool)
            if boundary == "zeros":
                allowed = allowed_shifts(np.asarray(images)[real], moves)
            image, move = np.nonzero(allowed)
            bar.update(allowed.size - len(image))
            for start in range(0, len(image), batch_size):
                i, j = (x[start : start + batch_size] for x in (image, move))
                # Fill the last batch, so that the model is traced once.
                full = np.resize(np.arange(len(i)), batch_size)
                logits = np.asarray(predict(shift(images, i[full], moves[i, j][full])))
                check_logits(logits, run)
                predicted[done + i, j] = logits.argmax(-1)[: len(i)]
                bar.update(len(i))
    return ShiftedPredictions(
        run=name,
        dataset=run.data.name,
        model=run.config.model.name,
        attention=getattr(run.model, "attention", ""),
        position=getattr(run.model, "position", ""),
        recipe=recipe(run),
        shifts=shifts,
        predicted=predicted[:, : len(shifts)].T,
        random_predicted=predicted[:, len(shifts) :].T,
        labels=np.concatenate(labels),
        boundary=boundary,
        settings=_settings(run),
        draws=int(num_draws),
    )


def _settings(run: Run) -> tuple[str, ...]:
    torus = ("torus",) if getattr(run.model, "periodic", False) else ()
    anchor = getattr(run.model, "anchor", "none")
    return torus if anchor == "none" else (*torus, anchor)


def _with_margin(split: StreamedSplit, size: int, margin: int) -> StreamedSplit:
    """Enlarges the crops of photographs on every side."""
    if size + 2 * margin > split.short_side:
        raise ValueError(
            f"max_shift={margin} needs crops of {size + 2 * margin} pixels, but the "
            f"photographs are resized to a short side of {split.short_side}: choose at "
            f"most {(split.short_side - size) // 2}, or --boundary=circular"
        )
    return dataclasses.replace(split, margin=margin)


def check_logits(logits: Float[np.ndarray, "batch classes"], run: Run) -> None:
    """Raises ValueError if logits, or probabilities, of shifted images are NaN.

    The largest of them would be the first class, whatever the shift.
    """
    if np.isnan(logits).any():
        raise ValueError(
            f"{run.workdir}: the logits of shifted images are NaN: look for NaN in the "
            "model's parameters, or compute in float32"
        )


def make_shift_fn(run: Run, boundary: str, margin: int = 0) -> Callable[..., Array]:
    """Makes a compiled function that shifts resized images and standardises them.

    Args:
        run: A trained run.
        boundary: A key of `BOUNDARIES`.
        margin: Pixels that are cut from every side after the shift.

    Returns:
        A function of images, the indices of images, ``[batch]``, and their shifts
        (dx, dy), ``[batch, 2]``, to inputs of the model.
    """
    info = check_shiftable(run.data, run.workdir)
    mean, std = (
        np.asarray(x, np.float32) for x in channel_mean_std(run.config.data, info)
    )

    @jax.jit
    def shift(images, index, moves):
        # The margin is cut off: what enters on the other side is not seen.
        rule = "circular" if boundary == "crop" else boundary
        images = shift_images(images[index], moves, rule)
        height, width = images.shape[1:3]
        images = images[:, margin : height - margin, margin : width - margin]
        if not run.config.data.get("standardize", False):
            return images
        return standardize(images, mean, std)

    return shift


def recipe(run: Run) -> str:
    """Returns what runs that differ only in their seed have in common.

    Args:
        run: A run.

    Returns:
        The configuration without the seed and the keys that change no result, and a
        hash of the training data, as text.
    """
    config = flatten(run.config)
    same = {
        key: config[key] for key in config if key not in (*MAY_CHANGE_ON_RESUME, "seed")
    }
    # Data in memory may be others with the same configuration.
    return json.dumps([same, run.contents], sort_keys=True)


@command.entry_point
def main() -> None:
    """Raises an error with the program to run instead."""
    raise ValueError("relattn.evaluation.shift is not a program: run `eval_shift.py`")


if __name__ == "__main__":
    main()
