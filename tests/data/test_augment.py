"""Random and central crops."""

import math

import numpy as np
import pytest
from PIL import Image

from relattn.data.augment import (
    draw_crop,
    random_flip,
    random_resized_crop,
    resized_center_crop,
)


def ramp(width, height):
    """Red grows by one a column, green by one a row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)
    pixels[..., 1] = np.arange(height)[:, None]
    return Image.fromarray(pixels)


@pytest.mark.parametrize("width, height", [(101, 53), (53, 101), (7, 7)])
def test_crops_have_the_area_and_shape_promised(width, height):
    rng = np.random.default_rng(0)
    boxes = np.array([draw_crop(width, height, rng) for _ in range(500)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() == 0
    assert boxes[:, 2].max() == width and boxes[:, 3].max() == height
    assert w.min() >= 1 and h.min() >= 1
    # Sides are whole pixels: half a pixel either way.
    assert np.all((w + 0.5) * (h + 0.5) >= 0.08 * width * height)
    assert np.all((w + 0.5) / (h - 0.5) >= 3 / 4)
    assert np.all((w - 0.5) / (h + 0.5) <= 4 / 3)


def test_the_area_is_uniform_where_every_draw_fits():
    rng = np.random.default_rng(0)
    boxes = np.array([draw_crop(1009, 1009, rng) for _ in range(1000)])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 1009**2
    # Up to 3/4 every ratio fits at once, so there the density is constant.
    counts, _ = np.histogram(area, bins=4, range=(0.08, 0.75))
    assert counts.min() > counts.mean() - 4 * np.sqrt(counts.mean())


def test_the_ratio_is_log_uniform_where_every_draw_fits():
    rng = np.random.default_rng(0)
    boxes = np.array([draw_crop(1009, 1009, rng) for _ in range(6000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    logs = np.log(w / h)[w * h < 0.75 * 1009**2]
    # The mean is 0, within four standard errors; of a uniform ratio it is 0.027.
    error = math.log(16 / 9) / math.sqrt(12 * len(logs))
    assert abs(logs.mean()) < 4 * error < 0.01


@pytest.mark.parametrize(
    "size, box", [((100, 2), (48, 0, 51, 2)), ((2, 100), (0, 48, 2, 51))]
)
def test_a_shape_without_a_fit_gives_the_centre(monkeypatch, size, box):
    monkeypatch.setattr("relattn.data.augment.ATTEMPTS", 0)
    assert draw_crop(*size, np.random.default_rng(0)) == box


def test_the_crop_is_resized():
    crop = random_resized_crop(ramp(101, 53), np.random.default_rng(3), 11)
    left, top, right, bottom = draw_crop(101, 53, np.random.default_rng(3))
    pixels = np.asarray(crop, float)
    assert pixels.shape == (11, 11, 3)
    step_x, step_y = (right - left) / 11, (bottom - top) / 11
    # At the borders a bilinear filter has one side only.
    inner = np.arange(1, 10)
    expected = left - 0.5 + (inner + 0.5) * step_x
    np.testing.assert_allclose(pixels[5, 1:-1, 0], expected, atol=0.6)
    expected = top - 0.5 + (inner + 0.5) * step_y
    np.testing.assert_allclose(pixels[1:-1, 5, 1], expected, atol=0.6)


def test_half_of_the_flips():
    image = ramp(7, 5)
    rng = np.random.default_rng(0)
    results = [np.asarray(random_flip(image, rng)) for _ in range(200)]
    flipped = [np.array_equal(r, np.asarray(image)[:, ::-1]) for r in results]
    kept = [np.array_equal(r, np.asarray(image)) for r in results]
    assert sum(flipped) + sum(kept) == 200
    assert 70 < sum(flipped) < 130


@pytest.mark.parametrize("size", [(101, 53), (53, 101), (53, 53)])
def test_the_centre(size):
    image = resized_center_crop(ramp(*size), 43, 53)
    left, top = round((size[0] - 43) / 2), round((size[1] - 43) / 2)
    expected = ramp(*size).crop((left, top, left + 43, top + 43))
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_the_short_side_is_resized():
    image = resized_center_crop(ramp(200, 100), 50, 50)
    pixels = np.asarray(image, float)
    # Of 100 columns after the resize, 25 .. 74 remain.
    np.testing.assert_allclose(pixels[25, :, 0], 2 * np.arange(25, 75) + 0.5, atol=0.6)


def test_a_square_that_does_not_fit():
    with pytest.raises(ValueError, match="short_side=32 with size=33: the square must"):
        resized_center_crop(ramp(50, 50), 33, 32)
