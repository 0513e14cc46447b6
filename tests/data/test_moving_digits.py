"""Tests volumes of moving digits: motion, determinism, splits and errors."""

import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data import image_options, load_data
from relattn.data.images import ImageData
from relattn.data.moving_digits import DIRECTIONS, make_moving_digits, move_digits

SEED = [3]


def draw_digits(n):
    return np.random.default_rng(0).integers(1, 256, (n, 28, 28, 1), np.uint8)


def test_a_digit_of_half_the_size_moves_in_the_direction_of_its_label():
    digits = draw_digits(50)
    split = move_digits(digits, SEED)
    means = digits.reshape(50, 14, 2, 14, 2).mean(axis=(2, 4)).round()
    speeds = set()
    for volume, label, small in zip(split.images, split.labels, means, strict=True):
        frames = volume[..., 0]
        corners = np.array([np.argwhere(frame)[0] for frame in frames])
        for frame, (row, column) in zip(frames, corners, strict=True):
            expected = np.zeros((28, 28))
            expected[row : row + 14, column : column + 14] = small
            np.testing.assert_array_equal(frame, expected)
        steps = np.unique(np.diff(corners, axis=0), axis=0)
        assert len(steps) == 1
        speed = np.abs(steps).max()
        direction = [*DIRECTIONS.values()][label]
        np.testing.assert_array_equal(steps[0], speed * np.array(direction))
        speeds.add(int(speed))
    assert speeds == {1, 2} and {*split.labels.tolist()} == {*range(8)}


def test_a_volume_is_a_function_of_the_seed_and_the_index():
    digits = draw_digits(7)
    whole, part = move_digits(digits, SEED), move_digits(digits[:5], SEED)
    np.testing.assert_array_equal(part.images, whole.images[:5])
    np.testing.assert_array_equal(part.labels, whole.labels[:5])
    assert (move_digits(digits, [4]).images != whole.images).any()


@pytest.mark.slow
def test_the_embedded_digits_are_split_and_loaded():
    config = image_options(
        "moving_digits", 28, source="moving_digits", num_validation=500, split_seed=1
    )
    data = load_data(config)
    assert isinstance(data, ImageData) and data.image_shape == (8, 28, 28, 1)
    assert [len(data.train), len(data.validation), len(data.test)] == [4500, 500, 1000]
    again = make_moving_digits(num_validation=500, split_seed=1)
    np.testing.assert_array_equal(data.train.images, again.train.images)
    # No digit is in two splits, and every direction is as frequent.
    counts = np.bincount(data.train.labels, minlength=8) / 4500
    np.testing.assert_allclose(counts, 1 / 8, atol=0.02)


def test_options_without_effect_raise():
    config = ConfigDict({"source": "moving_digits", "placement": "static"})
    with pytest.raises(ValueError, match="placement='static' has no effect on moving"):
        load_data(config)


def test_volumes_take_no_augmentation_of_images():
    volumes = np.zeros((7, 2, 5, 5, 1), np.uint8)
    options = {"num_validation": 2, "augment": "rotate(degrees=10)"}
    with pytest.raises(ValueError, match="changes images of height and width, not vol"):
        ImageData.from_arrays("mine", volumes, np.arange(7) % 2, ("a", "b"), **options)
