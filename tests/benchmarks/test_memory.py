"""Memory per device of a mesh, without allocating arrays."""

import jax
import pytest
from ml_collections import ConfigDict

from benchmarks import memory
from benchmarks.memory import describe_data, measure, read_mesh
from relattn.training import default_config
from relattn.training.mesh import MeshParallel
from relattn.training.task import Task


@pytest.fixture
def config():
    config = default_config()
    config.model = ConfigDict(
        {
            "name": "vit",
            "attention": "translution",
            "dim": 16,
            "num_layers": 2,
            "num_heads": 2,
            "mlp_dim": 12,
            "patch_size": 4,
        }
    )
    config.data = ConfigDict({"name": "photographs", "image_size": 8})
    config.batch_size = 8
    return config


@pytest.mark.slow
def test_mesh_splits_the_state(config):
    task = Task.build(config, describe_data(config, num_classes=4, vocab_size=0))
    alone, shared = (
        measure(task, MeshParallel(jax.local_devices()[:n], model_axis=n))
        for n in (1, 4)
    )
    leaves = jax.tree.leaves(task.abstract_state)
    assert alone["state"] == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    # All except norms, biases and the class token is split.
    assert alone["state"] / 4 < shared["state"] < alone["state"] / 3.5
    for sizes in (alone, shared):
        assert 0 < sizes["batch"] < 10_000 and sizes["temporary"] > 0
        assert sizes["total"] == sum(
            sizes[kind] for kind in ("state", "batch", "temporary")
        )
    assert shared["total"] < alone["total"]


def test_text_data_has_the_context_length(config):
    config.model.name = "gpt"
    config.data = ConfigDict({"context_length": 7})
    info = describe_data(config, num_classes=0, vocab_size=11)
    assert (info.context_length, info.vocab_size) == (7, 11)


def test_points_have_no_image_size(config):
    config.data = ConfigDict({"name": "points"})
    with pytest.raises(ValueError, match="image_size is missing: only the memory of"):
        describe_data(config, num_classes=2, vocab_size=0)


@pytest.mark.parametrize("text", ["2", "2x", "0x4", "2x4x8", "-1x2", "axb"])
def test_invalid_meshes_are_rejected(text):
    with pytest.raises(ValueError, match=f"--meshes={text}: pass DATAxMODEL"):
        read_mesh(text)


def test_all_meshes_are_checked_before_one_compiles(monkeypatch, capsys):
    # The tests have devices already.
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(memory, "measure", lambda *_: pytest.fail("compiles"))
    with pytest.raises(SystemExit, match="2"):
        memory.main(["--config=configs/translution_vit.py:smoke", "--meshes=1x1,3x1"])
    assert "config.batch_size=32 is not divisible by" in capsys.readouterr().err
