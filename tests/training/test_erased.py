"""Training on images of which parts are erased: which, on devices and in parts."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from relattn.data import make_erase, make_mix
from relattn.training.draws import stream_key
from relattn.training.mesh import MeshParallel
from relattn.training.pmap import DataParallel
from relattn.training.step import create_state, make_train_step
from tests.helpers import quick

SHAPE = (5, 3, 2)
ERASE = make_erase("random_erasing(probability=0.7, max_area=0.6)")
KEY = jax.random.key(7)


class Mean(nn.Module):
    """Sows the mean of its inputs, and that of each image's number."""

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        scale = self.param("scale", nn.initializers.ones, (3,))
        self.sow("intermediates", "mean", images.mean())
        return images.mean((1, 2, 3))[:, None] * scale


def measure(parallel, steps=2, key=KEY, **options):
    """Returns the mean of the inputs in each update on 12 images, each its number."""
    step = make_train_step(
        Mean(),
        optax.sgd(0.0),
        lambda batch: batch["image"].astype(np.float32),
        erase=ERASE,
        **options,
    )
    update = parallel.compile_train_step(step)
    make = lambda: create_state(Mean(), optax.sgd(0.0), key, SHAPE)  # noqa: E731
    state, means = parallel.create(make), []
    images = np.arange(1, 13).reshape(-1, 1, 1, 1) * np.ones((1, *SHAPE))
    batch = {"image": images.astype(np.uint8), "label": np.zeros(12, np.int32)}
    for _ in range(steps):
        state, metrics = update(state, parallel.shard(batch), key)
        means.append(parallel.fetch(metrics)["mean"])
    return means


@pytest.mark.quick("parts")
@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        pytest.param(lambda: DataParallel(jax.local_devices()[:1]), {}, id="one"),
        pytest.param(DataParallel, {}, id="pmap"),
        pytest.param(MeshParallel, {"accumulate_steps": 3}, id="parts"),
    ],
)
def test_each_image_of_the_batch_has_its_own_erased_part(parallel, options):
    def draw(step):
        key = jax.random.fold_in(stream_key(KEY, "erase"), step)
        return [ERASE(jax.random.fold_in(key, i), SHAPE[:2]) for i in range(12)]

    masks = np.array(quick.run(lambda: [draw(0), draw(1)]))
    expected = (masks.mean((2, 3)) * np.arange(1, 13)).mean(1)
    np.testing.assert_allclose(measure(parallel(), **options), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_other_generators_erase(impl):
    mean, *_ = measure(
        DataParallel(jax.local_devices()[:1]), key=jax.random.key(7, impl=impl)
    )
    # The mean without erasing is 6.5; two thirds of the images lose a part.
    assert 3 < mean < 6


@pytest.mark.slow
def test_the_image_before_is_erased_as_by_itself():
    one = DataParallel(jax.local_devices()[:1])
    # The mean of mixed images is that of the images.
    np.testing.assert_allclose(
        measure(one, mix=make_mix("mixup")), measure(one), rtol=1e-5
    )
