"""timm and transformers load what is exported, with the outputs of our model."""

import json

import numpy as np
import pytest

from relattn.models.safetensors import write_safetensors
from relattn.models.targets import to_library
from tests.helpers.quick import quick_jit
from tests.models.test_targets import GPT, VIT, make, read

torch = pytest.importorskip("torch")

BOUND = 1e-4
pytestmark = pytest.mark.slow


def write(folder, library, model, config, variables):
    """Writes the files of a library, and returns inputs and our outputs."""
    files = to_library(library, model, config, variables)
    write_safetensors(folder / "model.safetensors", files.tensors)
    (folder / "config.json").write_text(json.dumps(files.config))
    rng = np.random.default_rng(0)
    if model.inputs == "images":
        inputs = rng.normal(size=(2, *config["image_shape"])).astype(np.float32)
        theirs = torch.from_numpy(inputs).permute(0, 3, 1, 2)
    else:
        inputs = rng.integers(config["vocab_size"], size=(2, 5), dtype=np.int32)
        theirs = torch.from_numpy(inputs).long()
    return theirs, np.asarray(quick_jit(model.apply)(variables, inputs))


def assert_close(found, expected):
    found = found.detach().numpy()
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < BOUND * np.abs(expected).max()


def of_checkpoint(name):
    _, _, converted, model, variables = read(name)
    return model, converted.config, variables


def check_timm(folder, model, config, variables):
    timm = pytest.importorskip("timm")
    inputs, expected = write(folder, "timm", model, config, variables)
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert_close(theirs(inputs), expected)


@pytest.mark.parametrize("name", ["timm", "timm_registers", "hf_siglip", "hf_clip"])
def test_timm_loads_checkpoints(name, tmp_path):
    check_timm(tmp_path, *of_checkpoint(name))


@pytest.mark.parametrize(
    "options",
    [
        {"norm_eps": 1e-6, "mlp_dim": 11, "qkv_bias": True},
        {"pool": "mean", "class_token": True, "fc_norm": True, "num_registers": 2},
        {"pool": "mean", "pool_prefix": True, "class_token": True},
        {"pool": "attention", "activation": "gelu_tanh", "patch_size": [4, 2]},
        {"final_norm": False, "activation": "quick_gelu"},
        {"norm_eps": 1e-6, "activation": "swiglu", "mlp_dim": 7},
    ],
)
def test_timm_loads_options(options, tmp_path):
    check_timm(tmp_path, *make(VIT, **options))


def check_hf(folder, model, config, variables):
    transformers = pytest.importorskip("transformers")
    inputs, expected = write(folder, "hf", model, config, variables)
    written = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, written["architectures"][0])
    theirs, loading = kind.from_pretrained(folder, output_loading_info=True)
    # ViTModel has a pooler, which nothing reads here.
    missing = {name for name in loading["missing_keys"] if "pooler" not in name}
    assert not missing
    assert not loading["unexpected_keys"]
    assert_close(pooled(theirs.eval()(inputs), model), expected)


def pooled(out, model):
    """Returns what our model returns of the outputs of one of transformers."""
    for name in ("logits", "image_embeds"):
        if out.get(name) is not None:
            return out[name]
    # The pooler of ViTModel computes more than ours.
    if model.pool == "attention":
        return out.pooler_output
    if model.pool == "mean":
        return out.last_hidden_state.mean(1)
    return out.pooler_output if model.pre_norm else out.last_hidden_state[:, 0]


@pytest.mark.parametrize(
    "name",
    ["hf_vit", "hf_vit_mae", "hf_dinov2", "hf_clip", "hf_siglip", "hf_gpt2", "timm"],
)
def test_transformers_loads_checkpoints(name, tmp_path):
    check_hf(tmp_path, *of_checkpoint(name))


def without_biases(variables, *names):
    """Sets biases to zero, which the other library's model does not have."""
    params = dict(variables["params"])
    for name in names:
        params[name] = {**params[name], "bias": np.zeros_like(params[name]["bias"])}
    return {**variables, "params": params}


@pytest.mark.parametrize(
    "config, options",
    [
        (VIT, {"activation": "gelu_tanh", "qkv_bias": False, "patch_size": [4, 2]}),
        (VIT, {"activation": "swiglu", "mlp_dim": 16, "pool": "cls_mean"}),
        ({**VIT, "num_classes": 0}, {"num_registers": 2, "activation": "gelu"}),
        (VIT, {"pool": "mean", "qkv_bias": True, "norm_eps": 1e-3}),
        (
            {**VIT, "num_classes": 0},
            {"pool": "attention", "qkv_bias": True, "activation": "gelu_tanh"},
        ),
        (GPT, {"tie_head": True}),
        (GPT, {"activation": "gelu_tanh", "mlp_dim": 11, "norm_eps": 1e-3}),
    ],
)
def test_transformers_loads_options(config, options, tmp_path):
    check_hf(tmp_path, *make(config, **options))


@pytest.mark.parametrize(
    "size, options, zero",
    [
        (3, {}, ("embedding", "head")),
        (0, {"activation": "quick_gelu"}, ("embedding",)),
        (3, {"pool": "mean", "class_token": True, "final_norm": False}, ("embedding",)),
    ],
)
def test_transformers_loads_clip(size, options, zero, tmp_path):
    config = {**VIT, "num_classes": size}
    model, config, variables = make(config, pre_norm=True, qkv_bias=True, **options)
    check_hf(tmp_path, model, config, without_biases(variables, *zero))
