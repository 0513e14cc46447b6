from pathlib import Path

import chex
import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn.data import (
    ImageInfo,
    ImageSplit,
    StreamedSplit,
    load_images,
    make_preprocess,
)
from relattn.data.folder import FileRecords
from relattn.data.streaming import Photographs
from relattn.evaluation.shift import margins, movable, shift_images, shifted_accuracy
from relattn.training import Run, default_config
from tests.helpers.shifting import moved

MAX_SHIFT = 8


@pytest.mark.parametrize("axis", ["x", "y"])
@pytest.mark.parametrize("pixels", [-7, -1, 0, 2, 6])
def test_shift_moves_every_pixel_and_fills_with_zeros(axis, pixels):
    images = np.random.default_rng(0).normal(size=(3, 5, 7, 2)).astype(np.float32)
    expected = np.stack([moved(image, pixels, axis) for image in images])
    found = shift_images(jnp.asarray(images), pixels, axis)
    chex.assert_trees_all_equal(np.asarray(found), expected)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_only_movable_images_lose_nothing(axis):
    rng = np.random.default_rng(1)
    images = (rng.random((50, 11, 13, 1)) < 0.02).astype(np.float32)
    for max_shift in (0, 1, 3, 10):
        expected = [
            all(
                np.count_nonzero(moved(image, sign * max_shift, axis))
                == np.count_nonzero(image)
                for sign in (-1, 1)
            )
            for image in images
        ]
        chosen = movable(images, max_shift, axis)
        if max_shift == 10:
            # An empty image has nothing to lose.
            assert chosen.sum() == sum(not image.any() for image in images)
        chex.assert_trees_all_equal(chosen, np.array(expected))


def test_an_empty_image_has_all_margins():
    assert margins(np.zeros((1, 3, 5, 1), np.float32), "y").tolist() == [[3, 3]]


@pytest.mark.parametrize("max_shift", [-1, 5, 8])
def test_shift_larger_than_the_image_is_refused(max_shift):
    with pytest.raises(ValueError, match=f"max_shift={max_shift} does not fit images"):
        movable(np.zeros((1, 3, 5, 1), np.float32), max_shift)


def test_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="axis must be x or y, got 'z'"):
        movable(np.zeros((1, 3, 5, 1), np.float32), 1, "z")


def test_enough_embedded_images_can_move():
    data = load_images(ConfigDict({"name": "fashion_mnist"}))
    images = np.pad(data.test.images, ((0, 0), (2, 2), (2, 2), (0, 0))) / np.float32(
        255
    )
    trousers = data.test.labels == 1
    # Padded to 32 pixels rather than resized, they have more room than the model's.
    assert movable(images, MAX_SHIFT)[trousers].sum() >= 50


class SeesBlack(nn.Module):
    """Class 1 if the corner's pixel is ``black``, else class 0."""

    black: float

    @nn.compact
    def __call__(self, images):
        is_black = jnp.abs(images[:, 0, 0, 0] - self.black) < 1e-3
        return jnp.stack([1 - 1.0 * is_black, 1.0 * is_black], axis=1)


@pytest.mark.parametrize("standardize, black", [(True, -1.5), (False, 0.0)])
def test_images_are_standardised_after_the_shift(tmp_path, standardize, black):
    """Zeros move in and become the background: -mean / std."""
    config = default_config()
    config.model.name = "sees_black"
    config.data.update(name="dots", image_size=5, standardize=standardize)
    config.eval_batch_size = 2
    info = ImageInfo("dots", ("0", "1"), (5, 5, 1), (0.3,), (0.2,), 7, "dots")
    preprocess = make_preprocess(config.data, info)
    run = Run(
        config, SeesBlack(black), {}, 1, info, preprocess, Path(tmp_path), "latest"
    )
    images = np.zeros((3, 5, 5, 1), np.uint8)
    images[:, 2, 2] = 200
    # The last one cannot move left; its corner is black once it moves right.
    images[2, 0, 0] = 200
    found = shifted_accuracy(run, ImageSplit(images, np.ones(3, np.int32)), max_shift=2)
    assert found.shifts == (-2, -1, 0, 1, 2)
    assert found.allowed[:, 2].tolist() == [False, False, True, True, True]
    assert found.correct[:, 2].tolist() == [False, False, False, True, True]
    assert found.allowed[:, :2].all() and found.correct[:, :2].all()


class FirstPixels(nn.Module):
    """Answers 1 where the first pixel is brighter than the one before the last."""

    @nn.compact
    def __call__(self, images):
        return jnp.stack([images[:, 0, -2, 0], images[:, 0, 0, 0]], axis=-1)


def first_pixels_run(info, image_size, where):
    config = default_config()
    config.model.name = "first_pixels"
    config.data.update(name="noise", image_size=image_size, standardize=True)
    config.eval_batch_size = 2
    preprocess = make_preprocess(config.data, info)
    return Run(config, FirstPixels(), {}, 1, info, preprocess, where, "latest")


def answers(images):
    return images[:, 0, 0, 0] > images[:, 0, -2, 0]


@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_shift_wraps_around(tmp_path, axis):
    info = ImageInfo("noise", ("0", "1"), (5, 5, 1), (0.3,), (0.2,), 7, "noise")
    run = first_pixels_run(info, 5, tmp_path)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (7, 5, 5, 1), dtype=np.uint8)
    labels = rng.integers(0, 2, 7).astype(np.int32)
    split = ImageSplit(images, labels)
    found = shifted_accuracy(run, split, max_shift=2, axis=axis, border="wrap")
    assert found.allowed.all() and found.both_ways.all()
    np.testing.assert_array_equal(found.labels, labels)
    for row, pixels in enumerate((-2, -1, 0, 1, 2)):
        rolled = np.roll(images, pixels, axis={"y": 1, "x": 2}[axis])
        expected = answers(rolled) == labels
        np.testing.assert_array_equal(found.correct[row], expected)
    with pytest.raises(ValueError, match="which have no larger crop: choose --border"):
        shifted_accuracy(run, split, max_shift=2, border="crop")
    with pytest.raises(ValueError, match="unknown border 'warp': did you mean 'wrap'"):
        shifted_accuracy(run, split, max_shift=2, border="warp")


@pytest.mark.parametrize("axis", ["x", "y"])
def test_a_crop_of_photographs_moves(tmp_path, axis):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 11, 11, 3), dtype=np.uint8)
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(file)
    labels = np.array([0, 1, 1], np.int32)
    photographs = Photographs(FileRecords(files, labels), np.arange(3), 2, "noise")
    split = StreamedSplit(photographs, image_size=5, short_side=11, num_workers=0)
    statistics = (0.3,) * 3, (0.2,) * 3
    info = ImageInfo(
        "noise", ("0", "1"), (5, 5, 3), *statistics, 7, "noise", streamed=True
    )
    run = first_pixels_run(info, 5, tmp_path)
    found = shifted_accuracy(run, split, max_shift=3, axis=axis, border="crop")
    assert found.allowed.all()
    np.testing.assert_array_equal(found.labels, labels)
    for row, shift in enumerate(range(-3, 4)):
        # What moves right shows more of the left.
        top, left = (3, 3 - shift) if axis == "x" else (3 - shift, 3)
        crop = pixels[:, top : top + 5, left : left + 5]
        expected = answers(crop) == labels
        np.testing.assert_array_equal(found.correct[row], expected)
    (batch,) = split.batches(3)
    np.testing.assert_array_equal(batch["image"], pixels[:, 3:8, 3:8])
    message = "max_shift=4 needs crops of 13 pixels, .* short side of 11: choose .* 3,"
    with pytest.raises(ValueError, match=message):
        shifted_accuracy(run, split, max_shift=4, border="crop")
    with pytest.raises(ValueError, match="trained on photographs, which fill the imag"):
        shifted_accuracy(run, split, max_shift=3)
