"""Measures accuracy on shifted test images (Horn et al., figure 1).

Images are resized to the model's size, shifted by whole pixels, filled with zeros, and
then standardised. Photographs fill the image: a crop of a larger one moves, or the
shift wraps around. Positive shifts move right (axis x) or down (axis y).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from relattn import command
from relattn.data import ImageSplit, StreamedSplit, preprocess
from relattn.spec import closest
from relattn.training import Run, make_predict_fn
from relattn.training.config import FREE_KEYS, flatten

AXES = {"y": 1, "x": 2}
BORDERS = {
    "zeros": "Zeros move into the image",
    "wrap": "What leaves the image on one side comes back on the other",
    "crop": "The image is a crop of a larger one, which moves",
}


@dataclasses.dataclass(frozen=True, eq=False)
class ShiftedAccuracy:
    """Which test images one run classifies correctly at each shift.

    Attributes:
        run: The run's name.
        dataset: The data set's name.
        model: Name of the model.
        attention: Spec of its attention, "" if it has none.
        position: Spec of its position, "" if it has none.
        recipe: The run's configuration without its seed; runs that share it are
            averaged.
        shifts: Shifts in pixels.
        correct: Whether the image is classified correctly; False if not allowed.
        allowed: Whether the image loses no non-zero pixel at this shift.
        both_ways: Whether the image allows every shift.
        labels: The images' classes.
    """

    run: str
    dataset: str
    model: str
    attention: str
    position: str
    recipe: str
    shifts: tuple[int, ...]
    correct: Bool[np.ndarray, "shifts n"]
    allowed: Bool[np.ndarray, "shifts n"]
    both_ways: Bool[np.ndarray, "n"]
    labels: Int[np.ndarray, "n"]


def check_shift(max_shift: int, axis: str, image_size: int) -> None:
    """Checks that images of this size can be shifted.

    Args:
        max_shift: Largest shift in pixels, both ways.
        axis: ``"x"`` or ``"y"``.
        image_size: Height and width of the images.

    Raises:
        ValueError: If the axis is unknown, or the shift is negative or moves every
            pixel out of the image.

    Example:
        >>> check_shift(8, "x", image_size=32)
    """
    if axis not in AXES:
        raise ValueError(f"axis must be x or y, got {axis!r}")
    if not 0 <= max_shift < image_size:
        raise ValueError(
            f"max_shift={max_shift} does not fit images of {image_size} pixels: "
            f"choose one from 0 to {image_size - 1}"
        )


def check_border(border: str, streamed: bool, where: str) -> None:
    """Checks that images can be shifted with this border.

    Args:
        border: A key of `BORDERS`.
        streamed: Whether the images are photographs, see `relattn.data.ImageInfo`.
        where: The run, for the message.

    Raises:
        ValueError: If the border is unknown or does not fit the images.

    Example:
        >>> check_border("wrap", streamed=True, where="runs/a")
    """
    if border not in BORDERS:
        raise ValueError(f"unknown border {border!r}: {closest(border, BORDERS)}")
    if streamed and border == "zeros":
        raise ValueError(
            f"{where} was trained on photographs, which fill the image: choose "
            "--border=crop or --border=wrap"
        )
    if not streamed and border == "crop":
        raise ValueError(
            f"{where} was trained on images in memory, which have no larger crop: "
            "choose --border=zeros or --border=wrap"
        )


def margins(
    images: Float[np.ndarray, "n height width channels"], axis: str = "x"
) -> Int[np.ndarray, "n 2"]:
    """Computes how far each image can move without losing a non-zero pixel.

    Args:
        images: Shape ``[n, height, width, channels]``.
        axis: ``"x"`` or ``"y"``.

    Returns:
        Empty columns (rows) before and after the object, shape ``[n, 2]``: the largest
        shifts left and right (up and down). For an empty image both are its size.

    Example:
        >>> image = np.zeros((1, 1, 5, 1), np.float32)
        >>> image[0, 0, 3] = 1
        >>> margins(image).tolist()
        [[3, 1]]
    """
    other = {"x": 1, "y": 2}[axis]
    occupied = (images != 0).any(axis=(other, 3))
    size = occupied.shape[1]
    ends = np.stack([occupied.argmax(1), occupied[:, ::-1].argmax(1)], axis=1)
    return np.where(occupied.any(1)[:, None], ends, size)


def movable(
    images: Float[np.ndarray, "n height width channels"],
    max_shift: int,
    axis: str = "x",
) -> Bool[np.ndarray, "n"]:
    """Returns which images can move both ways without losing a non-zero pixel.

    Args:
        images: Resized images before standardisation, shape
            ``[n, height, width, channels]``.
        max_shift: Largest shift in pixels.
        axis: ``"x"`` or ``"y"``.

    Returns:
        Shape ``[n]``.

    Raises:
        ValueError: If the axis or the shift does not fit the images.

    Example:
        >>> image = np.zeros((1, 1, 5, 1), np.float32)
        >>> image[0, 0, 3] = 1
        >>> movable(image, 1).tolist(), movable(image, 2).tolist()
        ([True], [False])

    Source:
        Horn et al., figure 1.
    """
    check_shift(max_shift, axis, images.shape[AXES[axis]] if axis in AXES else 0)
    return margins(images, axis).min(axis=1) >= max_shift


def shift_images(
    images: Float[Array, "batch height width channels"],
    pixels: int | Int[Array, ""],
    axis: str = "x",
) -> Float[Array, "batch height width channels"]:
    """Shifts images by whole pixels and fills with zeros.

    Args:
        images: Shape ``[batch, height, width, channels]``.
        pixels: The shift, positive to the right (down); may be traced.
        axis: ``"x"`` or ``"y"``.

    Returns:
        The same shape.

    Example:
        >>> shift_images(jnp.asarray([1.0, 2, 3]).reshape(1, 1, 3, 1), -1).ravel()
        Array([2., 3., 0.], dtype=float32)
    """
    size = images.shape[AXES[axis]]
    source = jnp.arange(size) - pixels
    # take() would count negative indices from the end.
    source = jnp.where(source < 0, size, source)
    return jnp.take(images, source, axis=AXES[axis], mode="fill", fill_value=0)


def shifted_accuracy(
    run: Run,
    split: ImageSplit | StreamedSplit,
    *,
    name: str = "",
    max_shift: int = 8,
    axis: str = "x",
    border: str = "zeros",
    progress: bool = True,
) -> ShiftedAccuracy:
    """Evaluates a run on every image at every shift that the image allows.

    Args:
        run: A trained model.
        split: Its test images.
        name: The run's name; by default that of its folder.
        max_shift: The shifts are ``-max_shift..max_shift``.
        axis: ``"x"`` or ``"y"``.
        border: ``"zeros"`` move into the image, which allows shifts that lose no
            non-zero pixel; or all images allow all shifts, and the shift wraps around
            (``"wrap"``), or, for photographs, moves a crop of a larger image
            (``"crop"``).
        progress: Whether to show a progress bar on a terminal.

    Returns:
        Which images are classified correctly at each shift.

    Raises:
        ValueError: If the axis, the shift or the border does not fit the images.
    """
    image_size = run.config.data.image_size
    check_shift(max_shift, axis, image_size)
    check_border(border, run.data.streamed, str(run.workdir))
    shifts = tuple(range(-max_shift, max_shift + 1))
    name = name or Path(run.workdir).name
    if border == "zeros":
        found = _filled(run, split, name, shifts, axis, progress)
    else:
        found = _moved(run, split, name, shifts, axis, border, progress)
    correct, allowed, labels = found
    return ShiftedAccuracy(
        run=name,
        dataset=run.config.data.name,
        model=run.config.model.name,
        attention=getattr(run.model, "attention", ""),
        position=getattr(run.model, "position", ""),
        recipe=_recipe(run),
        shifts=shifts,
        correct=correct,
        allowed=allowed,
        both_ways=allowed.all(axis=0),
        labels=labels,
    )


def _filled(
    run: Run,
    split: ImageSplit,
    name: str,
    shifts: tuple[int, ...],
    axis: str,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fills with zeros; returns what is correct and allowed, and the labels."""
    image_size, batch_size = run.config.data.image_size, run.config.eval_batch_size
    images = _resized(split.images, image_size, batch_size)
    free = margins(images, axis)
    allowed = np.stack([free[:, 0] >= -s if s < 0 else free[:, 1] >= s for s in shifts])
    correct = np.zeros_like(allowed)
    is_correct = _correct_fn(run, functools.partial(shift_images, axis=axis))
    with tqdm(
        total=int(allowed.sum()),
        desc=f"shifts of {name}",
        unit="image",
        disable=None if progress else True,
    ) as bar:
        for i, pixels in enumerate(shifts):
            chosen = np.flatnonzero(allowed[i])
            for start in range(0, len(chosen), batch_size):
                batch = chosen[start : start + batch_size]
                # Pad the last batch, so that the model is traced once.
                padded = np.resize(batch, batch_size)
                right = is_correct(images[padded], split.labels[padded], pixels)
                correct[i, batch] = right[: len(batch)]
                bar.update(len(batch))
    return correct, allowed, np.asarray(split.labels)


def _moved(
    run: Run,
    split: ImageSplit | StreamedSplit,
    name: str,
    shifts: tuple[int, ...],
    axis: str,
    border: str,
    progress: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Same as `_filled`, wrapping around or moving a crop of a larger image."""
    size, largest = run.config.data.image_size, shifts[-1]
    padded_size = size
    if border == "crop":
        padded_size = size + 2 * largest
        if padded_size > split.short_side:
            raise ValueError(
                f"max_shift={largest} needs crops of {padded_size} pixels, but the "
                f"photographs have a short side of {split.short_side}: choose at most "
                f"{(split.short_side - size) // 2}, or --border=wrap"
            )
        split = dataclasses.replace(split, image_size=padded_size)

    def move(images, pixels):
        if border == "wrap":
            return jnp.roll(images, pixels, AXES[axis])
        start = dict.fromkeys(AXES.values(), largest)
        start[AXES[axis]] = largest - pixels
        corner = (0, start[1], start[2], 0)
        shape = (len(images), size, size, images.shape[3])
        return jax.lax.dynamic_slice(images, corner, shape)

    is_correct = _correct_fn(run, move)
    resize = jax.jit(functools.partial(preprocess, image_size=padded_size))
    correct, labels = [], []
    with tqdm(
        total=len(split) * len(shifts),
        desc=f"shifts of {name}",
        unit="image",
        disable=None if progress else True,
    ) as bar:
        for batch in split.batches(run.config.eval_batch_size):
            images, real = resize(batch["image"]), batch["weight"] > 0
            right = [is_correct(images, batch["label"], pixels) for pixels in shifts]
            correct.append(np.stack(right)[:, real])
            labels.append(batch["label"][real])
            bar.update(len(shifts) * int(real.sum()))
    all_correct = np.concatenate(correct, axis=1)
    return all_correct, np.ones_like(all_correct), np.concatenate(labels)


def _resized(images: np.ndarray, image_size: int, batch_size: int) -> np.ndarray:
    resize = jax.jit(lambda batch: preprocess(batch, image_size=image_size))
    starts = range(0, len(images), batch_size)
    return np.concatenate([resize(images[i : i + batch_size]) for i in starts])


def _correct_fn(run: Run, move: Callable[..., jax.Array]):
    predict = make_predict_fn(run)

    @jax.jit
    def shift(images, pixels):
        images = move(images, pixels)
        if not run.config.data.standardize:
            return images
        return (images - jnp.asarray(run.data.mean)) / jnp.asarray(run.data.std)

    def is_correct(images, labels, pixels):
        return np.asarray(predict(shift(images, pixels))).argmax(axis=-1) == labels

    return is_correct


def _recipe(run: Run) -> str:
    config = flatten(run.config)
    same = {key: config[key] for key in config if key not in (*FREE_KEYS, "seed")}
    return json.dumps(same, sort_keys=True)


@command.entry_point
def main() -> None:
    """Raises an error with the program to run instead."""
    raise ValueError("relattn.evaluation.shift is not a program: run `eval_shift.py`")


if __name__ == "__main__":
    main()
