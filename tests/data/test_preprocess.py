"""Scaling, resizing and standardising under jit."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn.data.base import ImageInfo
from relattn.data.preprocess import input_shape, make_preprocess, preprocess

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 28, 28, 1), np.uint8)


def test_images_of_the_same_size_are_only_scaled():
    chex.assert_trees_all_close(preprocess(IMAGES, image_size=28), IMAGES / 255)


@pytest.mark.parametrize("size", [32, 13, (13, 41)])
def test_resize_equals_pillow(size):
    images = preprocess(IMAGES, image_size=size)
    height, width = images.shape[1:3]
    assert size in (height, (height, width))
    for ours, image in zip(np.array(images), IMAGES, strict=True):
        theirs = Image.fromarray(image[..., 0].astype(np.float32))
        theirs = theirs.resize((width, height), Image.Resampling.BILINEAR)
        np.testing.assert_allclose(ours[..., 0], np.asarray(theirs) / 255, atol=2e-6)


def test_standardised_images_have_mean_0_and_std_1():
    images = np.random.default_rng(1).integers(0, 256, (101, 28, 28, 3), np.uint8)
    mean, std = (images / 255).mean(axis=(0, 1, 2)), (images / 255).std(axis=(0, 1, 2))
    mean, std = mean.astype(np.float32), std.astype(np.float32)
    result = preprocess(images, image_size=28, mean=mean, std=std)
    result = np.array(result, np.float64)
    np.testing.assert_allclose(result.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(result.std(axis=(0, 1, 2)), 1, atol=1e-5)


@pytest.mark.parametrize(
    "keys, mean, std",
    [({}, 0, 1), ({"standardize": False}, 0, 1), ({"standardize": True}, 0.3, 0.2)],
)
def test_standardize_is_an_option(keys, mean, std):
    info = ImageInfo("grey", ("a", "b"), (28, 28, 1), (0.3,), (0.2,), 7, "")
    result = make_preprocess(ConfigDict(keys), info)({"image": IMAGES})
    chex.assert_trees_all_close(result, (IMAGES / 255 - mean) / std, atol=1e-5)


def test_what_is_no_batch_of_images_is_refused():
    info = ImageInfo("grey", ("a", "b"), (28, 28, 1), (0.3,), (0.2,), 7, "")
    preprocess_batch = make_preprocess(ConfigDict(), info)
    with pytest.raises(ValueError, match=r"takes a batch, {'image': array}, got array"):
        preprocess_batch(IMAGES)
    with pytest.raises(ValueError, match="reads 'image' of a batch, which has only 'l"):
        preprocess_batch({"label": np.zeros(3)})


def test_change_is_applied_before_resize_and_standardisation():
    def change(images):
        return jnp.roll(images, 3, axis=2) ** 2

    result = preprocess(
        IMAGES,
        image_size=13,
        mean=np.full(1, 0.3, np.float32),
        std=np.full(1, 0.2, np.float32),
        change=change,
    )
    shape = (3, 13, 13, 1)
    resized = jax.image.resize(change(IMAGES / np.float32(255)), shape, "linear")
    chex.assert_trees_all_close(result, (resized - 0.3) / 0.2, atol=1e-5)


def test_preprocess_under_jit_and_on_single_images():
    function = functools.partial(preprocess, image_size=32)
    expected = function(IMAGES)
    chex.assert_trees_all_close(jax.jit(function)(IMAGES), expected, atol=1e-6)
    for index in range(3):
        one = function(IMAGES[index : index + 1])
        chex.assert_trees_all_close(one[0], expected[index], atol=1e-6)


def test_mean_without_std_raises():
    with pytest.raises(ValueError, match="mean and std go together"):
        preprocess(IMAGES, image_size=28, mean=np.zeros(1, np.float32))


def test_image_size_of_0_raises():
    with pytest.raises(ValueError, match="image_size=0 must be at least 1"):
        preprocess(IMAGES, image_size=0)


def test_negative_image_size_in_config_raises():
    info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.5,), 7, "")
    with pytest.raises(ValueError, match="data.image_size=-4 must be at least 1"):
        input_shape(ConfigDict({"image_size": -4}), info)
    with pytest.raises(ValueError, match="image_size=99999999999 must be at most"):
        input_shape(ConfigDict({"image_size": 99999999999}), info)
    for size in (8.0, (8,), (8, 8.0), "8"):
        match = r"must be an integer, or two: the height and the width"
        with pytest.raises(ValueError, match=match):
            input_shape(ConfigDict({"image_size": size}), info)
    photographs = dataclasses.replace(info, streamed=True)
    with pytest.raises(ValueError, match="photographs are cropped to squares"):
        input_shape(ConfigDict({"image_size": (8, 6)}), photographs)
    with pytest.raises(ValueError, match="standardize='False' must be True or False"):
        make_preprocess(ConfigDict({"standardize": "False"}), info)
    make_preprocess(ConfigDict({"standardize": 1}), info)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": 0.1307}, r"data.mean=0.1307 must be a tuple of .* such as \(0.5,\)"),
        ({"std": ("a",)}, r"data.std=\('a',\) must be a tuple of plain numbers"),
        ({"mean": (33.3,)}, "has mean 33.3, expected 0 to 1, .* divided by 255"),
        ({"std": (-1.0,)}, "standard deviation -1.0, expected finite and positive"),
    ],
)
def test_statistics_of_other_types_or_units_raise(changes, message):
    info = ImageInfo("grey", ("a", "b"), (4, 4, 1), (0.5,), (0.5,), 7, "")
    with pytest.raises(ValueError, match=message):
        make_preprocess(ConfigDict({"standardize": True, **changes}), info)


def test_floats_are_refused():
    with pytest.raises(ValueError, match="images are float32, expected uint8 from 0"):
        preprocess(np.zeros((1, 2, 2, 1), np.float32), image_size=2)
