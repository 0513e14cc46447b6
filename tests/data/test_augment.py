"""Augmentation and mixing of batches: geometry, draws, distributions, errors."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn.data import (
    load_data,
    load_images,
    make_erase,
    make_mix,
    make_preprocess,
)
from relattn.data.augment import AUGMENTATIONS, augment
from tests.data.test_images import numbered_data

RNG = np.random.default_rng(0)
compiled_augment = jax.jit(augment, static_argnums=2)


def test_rotation_equals_pillow():
    images = np.zeros((5, 13, 17, 2), np.float32)
    # Pillow extends the border by half a pixel before the zeros begin.
    images[:, 4:-4, 4:-4] = RNG.random((5, 5, 9, 2))
    draws = RNG.random((5, 3)).astype(np.float32)
    rotated = compiled_augment(images, draws, "rotate(degrees=30)")
    for image, draw, ours in zip(images, draws, np.asarray(rotated), strict=True):
        for channel in range(2):
            theirs = Image.fromarray(image[..., channel]).rotate(
                (2 * draw[0] - 1) * 30, Image.Resampling.BILINEAR
            )
            np.testing.assert_allclose(ours[..., channel], theirs, atol=1e-3)


def test_flip_and_crop_equal_numpy():
    images = RNG.random((7, 5, 3, 2)).astype(np.float32)
    draws = RNG.random((7, 3)).astype(np.float32)
    draws[:2] = [[0.0, 0.0, 1 - 2**-24], [0.5, 1 - 2**-24, 0.0]]
    moved = compiled_augment(images, draws, "flip_crop(padding=2)")
    for image, draw, ours in zip(images, draws, np.asarray(moved), strict=True):
        image = image[:, ::-1] if draw[0] < 0.5 else image
        row, column = (int(5 * number) for number in draw[1:])
        padded = np.pad(image, [(2, 2), (2, 2), (0, 0)])
        theirs = padded[row : row + 5, column : column + 3]
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("spec", AUGMENTATIONS)
def test_augmentation_is_the_same_if_float64_is_enabled(spec):
    rng = np.random.default_rng(0)
    images, draws = (rng.random(s).astype(np.float32) for s in ((3, 5, 7, 1), (3, 3)))
    expected = compiled_augment(images, draws, spec)
    with jax.enable_x64(True):
        found = compiled_augment(images, draws, spec)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("spec", ["none", "rotate(degrees=0)"])
def test_identity_augmentations_change_nothing(spec):
    images = RNG.random((3, 5, 7, 1)).astype(np.float32)
    same = compiled_augment(images, RNG.random((3, 3)).astype(np.float32), spec)
    np.testing.assert_array_equal(same, images)


def make_batch(augmentation, seed, step):
    data = dataclasses.replace(numbered_data(), augment=augmentation)
    with data.train_loader(5, seed, step) as loader:
        return next(loader)[1]


def test_draws_depend_on_image_seed_and_epoch():
    # 18 images give 3 batches of 5 per epoch.
    def draws_by_image(seed, epoch):
        batches = [make_batch("rotate", seed, 3 * epoch + i) for i in range(3)]
        return {
            label: tuple(draw)
            for batch in batches
            for label, draw in zip(
                batch["label"].tolist(), batch["draws"].tolist(), strict=True
            )
        }

    first = draws_by_image(0, 0)
    assert first == draws_by_image(0, 0)
    assert len(set(first.values())) == 15
    for other in (draws_by_image(1, 0), draws_by_image(0, 1)):
        assert not set(first.values()) & set(other.values())
    assert "draws" not in make_batch("none", 0, 0)


def test_only_training_images_are_augmented():
    config = ConfigDict({"name": "mnist", "num_validation": 7, "standardize": True})
    config.augment = "flip_crop(padding=3)"
    data = load_images(config)
    preprocess = jax.jit(make_preprocess(config, data.info))
    with data.train_loader(11, seed=0) as loader:
        _, batch = next(loader)
    plain = preprocess({"image": batch["image"]})
    augmented = preprocess(batch)
    assert augmented.shape == plain.shape == (11, 28, 28, 1)
    images = batch["image"] / np.float32(255)
    moved = compiled_augment(images, batch["draws"], config.augment)
    expected = (moved - data.mean) / data.std
    np.testing.assert_allclose(augmented, expected, atol=1e-5)
    assert np.abs(augmented - plain).max() > 1
    for batch in data.validation.batches(7):
        assert "draws" not in batch


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rotat", "unknown data.augment 'rotat': did you mean 'rotate'?"),
        ("rotate(degree=3)", "'rotate' has no option 'degree': did you mean 'degrees'"),
        ("rotate(degrees=181)", "rotate needs degrees from 0 to 180, got 181"),
        ("flip_crop(padding=-1)", "needs a padding of at least 0, got -1"),
        ("randaugment", "unknown data.augment 'randaugment': available: flip_crop"),
    ],
)
def test_invalid_augment_raises_on_load(spec, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_images(ConfigDict({"name": "mnist", "augment": spec}))


SIZE = (5, 7)
DRAWS = 2000
BOTH = "cutmix(alpha=1.0) | mixup(alpha=0.8)"


@functools.cache
def draw(text):
    """Draws the masks of many keys."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(jax.jit(jax.vmap(lambda key: make_mix(text)(key, SIZE)))(keys))


def naive_cutmix(rng, alpha):
    """Draws a mask by the paper's algorithm, with torchvision's rounding."""
    height, width = SIZE
    ratio = 0.5 * math.sqrt(1 - rng.beta(alpha, alpha))
    x, y = rng.integers(width), rng.integers(height)
    half_x, half_y = int(ratio * width), int(ratio * height)
    mask = np.ones(SIZE)
    mask[
        max(y - half_y, 0) : min(y + half_y, height),
        max(x - half_x, 0) : min(x + half_x, width),
    ] = 0
    return mask


def standard_errors(ours, theirs):
    """Returns the difference of two sample means in standard errors."""
    variance = (ours.var(axis=0) + theirs.var(axis=0)) / DRAWS
    return np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) / np.sqrt(variance)


@pytest.mark.quick("1.0")
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_cutmix_has_the_distribution_of_the_naive_version(alpha):
    ours = draw(f"cutmix(alpha={alpha})")
    rng = np.random.default_rng(0)
    theirs = np.stack([naive_cutmix(rng, alpha) for _ in range(DRAWS)])
    # Means of 35 pixels, of the share and of its square.
    assert standard_errors(ours, theirs).max() < 4
    shares, expected = ours.mean(axis=(1, 2)), theirs.mean(axis=(1, 2))
    assert standard_errors(shares, expected) < 4
    assert standard_errors(shares**2, expected**2) < 4


def test_cutmix_replaces_one_rectangle():
    mask = draw("cutmix(alpha=1.0)")
    assert set(np.unique(mask)) == {0.0, 1.0}
    rows, columns = (mask == 0).any(axis=2), (mask == 0).any(axis=1)
    np.testing.assert_array_equal(mask == 0, rows[:, :, None] & columns[:, None])
    for inside in (rows, columns):
        # A rectangle without gaps begins at most once.
        starts = inside[:, 1:] & ~inside[:, :-1]
        assert (inside[:, 0] + starts.sum(axis=1)).max() == 1


def is_cut(masks):
    """Finds the masks of CutMix: MixUp's are 0 or 1 with negligible probability."""
    return np.isin(masks[:, 0, 0], [0.0, 1.0])


def test_mixup_is_beta_distributed():
    masks = draw(BOTH)
    masks = masks[~is_cut(masks)]
    shares = masks[:, 0, 0]
    assert (masks == shares[:, None, None]).all()
    # Var of Beta(a, a): 1 / (4 (2 a + 1)).
    squares = (shares - 0.5) ** 2
    assert abs(squares.mean() - 1 / 10.4) < 4 * squares.std() / math.sqrt(len(masks))
    assert abs(shares.mean() - 0.5) < 4 * shares.std() / math.sqrt(len(masks))


def test_alternatives_are_equally_likely():
    assert abs(is_cut(draw(BOTH)).mean() - 0.5) < 4 * 0.5 / math.sqrt(DRAWS)


def test_mix_none_returns_none():
    assert make_mix("none") is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mix": "cutmx"}, "unknown data.mix 'cutmx': did you mean 'cutmix'?"),
        ({"mix": "mixup(beta=1.0)"}, "data.mix 'mixup' has no option 'beta'"),
        ({"mix": "cutmix | mixup(alpha=0)"}, "mixup needs a positive alpha, got 0"),
        ({"mix": "cutmix, mixup"}, "'cutmix, mixup' is not a spec"),
        (
            {"mix": BOTH, "source": "text"},
            "mixes images, but the data are text: remove data.mix",
        ),
        ({"erase": "random_erase"}, "data.erase 'random_erase': did you mean 'random_"),
        ({"erase": "random_erasing(probability=2)"}, "probability from 0 to 1, got 2"),
        ({"erase": "random_erasing(min_area=0)"}, "needs 0 < min_area <= max_area < 1"),
        ({"erase": "random_erasing(min_aspect=2)"}, "above 0 and at most 1, got 2"),
        (
            {"erase": "random_erasing", "source": "text"},
            "erases parts of images, but the data are text: remove data.erase",
        ),
    ],
)
def test_invalid_mix_or_erase_raises_on_load(config, message):
    config = ConfigDict({"name": "mnist", "context_length": 5, **config})
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_data(config)


def naive_random_erasing(rng, size, probability, min_area, max_area, min_aspect):
    """Draws a mask by the paper's algorithm, with timm's rounding."""
    height, width = size
    mask = np.ones(size)
    if rng.random() > probability:
        return mask
    for _ in range(10):
        area = rng.uniform(min_area, max_area) * height * width
        aspect = math.exp(rng.uniform(math.log(min_aspect), -math.log(min_aspect)))
        rows = round(math.sqrt(area * aspect))
        columns = round(math.sqrt(area / aspect))
        if rows < height and columns < width:
            top = rng.integers(0, height - rows + 1)
            left = rng.integers(0, width - columns + 1)
            mask[top : top + rows, left : left + columns] = 0
            break
    return mask


def test_random_erasing_has_the_distribution_of_the_naive_version():
    size, options = (9, 14), {"min_area": 0.1, "max_area": 0.6, "min_aspect": 0.25}
    listed = ", ".join(f"{key}={value}" for key, value in options.items())
    erase = make_erase(f"random_erasing(probability=0.6, {listed})")
    keys = jax.random.split(jax.random.key(0), DRAWS)
    ours = np.asarray(jax.jit(jax.vmap(lambda key: erase(key, size)))(keys))
    rng = np.random.default_rng(0)
    theirs = np.stack(
        [naive_random_erasing(rng, size, 0.6, **options) for _ in range(DRAWS)]
    )
    # Means of 126 pixels, of the area, the height and the width, and of their squares.
    assert standard_errors(ours, theirs).max() < 4
    erased, expected = 1 - ours, 1 - theirs
    for measure in (
        lambda mask: mask.sum((1, 2)),
        lambda mask: mask.max(2).sum(1),
        lambda mask: mask.max(1).sum(1),
    ):
        one, other = measure(erased), measure(expected)
        assert standard_errors(one, other) < 4
        assert standard_errors(one**2, other**2) < 4
    np.testing.assert_array_equal(
        erased, erased.max(2, keepdims=True) * erased.max(1, keepdims=True)
    )
