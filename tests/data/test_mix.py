"""CutMix and MixUp: the masks, how they are distributed, and what is refused."""

import functools
import math

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from relattn.data import load_data, make_mix

SIZE = (5, 7)
DRAWS = 2000
BOTH = "cutmix(alpha=1.0) | mixup(alpha=0.8)"


@functools.cache
def draw(text):
    """Masks of many keys."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(jax.jit(jax.vmap(lambda key: make_mix(text)(key, SIZE)))(keys))


def naive_cutmix(rng, alpha):
    """The mask as in the paper's algorithm, with torchvision's rounding."""
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
    """The difference of two means of samples."""
    variance = (ours.var(axis=0) + theirs.var(axis=0)) / DRAWS
    return np.abs(ours.mean(axis=0) - theirs.mean(axis=0)) / np.sqrt(variance)


@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_cutmix_is_distributed_as_the_naive_one(alpha):
    ours = draw(f"cutmix(alpha={alpha})")
    rng = np.random.default_rng(0)
    theirs = np.stack([naive_cutmix(rng, alpha) for _ in range(DRAWS)])
    # 35 pixels, and the share of the image with its square.
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


def test_mixup_is_beta_distributed():
    masks = draw("mixup(alpha=0.8)")
    shares = masks[:, 0, 0]
    assert (masks == shares[:, None, None]).all()
    # Var of Beta(a, a): 1 / (4 (2 a + 1)).
    squares = (shares - 0.5) ** 2
    assert abs(squares.mean() - 1 / 10.4) < 4 * squares.std() / math.sqrt(DRAWS)
    assert abs(shares.mean() - 0.5) < 4 * shares.std() / math.sqrt(DRAWS)


def test_alternatives_are_equally_likely():
    masks = draw(BOTH)
    # MixUp draws 0 or 1 exactly with negligible probability.
    cut = np.isin(masks[:, 0, 0], [0.0, 1.0])
    assert abs(cut.mean() - 0.5) < 4 * 0.5 / math.sqrt(DRAWS)


def test_none_mixes_nothing():
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
            "mixes images, and the data are text: leave data.mix out",
        ),
    ],
)
def test_bad_specs_are_refused_as_the_data_are_loaded(config, message):
    config = ConfigDict({"name": "mnist", "context_length": 5, **config})
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        load_data(config)
