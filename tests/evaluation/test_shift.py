import dataclasses
from pathlib import Path

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from configs import demo
from relattn.data import (
    ImageInfo,
    ImageSplit,
    StreamedSplit,
    load_data,
    load_images,
    make_preprocess,
    preprocess,
)
from relattn.data.image_list import ImageFile, ImageRecords
from relattn.data.streaming import Photographs
from relattn.evaluation.shift import (
    NOT_ALLOWED,
    NUM_RANDOM_SHIFTS,
    allowed_shifts,
    check_shift,
    shift_images,
    shifted_predictions,
    shifts_along,
)
from relattn.evaluation.shift_curves import curves_of
from relattn.kernels import draw_random_features
from relattn.training import (
    Run,
    default_config,
    load_run,
    make_predict_fn,
    train_and_evaluate,
)
from relattn.training.draws import draw_features
from tests.helpers.shifting import naive_shift

SHIFTS = [(0, 0), (2, 0), (0, -3), (-1, 4), (6, 1), (-9, 2), (3, 9)]


def moved_both(image, shift):
    return naive_shift(naive_shift(image, shift[0], "x"), shift[1], "y")


@pytest.mark.parametrize("shift", SHIFTS)
def test_shift_moves_every_pixel_and_fills_with_zeros(shift):
    images = np.random.default_rng(0).normal(size=(3, 5, 7, 2)).astype(np.float32)
    expected = np.stack([moved_both(image, shift) for image in images])
    found = shift_images(jnp.asarray(images), shift)
    chex.assert_trees_all_equal(np.asarray(found), expected)


@pytest.mark.parametrize("boundary", ["zeros", "circular"])
def test_each_image_has_its_own_shift(boundary):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(len(SHIFTS), 5, 7, 2)).astype(np.float32)
    found = shift_images(jnp.asarray(images), jnp.asarray(SHIFTS), boundary)
    for image, shift, shifted in zip(images, SHIFTS, found, strict=True):
        if boundary == "zeros":
            expected = moved_both(image, shift)
        else:
            expected = np.roll(image, shift, (1, 0))
        chex.assert_trees_all_equal(np.asarray(shifted), expected)


def test_another_boundary_raises():
    """A misspelled one would fill with zeros."""
    with pytest.raises(ValueError, match="boundary 'circle': did you mean 'circular'"):
        shift_images(jnp.zeros((1, 3, 3, 1)), (1, 0), "circle")


def test_allowed_shifts_lose_nothing():
    rng = np.random.default_rng(1)
    images = (rng.random((50, 11, 13, 1)) < 0.02).astype(np.float32)
    assert not images[:, :, :, 0].any(axis=(1, 2)).all()  # Some are empty.
    shifts = np.array([*SHIFTS, (12, 10), (13, 0), (0, -11)])
    expected = [
        [
            np.count_nonzero(moved_both(image, shift)) == np.count_nonzero(image)
            for shift in shifts
        ]
        for image in images
    ]
    found = allowed_shifts(images, shifts)
    chex.assert_trees_all_equal(found, np.array(expected))
    assert found[:, 1:].mean(axis=0).min() > 0 and found[:, 1:].mean() < 0.9
    own = rng.permuted(np.tile(np.arange(10), (50, 1)), axis=1)
    alone = allowed_shifts(images, shifts[own])
    chex.assert_trees_all_equal(alone, np.take_along_axis(found, own, axis=1))


@pytest.mark.parametrize("max_shift", [-1, 5, 8])
def test_shift_larger_than_the_image_is_refused(max_shift):
    with pytest.raises(ValueError, match=f"max_shift={max_shift} does not fit images"):
        check_shift(max_shift, "x", (5, 9))


def test_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="axis must be x, y or xy, got 'yx'"):
        check_shift(1, "yx", (5, 5))


def test_enough_embedded_images_can_move():
    data = load_images(ConfigDict({"name": "fashion_mnist"}))
    images = np.pad(data.test.images, ((0, 0), (2, 2), (2, 2), (0, 0))) / np.float32(
        255
    )
    trousers = images[data.test.labels == 1]
    # Padded to 32 pixels rather than resized, they have more room than the model's.
    movable = allowed_shifts(trousers, np.array([(-8, 0), (8, 0)])).all(axis=1)
    assert movable.sum() >= 50


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
    split = ImageSplit(images, np.ones(3, np.int32))
    found = shifted_predictions(run, split, max_shift=2)
    assert found.shifts == ((-2, 0), (-1, 0), (0, 0), (1, 0), (2, 0))
    assert found.predicted[:, 2].tolist() == [NOT_ALLOWED, NOT_ALLOWED, 0, 1, 1]
    assert (found.predicted[:, :2] == 1).all()
    assert found.unshifted.tolist() == [1, 1, 0]
    assert found.all_allowed.tolist() == [True, True, False]


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


def noise(num_images, num_labels=2):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num_images, 5, 5, 1), dtype=np.uint8)
    return ImageSplit(images, rng.integers(0, num_labels, num_images).astype(np.int32))


def noise_run(where):
    info = ImageInfo("noise", ("0", "1"), (5, 5, 1), (0.3,), (0.2,), 7, "noise")
    return first_pixels_run(info, 5, where)


@pytest.mark.parametrize("axis", ["x", "y", "xy"])
def test_a_circular_shift_wraps_around(tmp_path, axis):
    run, split = noise_run(tmp_path), noise(7)
    options = {"max_shift": 2, "axis": axis, "boundary": "circular"}
    found = shifted_predictions(run, split, **options)
    assert found.all_allowed.all()
    np.testing.assert_array_equal(found.labels, split.labels)
    assert len(found.shifts) == len(found.predicted) == (25 if axis == "xy" else 5)
    for (dx, dy), predicted in zip(found.shifts, found.predicted, strict=True):
        rolled = np.roll(split.images, (dy, dx), axis=(1, 2))
        np.testing.assert_array_equal(predicted, answers(rolled))


def test_an_unknown_boundary_is_refused(tmp_path):
    run, split = noise_run(tmp_path), noise(7)
    with pytest.raises(ValueError, match="which have no larger crop: choose --bound"):
        shifted_predictions(run, split, max_shift=2, boundary="crop")
    message = "unknown boundary 'circle': did you mean 'circular'"
    with pytest.raises(ValueError, match=message):
        shifted_predictions(run, split, max_shift=2, boundary="circle")


def test_volumes_are_refused(tmp_path):
    """Their frames and rows would be taken for rows and columns."""
    info = ImageInfo("noise", ("0", "1"), (5, 5, 5, 1), (0.3,), (0.2,), 7, "noise")
    run, split = first_pixels_run(info, 5, tmp_path), noise(7)
    volumes = dataclasses.replace(split, images=np.stack([split.images] * 5, axis=1))
    with pytest.raises(ValueError, match="volumes: only runs on images can be shifted"):
        shifted_predictions(run, volumes, max_shift=2, boundary="circular")


class Undefined(nn.Module):
    """Returns NaN for every class."""

    @nn.compact
    def __call__(self, images):
        return jnp.full((len(images), 2), jnp.nan)


def test_logits_of_nan_are_refused(tmp_path):
    """All classes would be the first, and so the same at every shift."""
    run = dataclasses.replace(noise_run(tmp_path), model=Undefined())
    with pytest.raises(ValueError, match="the logits of shifted images are NaN: look"):
        shifted_predictions(run, noise(3), max_shift=1)


def test_runs_on_other_data_are_not_averaged_as_seeds(tmp_path):
    """Data in memory may be others with the same configuration."""
    run, split = noise_run(tmp_path), noise(3)
    runs = [run, run, dataclasses.replace(run, contents="others")]
    found = [shifted_predictions(each, split, max_shift=0) for each in runs]
    assert [curve.num_runs for curve in curves_of(found, None)] == [2, 1]


def test_random_shifts_are_the_same_for_every_run(tmp_path):
    """They move along both axes, and depend neither on axis nor batch size."""
    run, split = noise_run(tmp_path), noise(101)
    found = shifted_predictions(run, split, max_shift=2, boundary="circular")
    assert found.random_predicted.shape == (NUM_RANDOM_SHIFTS, 101)
    run.config.eval_batch_size = 13
    first = ImageSplit(split.images[:37], split.labels[:37])
    other = shifted_predictions(run, first, max_shift=2, axis="xy", boundary="circular")
    np.testing.assert_array_equal(
        other.random_predicted, found.random_predicted[:, :37]
    )
    # Each is the prediction at one of the pairs, which it draws uniformly.
    shifts = shifts_along("xy", 2)
    every = np.stack([answers(np.roll(split.images, s[::-1], (1, 2))) for s in shifts])
    draws = np.random.default_rng(0).integers(-2, 3, (101, NUM_RANDOM_SHIFTS, 2))
    for image, moves in enumerate(draws.tolist()):
        expected = [every[shifts.index(tuple(move)), image] for move in moves]
        np.testing.assert_array_equal(found.random_predicted[:, image], expected)


def test_random_shifts_with_zeros_lose_nothing(tmp_path):
    run, split = noise_run(tmp_path), noise(7)
    images = split.images.copy()
    images[:, [0, -1]] = 0  # One free row above and below, no free column.
    found = shifted_predictions(run, ImageSplit(images, split.labels), max_shift=2)
    draws = np.random.default_rng(0).integers(-2, 3, (7, NUM_RANDOM_SHIFTS, 2))
    dx, dy = draws.T
    allowed = (dx == 0) & (abs(dy) <= 1)
    np.testing.assert_array_equal(found.random_predicted != NOT_ALLOWED, allowed)
    assert allowed.any()


class Projected(nn.Module):
    """Its logits are random features."""

    @nn.compact
    def __call__(self, images):
        x = images.reshape(len(images), -1)
        drawn = self.variable(
            "random_features",
            "drawn",
            lambda: draw_random_features(
                self.make_rng("random_features"), layer=0, num_features=2, head_dim=25
            ),
        )
        return x @ drawn.value.projection.T


@pytest.mark.slow
def test_shifted_predictions_average_over_draws(tmp_path):
    run, split = noise_run(tmp_path), noise(29)
    key = jax.random.key(run.config.seed)
    variables = Projected().init({"random_features": key}, np.zeros((1, 5, 5, 1)))
    run = dataclasses.replace(run, model=Projected(), variables=variables)
    options = {"max_shift": 1, "boundary": "circular"}
    one, three = (
        shifted_predictions(run, split, draws=draws, **options) for draws in (None, 3)
    )
    assert (one.draws, three.draws) == (1, 3)
    drawn = draw_features(variables["random_features"], key, 3)
    projections = np.float64(drawn["drawn"].projection)
    for (dx, _), single, mean in zip(
        one.shifts, one.predicted, three.predicted, strict=True
    ):
        images = np.roll(split.images, dx, axis=2).reshape(29, -1) / 255
        logits = ((images - 0.3) / 0.2) @ projections.swapaxes(1, 2)
        second = 1 / (1 + np.exp(logits[..., 0] - logits[..., 1]))
        np.testing.assert_array_equal(single, second[0] > 0.5)
        np.testing.assert_array_equal(mean, second.mean(axis=0) > 0.5)
    assert (one.predicted != three.predicted).any()
    with pytest.raises(ValueError, match="draws=2 needs random features to draw, but"):
        shifted_predictions(noise_run(tmp_path), split, draws=2, **options)


@pytest.mark.parametrize("axis", ["x", "y", "xy"])
def test_a_crop_of_photographs_moves(tmp_path, axis):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, 11, 11, 3), dtype=np.uint8)
    files = [tmp_path / f"{i}.png" for i in range(3)]
    for file, image in zip(files, pixels, strict=True):
        Image.fromarray(image).save(file)
    labels = np.array([0, 1, 1], np.int32)
    records = ImageRecords([ImageFile(file, "") for file in files], labels)
    photographs = Photographs(records, np.arange(3), 2, "noise")
    split = StreamedSplit(photographs, image_size=5, short_side=11, num_workers=0)
    statistics = (0.3,) * 3, (0.2,) * 3
    info = ImageInfo(
        "noise", ("0", "1"), (5, 5, 3), *statistics, 7, "noise", streamed=True
    )
    run = first_pixels_run(info, 5, tmp_path)
    found = shifted_predictions(run, split, max_shift=3, axis=axis, boundary="crop")
    assert found.all_allowed.all()
    np.testing.assert_array_equal(found.labels, labels)
    for (dx, dy), predicted in zip(found.shifts, found.predicted, strict=True):
        # What moves right shows more of the left.
        crop = pixels[:, 3 - dy : 8 - dy, 3 - dx : 8 - dx]
        np.testing.assert_array_equal(predicted, answers(crop))
    (batch,) = split.batches(3)
    np.testing.assert_array_equal(batch["image"], pixels[:, 3:8, 3:8])
    message = "max_shift=4 needs crops of 13 pixels, .* short side of 11: choose .* 3,"
    with pytest.raises(ValueError, match=message):
        shifted_predictions(run, split, max_shift=4, boundary="crop")
    with pytest.raises(ValueError, match="trained on photographs, which fill the imag"):
        shifted_predictions(run, split, max_shift=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "relative_bias"),
        ("favor(num_features=16)", "relative_bias"),
        ("relu(num_features=16)", "fourier_bias"),
        ("banded(clip=2, num_features=16)", "none"),
        ("translution", "none"),
        ("lor_translution(rank=2)", "none"),
    ],
)
def test_trained_exact_models_give_equal_logits(attention, position, dtype, tmp_path):
    config = demo.get_config("invariant")
    with config.unlocked():
        config.model.update(attention=attention, position=position, dtype=dtype)
        config.model.update(num_layers=1, dim=16, num_heads=2, mlp_dim=29)
        config.update(num_epochs=0, num_steps=80, batch_size=50, progress=False)
        config.schedule.warmup_steps = 5
        config.optimizer.learning_rate = 0.01
        config.data.image_size = 16
    train_and_evaluate(config, tmp_path, devices=jax.local_devices()[:1])
    run = load_run(tmp_path)
    predict = make_predict_fn(run)
    split = load_data(run.config.data).test
    images = jnp.asarray(preprocess(split.images, image_size=16))
    shifts = jax.random.randint(jax.random.key(0), (3, len(images), 2), 0, 16)
    first, *others = (
        np.asarray(predict(shift_images(images, shift, "circular")))
        for shift in [0 * shifts[0], *shifts]
    )
    # Chance is 0.1.
    assert (first.argmax(axis=-1) == split.labels).mean() > 0.4
    for logits in others:
        np.testing.assert_array_equal(logits.argmax(axis=-1), first.argmax(axis=-1))
        np.testing.assert_allclose(logits, first, rtol=0, atol=1e-4)
