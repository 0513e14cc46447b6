"""Logits of converted models equal PyTorch's, at the sizes that people use."""

import inspect
import json

import jax.numpy as jnp
import numpy as np
import pytest

import relattn
from relattn.convert import convert
from relattn.models import source_configs

torch = pytest.importorskip("torch")

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
    settings = {"architecture": "vit_base_patch16_224"}
    check("timm", model, images, expected, tmp_path, **settings)


def test_hf_gpt2_small(tmp_path):
    pytest.importorskip("transformers")
    model = pretrained.hf_gpt2_model(scale=0.02)
    tokens = np.random.default_rng(0).integers(50257, size=(1, 61)).astype(np.int32)
    expected = pretrained.text_logits(model, tokens)
    check("hf_gpt2", model, tokens, expected, tmp_path, n_head=12)


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


def check_folder(source, path, inputs, expected):
    """Converts a checkpoint, and compares logits."""
    convert(source, path, path.parent / "converted")
    loaded = relattn.load_pretrained(path.parent / "converted")
    logits = np.asarray(loaded.model.apply(loaded.variables, jnp.asarray(inputs)))
    assert np.abs(logits - expected).max() < BOUND * np.abs(expected).max()


def save_timm(model, folder):
    """Saves a model of timm as for the hub; returns the file of its weights."""
    from timm.models import save_for_hf

    save_for_hf(model, folder, safe_serialization=True)
    return folder / "model.safetensors"


def test_heads_of_timms_architectures():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        for name, sizes in source_configs.TIMM_ARCHITECTURES.items():
            model = timm.create_model(name, depth=1)
            assert (model.embed_dim, model.blocks[0].attn.num_heads) == sizes
            assert model.global_pool == ("avg" if "_gap_" in name else "token")


@pytest.mark.parametrize(
    "name",
    [
        "test_vit",
        "deit_tiny_patch16_224",
        "deit3_small_patch16_224",
        "flexivit_small",
        "vit_small_patch14_dinov2",
        "vit_base_patch16_224_miil",
        "vit_base_patch16_gap_224",
        "vit_base_patch16_siglip_gap_224",
        "vit_medium_patch16_gap_240",
        "vit_huge_patch14_224",
    ],
)
def test_timms_architectures(name, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, depth=2, img_size=(56, 112), patch_size=14)
    # Without a head, some models have num_classes=0.
    model.reset_classifier(5)
    pretrained.randomize(model, 0.05)
    images = pretrained.draw_images(56, 112)
    expected = pretrained.image_logits(model, images)
    check_folder("timm", save_timm(model, tmp_path), images, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"class_token": False, "global_pool": "avg"},
        {"class_token": False, "global_pool": "max", "fc_norm": False},
        {"class_token": False, "global_pool": "map"},
        {"act_layer": "gelu_tanh"},
        {"norm_layer": "rmsnorm"},
        {"qk_norm": True},
        {"reg_tokens": 2},
        {"pre_norm": True},
        {"final_norm": False},
        {"proj_bias": False},
        {"pos_embed": "none"},
        {"scale_attn_norm": True},
        {"num_classes": 0},
    ],
)
def test_other_models_of_timm_are_refused(options, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", depth=1, img_size=32, **options)
    with pytest.raises(ValueError, match="|".join([*options, "head.weight"])):
        convert("timm", save_timm(model, tmp_path), tmp_path / "out")


@pytest.mark.parametrize(
    "options",
    [
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
        {"tie_word_embeddings": False, "n_inner": 17},
        {"activation_function": "gelu", "layer_norm_epsilon": 0.1},
        {"activation_function": "gelu_fast", "reorder_and_upcast_attn": True},
    ],
)
def test_settings_of_gpt2(options, tmp_path):
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 23, "n_positions": 11, "n_embd": 15, "n_layer": 3}
    model = pretrained.hf_gpt2_model(**sizes, n_head=3, **options)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(23, size=(2, 7)).astype(np.int32)
    expected = pretrained.text_logits(model, tokens)
    check_folder("hf_gpt2", tmp_path / "model.safetensors", tokens, expected)


@pytest.mark.parametrize("state", ["", "state_dict", "model", "model_ema"])
@pytest.mark.parametrize("prefix", ["", "module._orig_mod.", "model.backbone."])
def test_states_of_pytorch(state, prefix, tmp_path):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 15, "num_attention_heads": 3, "intermediate_size": 17}
    sizes |= {"num_hidden_layers": 2, "image_size": 6, "patch_size": 2}
    model = pretrained.hf_vit_model(qkv_bias=False, num_labels=5, **sizes)
    model.save_pretrained(tmp_path)
    tensors = {prefix + name: x for name, x in model.state_dict().items()}
    content = {state: tensors, "epoch": 3} if state else tensors
    torch.save(content, tmp_path / "model.pt")
    images = pretrained.draw_images(6, 6)
    expected = pretrained.image_logits(model, images)
    check_folder("hf_vit", tmp_path / "model.pt", images, expected)


def test_file_of_two_models_is_refused(tmp_path):
    state = {"a": torch.ones(2)}
    torch.save({"model": state, "model_ema": state}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="more than one model, model and model_ema"):
        convert("timm", tmp_path / "model.pt", tmp_path / "out")


# PyTorch's own warning.
@pytest.mark.filterwarnings("ignore:.*Sparse")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (torch.Tensor.to_sparse, "as a sparse or nested tensor"),
        (lambda x: x.to("meta"), "without its values"),
    ],
)
def test_tensors_without_their_values_are_refused(change, problem, tmp_path):
    torch.save({"a": torch.ones(2), "b": change(torch.eye(2))}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=f"holds 'b' {problem}: save it as a dense"):
        convert("timm", tmp_path / "model.pt", tmp_path / "out")


def test_every_key_of_transformers_is_known():
    """Tests the keys that transformers writes, and those of generation."""
    transformers = pytest.importorskip("transformers")
    generation = transformers.GenerationConfig().to_dict()
    for config, keys in (
        (transformers.ViTConfig(), source_configs.HF_VIT),
        (transformers.GPT2Config(), source_configs.HF_GPT2),
    ):
        known = {*keys.read, *keys.fixed, *keys.harmless}
        assert not {*config.to_dict(), *generation} - known


def test_every_key_of_timm_is_known():
    """Tests pretrained_cfg, and the arguments of VisionTransformer."""
    timm = pytest.importorskip("timm")
    from timm.models import PretrainedCfg

    keys = source_configs.TIMM
    known = {*keys.read, *keys.fixed, *keys.harmless}
    arguments = inspect.signature(timm.models.VisionTransformer).parameters
    assert {name for name in arguments if name not in known} == {
        "embed_layer",
        "embed_norm_layer",
        "block_fn",
        "mlp_layer",
        "attn_layer",
    }
    assert not set(PretrainedCfg().to_dict(remove_null=False)) - known - {"state_dict"}
