"""Crops, flips and RandAugment of Pillow images."""

import collections
import dataclasses
import math

import numpy as np
import pytest
from PIL import Image

from relattn.data.image_transforms import (
    OPERATIONS,
    draw_crop,
    randaugment,
    random_flip,
    random_resized_crop,
    resized_center_crop,
)


def ramp(width, height):
    """Returns an image whose red is the column and whose green is the row."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.arange(width)
    pixels[..., 1] = np.arange(height)[:, None]
    return Image.fromarray(pixels)


@pytest.mark.parametrize("width, height", [(101, 53), (53, 101), (7, 7)])
def test_crop_area_and_ratio_are_in_range(width, height):
    rng = np.random.default_rng(0)
    boxes = np.array([draw_crop(width, height, rng) for _ in range(500)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() == 0
    assert boxes[:, 2].max() == width and boxes[:, 3].max() == height
    assert w.min() >= 1 and h.min() >= 1
    # Sides are rounded to whole pixels, by up to half a pixel.
    assert np.all((w + 0.5) * (h + 0.5) >= 0.08 * width * height)
    assert np.all((w + 0.5) / (h - 0.5) >= 3 / 4)
    assert np.all((w - 0.5) / (h + 0.5) <= 4 / 3)


def test_crop_area_is_uniform():
    rng = np.random.default_rng(0)
    boxes = np.array([draw_crop(1009, 1009, rng) for _ in range(1000)])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]) / 1009**2
    # Up to an area of 3/4 every ratio fits, so the density is constant there.
    counts, _ = np.histogram(area, bins=4, range=(0.08, 0.75))
    assert counts.min() > counts.mean() - 4 * np.sqrt(counts.mean())


def test_crop_ratio_is_log_uniform():
    rng = np.random.default_rng(0)
    boxes = np.array([draw_crop(1009, 1009, rng) for _ in range(6000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    logs = np.log(w / h)[w * h < 0.75 * 1009**2]
    # The mean is 0 within four standard errors; a uniform ratio would give 0.027.
    error = math.log(16 / 9) / math.sqrt(12 * len(logs))
    assert abs(logs.mean()) < 4 * error < 0.01


@pytest.mark.parametrize(
    "size, box", [((100, 2), (48, 0, 51, 2)), ((2, 100), (0, 48, 2, 51))]
)
def test_crop_falls_back_to_the_centre(monkeypatch, size, box):
    monkeypatch.setattr("relattn.data.image_transforms.ATTEMPTS", 0)
    assert draw_crop(*size, np.random.default_rng(0)) == box


def test_random_crop_is_resized():
    crop = random_resized_crop(ramp(101, 53), np.random.default_rng(3), 11)
    left, top, right, bottom = draw_crop(101, 53, np.random.default_rng(3))
    pixels = np.asarray(crop, float)
    assert pixels.shape == (11, 11, 3)
    step_x, step_y = (right - left) / 11, (bottom - top) / 11
    # At the borders the bilinear filter is one-sided.
    inner = np.arange(1, 10)
    expected = left - 0.5 + (inner + 0.5) * step_x
    np.testing.assert_allclose(pixels[5, 1:-1, 0], expected, atol=0.6)
    expected = top - 0.5 + (inner + 0.5) * step_y
    np.testing.assert_allclose(pixels[1:-1, 5, 1], expected, atol=0.6)


def test_flip_probability_is_one_half():
    image = ramp(7, 5)
    rng = np.random.default_rng(0)
    results = [np.asarray(random_flip(image, rng)) for _ in range(200)]
    flipped = [np.array_equal(r, np.asarray(image)[:, ::-1]) for r in results]
    kept = [np.array_equal(r, np.asarray(image)) for r in results]
    assert sum(flipped) + sum(kept) == 200
    assert 70 < sum(flipped) < 130


@pytest.mark.parametrize("size", [(101, 53), (53, 101), (53, 53)])
def test_central_crop_is_centred(size):
    image = resized_center_crop(ramp(*size), 43, 53)
    left, top = round((size[0] - 43) / 2), round((size[1] - 43) / 2)
    expected = ramp(*size).crop((left, top, left + 43, top + 43))
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_short_side_is_resized():
    image = resized_center_crop(ramp(200, 100), 50, 50)
    pixels = np.asarray(image, float)
    # Columns 25 .. 74 of the 100 after the resize remain.
    np.testing.assert_allclose(pixels[25, :, 0], 2 * np.arange(25, 75) + 0.5, atol=0.6)


def test_square_larger_than_short_side_raises():
    with pytest.raises(ValueError, match="short_side=32 with size=33: the square must"):
        resized_center_crop(ramp(50, 50), 33, 32)


WIDTH, HEIGHT = 53, 37


@pytest.fixture(scope="module")
def image():
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(20, 230, (HEIGHT, WIDTH, 3), np.uint8))


def apply(name, image, magnitude, sign=1):
    operation = OPERATIONS[name]
    value = sign * operation.value(magnitude, *image.size)
    return np.asarray(operation.apply(image, value))


# Strengths of torchvision's RandAugment with num_magnitude_bins=31, for an image of
# 224 x 160, at magnitudes 9 and 30.
PUBLISHED = {
    "identity": (0, 0, False),
    "shear_x": (0.09, 0.3, True),
    "shear_y": (0.09, 0.3, True),
    "translate_x": (224 * 45 / 331, 224 * 150 / 331, True),
    "translate_y": (160 * 45 / 331, 160 * 150 / 331, True),
    "rotate": (9, 30, True),
    "brightness": (0.27, 0.9, True),
    "color": (0.27, 0.9, True),
    "contrast": (0.27, 0.9, True),
    "sharpness": (0.27, 0.9, True),
    "posterize": (7, 4, False),
    "solarize": (178.5, 0, False),
    "autocontrast": (0, 0, False),
    "equalize": (0, 0, False),
}


def test_strengths_equal_the_published_ones():
    assert list(OPERATIONS) == list(PUBLISHED)
    for name, (at_9, at_30, signed) in PUBLISHED.items():
        operation = OPERATIONS[name]
        assert operation.signed == signed
        assert operation.value(9, 224, 160) == pytest.approx(at_9)
        assert operation.value(30, 224, 160) == pytest.approx(at_30)


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - {"autocontrast", "equalize"}))
def test_magnitude_0_changes_nothing(name, image):
    np.testing.assert_array_equal(apply(name, image, 0), np.asarray(image))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["shear_x", "translate_x", "shear_y", "translate_y"])
def test_shears_and_translations_equal_numpy(name, sign, image):
    along_x = name.endswith("x")
    pixels = np.asarray(image)
    if not along_x:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    result = apply(name, image, 9, sign)
    if not along_x:
        result = result.swapaxes(0, 1)
    expected = np.zeros_like(pixels)
    columns = np.arange(WIDTH)
    for row in range(HEIGHT):
        if name.startswith("shear"):
            source = np.floor(columns + 0.5 + sign * 0.09 * (row + 0.5)).astype(int)
        else:
            source = columns - sign * int(150 / 331 * WIDTH * 9 / 30)
        inside = (source >= 0) & (source < WIDTH)
        expected[row, inside] = pixels[row, source[inside]]
    np.testing.assert_array_equal(result, expected)


def test_rotation_equals_numpy(image):
    result = apply("rotate", image, 9)
    angle = np.deg2rad(9)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    x, y = columns + 0.5 - WIDTH / 2, rows + 0.5 - HEIGHT / 2
    # Counter-clockwise, with rows counted downwards.
    source_x = np.floor(x * np.cos(angle) - y * np.sin(angle) + WIDTH / 2).astype(int)
    source_y = np.floor(x * np.sin(angle) + y * np.cos(angle) + HEIGHT / 2).astype(int)
    inside = (source_x >= 0) & (source_x < WIDTH)
    inside &= (source_y >= 0) & (source_y < HEIGHT)
    expected = np.zeros_like(np.asarray(image))
    expected[inside] = np.asarray(image)[source_y[inside], source_x[inside]]
    different = (result != expected).any(-1).mean()
    # Positions halfway between two pixels may round differently.
    assert different < 0.01


@pytest.mark.parametrize("sign", [1, -1])
def test_colour_enhancements_equal_numpy(sign, image):
    pixels = np.asarray(image, float)
    grey = np.asarray(image.convert("L"), float)
    factor = 1 + sign * 0.27
    expected = {
        "brightness": factor * pixels,
        "color": grey[..., None] + factor * (pixels - grey[..., None]),
        "contrast": grey.mean() + factor * (pixels - grey.mean()),
    }
    for name, values in expected.items():
        result = apply(name, image, 9, sign)
        np.testing.assert_allclose(result, values.clip(0, 255), atol=1.3, err_msg=name)


def test_sharpness_changes_the_contrast_of_edges(image):
    spread = [np.std(apply("sharpness", image, 30, sign)) for sign in (-1, 1)]
    assert spread[0] < np.std(np.asarray(image)) < spread[1]


def test_operations_on_pixel_values(image):
    pixels = np.asarray(image)
    np.testing.assert_array_equal(apply("posterize", image, 9), pixels & 0xFE)
    np.testing.assert_array_equal(apply("posterize", image, 30), pixels & 0xF0)
    inverted = np.where(pixels < 178.5, pixels, 255 - pixels)
    np.testing.assert_array_equal(apply("solarize", image, 9), inverted)
    contrast = apply("autocontrast", image, 9)
    assert contrast.min() == 0 and contrast.max() == 255
    equal = np.bincount(apply("equalize", image, 9)[..., 0].ravel(), minlength=256)
    assert np.ptp(equal.reshape(4, 64).sum(1)) < 0.2 * pixels[..., 0].size


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_operations_keep_size_and_mode(mode, image):
    image = image.convert(mode)
    for name, operation in OPERATIONS.items():
        result = operation.apply(image, operation.value(9, *image.size))
        assert (result.size, result.mode) == (image.size, mode), name


def test_operations_and_signs_are_drawn_uniformly(image, monkeypatch):
    counts = collections.Counter()
    for name, operation in OPERATIONS.items():

        def record(image, value, name=name):
            counts[name, value < 0] += 1
            return image

        recorder = dataclasses.replace(operation, apply=record)
        monkeypatch.setitem(OPERATIONS, name, recorder)
    rng = np.random.default_rng(0)
    for _ in range(700):
        randaugment(image, rng, num_ops=2, magnitude=9)
    assert counts.total() == 1400
    signed = [name for name, operation in OPERATIONS.items() if operation.signed]
    assert len(counts) == 14 + len(signed)
    for (name, _), count in counts.items():
        mean = 50 if name in signed else 100
        assert abs(count - mean) < 4 * np.sqrt(mean)


def test_randaugment_is_a_function_of_the_generator(image):
    first, again, other = (
        randaugment(image, np.random.default_rng(seed), num_ops=5, magnitude=17)
        for seed in (7, 7, 8)
    )
    np.testing.assert_array_equal(np.asarray(first), np.asarray(again))
    assert not np.array_equal(np.asarray(first), np.asarray(other))
    none = randaugment(image, np.random.default_rng(7), num_ops=0)
    np.testing.assert_array_equal(np.asarray(none), np.asarray(image))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_ops": -1}, "num_ops=-1 must be at least 0"),
        ({"magnitude": 31}, "magnitude=31 must be within 0 .. 30"),
        ({"magnitude": -1}, "magnitude=-1 must be within 0 .. 30"),
    ],
)
def test_invalid_options_raise(image, options, message):
    with pytest.raises(ValueError, match=message):
        randaugment(image, np.random.default_rng(0), **options)
