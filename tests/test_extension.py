"""An attention, a position, data and a metric of a user: a file each, and no other."""

import re
import sys

import jax
import numpy as np
import pytest

from relattn import cli
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


def train(*names):
    cli.train(
        [
            "--config=./config.py",
            "--workdir=run",
            *(f"--import=mine.{name}" for name in names),
        ]
    )


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
