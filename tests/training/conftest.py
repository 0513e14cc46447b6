"""Tiny models, images and texts for the tests of training."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import data as data_lib
from relattn import models, training
from relattn.data.base import ONE_SHARD, shard_rows
from relattn.kernels import draw_random_features, positive_features
from relattn.training import default_config
from tests.training.programs import shared_images as shared_images  # noqa: PLC0414
from tests.training.programs import shared_programs as shared_programs  # noqa: PLC0414


class TinyModel(nn.Module):
    """An MLP on random features, with dropout and a sown scalar."""

    num_classes: int
    width: int = 11
    dropout: float = 0.0

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        x = nn.Dense(self.width, name="embedding")(images.reshape(len(images), -1))
        drawn = self.variable(
            "random_features",
            "projection",
            lambda: draw_random_features(
                self.make_rng("random_features"),
                layer=0,
                num_features=7,
                head_dim=self.width,
            ),
        )
        features = positive_features(jnp.tanh(x), drawn.value.projection).dense()
        self.sow("intermediates", "feature_mean", features.mean())
        x = nn.Dropout(self.dropout)(nn.relu(x), deterministic=deterministic)
        x = jnp.concatenate([x, features], axis=-1)
        return nn.Dense(self.num_classes, name="head")(x)


def make_data(num_train=101, num_validation=23, num_test=29, seed=0):
    """Images whose class is the brighter of three columns, with noise."""
    rng = np.random.default_rng(seed)

    def split(n):
        labels = rng.integers(0, 3, n).astype(np.int32)
        images = rng.integers(0, 160, (n, 5, 3, 1), dtype=np.uint8)
        images[np.arange(n), :, labels] += np.uint8(80)
        return data_lib.ImageSplit(images, labels)

    return data_lib.ImageData(
        name="columns",
        train=split(num_train),
        validation=split(num_validation),
        test=split(num_test),
        class_names=("left", "middle", "right"),
        mean=np.array([0.4], np.float32),
        std=np.array([0.2], np.float32),
        origin="columns of noise",
    )


class TinyLanguageModel(nn.Module):
    """A bigram model with a hidden layer."""

    vocab_size: int
    width: int = 11
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens, *, deterministic=True):
        x = nn.Embed(self.vocab_size, self.width, name="embedding")(tokens)
        x = nn.Dropout(self.dropout)(nn.tanh(x), deterministic=deterministic)
        return nn.Dense(self.vocab_size, name="head")(x)


@dataclasses.dataclass
class TinyWindows:
    """Windows of a text in which each token is twice the one before, mostly."""

    count: int
    seed: int
    vocab_size: int = 13
    length: int = 7

    def __len__(self):
        return self.count

    def gather(self, rng, count):
        tokens = [rng.integers(0, self.vocab_size, count)]
        for _ in range(self.length):
            noise = rng.random(count) < 0.2
            random = rng.integers(0, self.vocab_size, count)
            tokens.append(np.where(noise, random, 2 * tokens[-1] % self.vocab_size))
        tokens = np.stack(tokens, axis=1).astype(np.int32)
        return {"tokens": tokens[:, :-1], "label": tokens[:, 1:]}

    def batches(self, batch_size, shard=ONE_SHARD):
        own = shard_rows(batch_size, shard)
        whole = self.gather(np.random.default_rng(self.seed), self.count)
        # The last window is half as long.
        weight = np.ones(whole["label"].shape, np.float32)
        weight[-1, self.length // 2 :] = 0
        whole["weight"] = weight
        for start in range(0, self.count, batch_size):
            rows = slice(start + own.start, start + own.stop)
            batch = {key: value[rows] for key, value in whole.items()}
            yield data_lib.fill_batch(batch, own.stop - own.start)


class TinyText:
    """A source of text; its validation windows are its test windows."""

    def __init__(self, vocab_size=13, tokenizer="doubling"):
        self.windows = TinyWindows(101, seed=0, vocab_size=vocab_size)
        validation = TinyWindows(23, seed=1, vocab_size=vocab_size)
        self.eval_splits = {"validation": validation, "test": validation}
        self.info = data_lib.TextInfo(
            name="doublings",
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            context_length=self.windows.length,
            num_train=len(self.windows),
            origin="doublings with noise",
        )

    def train_loader(self, batch_size, seed, start_step=0, place=None, shard=ONE_SHARD):
        rows = shard_rows(batch_size, shard)

        def make_batch(step):
            rng = np.random.default_rng([seed, step])
            batch = self.windows.gather(rng, batch_size)
            return {key: value[rows] for key, value in batch.items()}

        return data_lib.Loader(make_batch, start_step, place=place)


def build_tiny(
    config, *, num_classes=None, image_shape=None, vocab_size=None, context_length=None
):
    """Stands in for `relattn.models.build_model`."""
    options = {k: v for k, v in dict(config).items() if k != "name"}
    if vocab_size is not None:
        return TinyLanguageModel(vocab_size=vocab_size, **options)
    return TinyModel(num_classes=num_classes, **options)


def use_tiny(patch, make_data=make_data):
    """Makes training build the tiny model and load the tiny images."""
    patch.setattr(models, "build_model", build_tiny)
    patch.setattr(data_lib, "load_data", lambda config: make_data())


@pytest.fixture
def tiny(monkeypatch):
    """Makes training build the tiny model and load the tiny images."""
    use_tiny(monkeypatch)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Returns the folder and the result of a finished run of `make_config`."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny(patch)
        devices = jax.local_devices()[:1]
        return folder, training.train_and_evaluate(
            make_config(), folder, devices=devices
        )


@pytest.fixture(scope="session")
def finished_text(tmp_path_factory):
    """Returns the folder of a finished run of `make_text_config`."""
    folder = tmp_path_factory.mktemp("finished_text")
    with pytest.MonkeyPatch.context() as patch:
        use_tiny(patch, TinyText)
        devices = jax.local_devices()[:1]
        training.train_and_evaluate(make_text_config(), folder, devices=devices)
    return folder


def make_config():
    """Returns the configuration of three epochs of five steps on the tiny images."""
    config = default_config()
    config.model.name = "tiny"
    config.model.dropout = 0.2
    config.data.name = "columns"
    config.data.image_size = 5
    config.data.standardize = True
    config.batch_size = 20
    config.eval_batch_size = 16
    config.num_epochs = 3
    config.optimizer.learning_rate = 0.01
    config.redraw_every = 4
    config.log_every_steps = 2
    config.progress = False
    return config.lock()


def make_text_config():
    """Returns the same configuration for the tiny text."""
    config = make_config()
    with config.unlocked():
        del config.data.image_size, config.data.standardize
    config.data.name = "doublings"
    return config


@pytest.fixture
def config():
    """Returns the configuration of three epochs of five steps on the tiny images."""
    return make_config()


@pytest.fixture
def one_device():
    """Returns the first device alone, for speed where parallelism does not matter."""
    return jax.local_devices()[:1]


@pytest.fixture
def text_config(monkeypatch):
    """Makes training use the tiny model and text; returns their configuration."""
    use_tiny(monkeypatch, TinyText)
    return make_text_config()
