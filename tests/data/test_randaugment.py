"""RandAugment's operations and draws."""

import collections

import numpy as np
import pytest
from PIL import Image

from relattn.data.randaugment import OPERATIONS, randaugment

WIDTH, HEIGHT = 53, 37


@pytest.fixture(scope="module")
def image():
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(20, 230, (HEIGHT, WIDTH, 3), np.uint8))


def apply(name, image, magnitude, sign=1):
    operation = OPERATIONS[name]
    value = sign * operation.value(magnitude, *image.size)
    return np.asarray(operation.apply(image, value))


# As published: torchvision's RandAugment with num_magnitude_bins=31, for an image of
# 224 x 160.
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


def test_strengths_are_the_published_ones():
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
def test_shears_and_translations(name, sign, image):
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


def test_rotation(image):
    result = apply("rotate", image, 9)
    angle = np.deg2rad(9)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    x, y = columns + 0.5 - WIDTH / 2, rows + 0.5 - HEIGHT / 2
    # Counter-clockwise as seen, with rows that grow downwards.
    source_x = np.floor(x * np.cos(angle) - y * np.sin(angle) + WIDTH / 2).astype(int)
    source_y = np.floor(x * np.sin(angle) + y * np.cos(angle) + HEIGHT / 2).astype(int)
    inside = (source_x >= 0) & (source_x < WIDTH)
    inside &= (source_y >= 0) & (source_y < HEIGHT)
    expected = np.zeros_like(np.asarray(image))
    expected[inside] = np.asarray(image)[source_y[inside], source_x[inside]]
    different = (result != expected).any(-1).mean()
    # A pixel on the border between two is rounded either way.
    assert different < 0.01


@pytest.mark.parametrize("sign", [1, -1])
def test_enhancements(sign, image):
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


def test_sharpness_acts_on_edges(image):
    spread = [np.std(apply("sharpness", image, 30, sign)) for sign in (-1, 1)]
    assert spread[0] < np.std(np.asarray(image)) < spread[1]


def test_operations_on_values(image):
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


def test_every_operation_and_sign_is_drawn_equally(image, monkeypatch):
    counts = collections.Counter()
    for name, operation in OPERATIONS.items():

        def record(image, value, name=name):
            counts[name, value < 0] += 1
            return image

        recorder = type(operation)(operation.value, operation.signed, record)
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


def test_a_generator_decides_all(image):
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
def test_bad_options(image, options, message):
    with pytest.raises(ValueError, match=message):
        randaugment(image, np.random.default_rng(0), **options)
