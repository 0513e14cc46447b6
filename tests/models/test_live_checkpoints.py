"""Logits of converted models equal PyTorch's, at the sizes that people use."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import relattn
from relattn.convert import convert

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from tools import pretrained  # noqa: E402

BOUND = 1e-4
pytestmark = pytest.mark.slow


def check(source, model, inputs, expected, folder, **settings):
    """Converts the PyTorch file of a model, and compares logits."""
    folder.mkdir(exist_ok=True)
    torch.save(model.state_dict(), folder / "checkpoint.pt")
    (folder / "config.json").write_text(json.dumps(settings))
    convert(source, folder / "checkpoint.pt", folder / "converted")
    loaded = relattn.load_pretrained(folder / "converted")
    logits = np.asarray(loaded.model.apply(loaded.variables, jnp.asarray(inputs)))
    assert np.abs(logits - expected).max() < BOUND * np.abs(expected).max()


def test_timm_vit_b16(tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_base_patch16_224").eval()
    images = pretrained.draw_images(224, 224)
    expected = pretrained.image_logits(model, images)
    check("timm", model, images, expected, tmp_path)


def test_hf_gpt2_small(tmp_path):
    pytest.importorskip("transformers")
    model = pretrained.hf_gpt2_model(scale=0.02)
    tokens = np.random.default_rng(0).integers(50257, size=(1, 61)).astype(np.int32)
    expected = pretrained.text_logits(model, tokens)
    check("hf_gpt2", model, tokens, expected, tmp_path)


def test_hf_vit_b16(tmp_path):
    pytest.importorskip("transformers")
    model = pretrained.hf_vit_model(scale=0.02)
    model.save_pretrained(tmp_path)
    images = pretrained.draw_images(224, 224)
    expected = pretrained.image_logits(model, images)
    convert("hf_vit", tmp_path / "model.safetensors", tmp_path / "converted")
    loaded = relattn.load_pretrained(tmp_path / "converted")
    logits = np.asarray(loaded.model.apply(loaded.variables, jnp.asarray(images)))
    assert np.abs(logits - expected).max() < BOUND * np.abs(expected).max()
