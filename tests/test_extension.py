"""What a user registers: a file each, and no other."""

import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import relattn
from relattn import cli, models
from relattn.data import load
from relattn.evaluation.report import report
from relattn.nn import registry
from relattn.training import load_run
from relattn.training.metrics_log import read_rows

FILES = {
    "attention": """
import jax, jax.numpy as jnp, relattn

class Cosine(relattn.MultiHeadAttention):
    scale: float = 10.0

    def attend(self, q, k, v, context):
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        return jax.nn.softmax(self.scale * q @ k.swapaxes(-1, -2)) @ v

relattn.register_attention("cosine", Cosine)
""",
    "position": """
import flax.linen as nn, jax.numpy as jnp, relattn

class Rows(relattn.Position):
    site = "tokens"

    @nn.compact
    def __call__(self, tokens, grid):
        shape = (grid[0], 1, self.dim)
        rows = self.param("rows", nn.initializers.normal(0.02), shape)
        return tokens + jnp.broadcast_to(rows, (*grid, self.dim)).reshape(-1, self.dim)

relattn.register_position("row_tables", Rows)
""",
    "model": """
import flax.linen as nn, jax.numpy as jnp, relattn
from collections.abc import Callable
from typing import Any

class Tokens(nn.Module):
    num_classes: int
    dim: int = 4
    activation: Callable = nn.gelu
    dtype: Any = jnp.float32
    inputs = "images"

    @nn.compact
    def __call__(self, images, *, deterministic=True):
        x = nn.Conv(self.dim, (2, 2), (2, 2), dtype=self.dtype)(images)
        x = nn.BatchNorm(use_running_average=deterministic)(x)
        x = x.reshape(len(x), -1, self.dim)
        attention_fn = relattn.attention_fn("favor")
        y = nn.MultiHeadDotProductAttention(2, attention_fn=attention_fn)(x)
        y = nn.Dropout(0.5)(self.activation(y), deterministic=deterministic)
        return nn.Dense(self.num_classes)((x + y).mean(axis=1))

relattn.register_model("tokens", Tokens)
""",
    "data": """
import numpy as np, relattn
from relattn.data import ImageData

def load_stripes(config):
    rng = np.random.default_rng(0)
    labels = np.arange(70) % 2
    images = rng.integers(0, 99, (70, 8, 8, 1), dtype=np.uint8)
    images[labels == 0, ::2] += 99
    images[labels == 1, :, ::2] += 99
    names = ("rows", "columns")
    return ImageData.from_arrays(
        "stripes", images, labels, names, num_validation=config.num_validation
    )

relattn.register_data("stripes", load_stripes)
""",
    "metric": """
import jax.numpy as jnp
from relattn.training import Metric, register_metric

def is_wrong(logits, labels):
    return (logits.argmax(-1) != labels).astype(jnp.float32)

register_metric("error_rate", Metric(is_wrong, higher_is_better=False, format=".1%"))
""",
}
CONFIG = """
from ml_collections import ConfigDict
from relattn.data import image_options
from relattn.training import default_config

def get_config():
    config = default_config()
    config.model = ConfigDict(
        {"name": "vit", "dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 16}
    )
    config.model.patch_size = 2
    config.model.attention = "cosine(scale=5.0)"
    config.model.position = "row_tables"
    config.data = image_options("stripes", 8, source="stripes", num_validation=10)
    config.update(num_steps=3, batch_size=20, num_devices=1, progress=False)
    return config
"""

MODEL = """    config.model = ConfigDict({"name": "tokens", "dim": 6})
"""


@pytest.fixture
def package(tmp_path, monkeypatch, registries):
    """The current folder has a package of four files and a configuration."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "mine").mkdir()
    for name, text in FILES.items():
        (tmp_path / "mine" / f"{name}.py").write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
        del sys.modules[name]


def train(*names, override=()):
    imports = (f"--import=mine.{name}" for name in names)
    cli.train(["--config=./config.py", "--workdir=run", *imports, *override])


@pytest.mark.slow
def test_each_is_one_file_and_a_run_with_all_loads(package):
    train(*FILES)
    run = load_run("run")
    assert (run.step, run.config.data.source) == (3, "stripes")
    assert registry.ATTENTIONS["cosine"].__module__ == "mine.attention"
    params = run.variables["params"]
    assert params["position"]["rows"].shape == (4, 1, 8)
    images = np.zeros((5, 8, 8, 1), np.float32)
    assert jax.jit(run.model.apply)(run.variables, images).shape == (5, 2)
    row = read_rows(package / "run" / "metrics.jsonl")[-1]
    assert row["validation_error_rate"] == pytest.approx(1 - row["validation_accuracy"])
    page = report(run, data=load.LOADERS["stripes"](run.config.data))
    assert (
        f"<td>validation error rate</td><td>{row['validation_error_rate']:.1%}" in page
    )


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["pmap", "mesh"])
def test_a_model_is_trained_loaded_and_saved(package, parallel):
    before, after = CONFIG.index("    config.model"), CONFIG.index("    config.data")
    (package / "config.py").write_text(CONFIG[:before] + MODEL + CONFIG[after:])
    override = [f"--config.parallel={parallel}", "--config.model.dtype=bfloat16"]
    train("model", "data", override=override)
    run = load_run("run")
    options = {"name": "tokens", "dim": 6, "dtype": "bfloat16"}
    assert run.config.model.to_dict() == options
    assert "BatchNorm_0" in run.variables["batch_stats"]
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
    probabilities = run.predict(images).probabilities
    run.save_pretrained("saved")
    saved = relattn.load_pretrained("saved")
    inputs = saved.preprocess(images)
    logits = jnp.asarray(saved.model.apply(saved.variables, inputs))
    np.testing.assert_allclose(jax.nn.softmax(logits), probabilities, atol=2e-3)
    with pytest.raises(ValueError, match="of Tokens, which is not a model .* cannot"):
        load_run("run", image_size=16)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("attention", "unknown attention 'cosine'"),
        ("position", "unknown position 'row_tables'"),
        ("data", "unknown data.source 'stripes'"),
    ],
)
def test_without_its_file_the_name_is_unknown(package, capsys, missing, said):
    with pytest.raises(SystemExit, match="2"):
        train(*(name for name in FILES if name != missing))
    assert re.search(said, capsys.readouterr().err)


def model_of(logits=jnp.asarray, **members):
    """A class of a model of images; ``logits`` maps images to what it returns."""

    def call(self, images, *, deterministic=True):
        return logits(images)

    defaults = {"inputs": "images", "__call__": call}
    fields = {"__annotations__": {"num_classes": int}}
    return type("Mine", (nn.Module,), defaults | fields | members)


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("vit", model_of(), "'vit' cannot be registered: choose a Python identifier"),
        ("my net", model_of(), "'my net' cannot be registered: choose a Python ident"),
        ("mine", model_of(inputs="image"), "inputs, one of 'images', .* got 'image'"),
        (
            "mine",
            model_of(inputs=None),
            "needs the class attribute inputs, one of",
        ),
        (
            "mine",
            model_of(__annotations__={}),
            "needs the field num_classes, which",
        ),
        ("mine", model_of(inputs="tokens"), "Mine needs the field vocab_size, which"),
        ("mine", model_of(inputs="points"), "Mine needs the field num_axes, which the"),
        ("mine", model_of(__call__=lambda self, x: x), "needs the argument determinis"),
    ],
)
def test_a_model_without_a_part_is_not_registered(name, module, message):
    with pytest.raises(ValueError, match=message):
        relattn.register_model(name, module)
    assert models.MODELS.get(name) is not module


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("logits", "got"),
    [
        (
            lambda images: jnp.zeros((len(images), 1, 3)),
            r"float32 of shape \(1, 1, 3\)",
        ),
        (lambda images: jnp.zeros((len(images), 4)), r"float32 of shape \(1, 4\)"),
        (lambda images: jnp.zeros((len(images), 3), jnp.int32), r"int32 of shape"),
        (lambda images: (images, 2), "tuple"),
    ],
)
def test_a_model_that_returns_no_logits_is_not_built(logits, got):
    relattn.register_model("mine", model_of(logits))
    with pytest.raises(ValueError, match=f"logits, floats of shape .*, got {got}"):
        models.build_model({"name": "mine"}, num_classes=3, image_shape=(5, 7, 1))
