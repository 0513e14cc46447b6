"""Logits of converted models equal PyTorch's, at the sizes that people use."""

import inspect
import json
import re

import numpy as np
import pytest
from PIL import Image

import relattn
from relattn.convert import convert
from relattn.models import source_configs, source_keys
from relattn.models.safetensors import read_safetensors

torch = pytest.importorskip("torch")

from tests.helpers.quick import quick_jit  # noqa: E402
from tools import pretrained  # noqa: E402

BOUND = 1e-4
LLAMA3 = {"rope_type": "llama3", "factor": 3.0, "original_max_position_embeddings": 8}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 50.0}
pytestmark = pytest.mark.slow


def check_folder(source, path, inputs, expected):
    """Converts a checkpoint, and compares logits."""
    convert(source, path, path.parent / "converted")
    loaded = relattn.load_pretrained(path.parent / "converted")
    logits = np.asarray(quick_jit(loaded.model.apply)(loaded.variables, inputs))
    assert np.abs(logits - expected).max() < BOUND * np.abs(expected).max()


def check(source, model, inputs, expected, folder, **settings):
    """Converts the PyTorch file of a model, and compares logits."""
    torch.save(model.state_dict(), folder / "checkpoint.pt")
    (folder / "config.json").write_text(json.dumps(settings))
    check_folder(source, folder / "checkpoint.pt", inputs, expected)


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
    check_folder("hf_vit", tmp_path / "model.safetensors", images, expected)


def save_timm(model, folder):
    """Saves a model of timm as for the hub; returns the file of its weights."""
    from timm.models import save_for_hf

    save_for_hf(model, folder, safe_serialization=True)
    return folder / "model.safetensors"


def check_timm(model, scale, size, folder):
    """Converts a model of timm with random weights, and compares logits."""
    pretrained.randomize(model, scale)
    images = pretrained.draw_images(*size)
    expected = pretrained.image_logits(model, images)
    check_folder("timm", save_timm(model, folder), images, expected)


def test_heads_of_timms_architectures():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        for name, sizes in source_configs.TIMM_ARCHITECTURES.items():
            model = timm.create_model(name, depth=1)
            assert (model.embed_dim, model.blocks[0].attn.num_heads) == sizes
            found = source_configs.timm_settings({"architecture": name})
            assert model.global_pool == found.get("global_pool", "token")
            include = found.get("pool_include_prefix", False)
            assert model.pool_include_prefix == include
            assert model.blocks[0].norm1.eps == found["layer_norm_eps"]
            last = (model.norm, model.fc_norm)
            has_norm = any(isinstance(part, torch.nn.LayerNorm) for part in last)
            assert has_norm == found.get("final_norm", True)
            act = model.blocks[0].mlp.act
            kind = type(act).__name__
            if kind == "GELU":
                kind = "GELUTanh" if act.approximate == "tanh" else kind
            kinds = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
            kinds["SiLU"] = "silu"
            assert kinds[kind] == found["act_layer"]


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
        "vit_small_patch14_reg4_dinov2",
        "vit_giant_patch14_reg4_dinov2",
        "vit_wee_patch16_reg1_gap_256",
        "vit_so150m_patch16_reg4_map_256",
        "vit_base_patch16_siglip_224",
        "vit_base_patch32_siglip_gap_256",
        "vit_xsmall_patch16_clip_224",
        "vit_base_patch16_clip_quickgelu_224",
        "vit_intern300m_patch14_448",
        "test_vit3",
    ],
)
@pytest.mark.parametrize("num_classes", [0, 5])
def test_timms_architectures(name, num_classes, tmp_path):
    timm = pytest.importorskip("timm")
    if num_classes == 0 and not re.search("reg4_dinov2|siglip_224|reg1_gap", name):
        pytest.skip("another model tests backbones without a head")
    sizes = {"embed_dim": 48, "num_heads": 3} if "giant" in name else {}
    model = timm.create_model(
        name, depth=2, img_size=(56, 112), patch_size=14, num_classes=5, **sizes
    )
    model.reset_classifier(num_classes)
    check_timm(model, 0.05, (56, 112), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"global_pool": "avg"},
        {"global_pool": "avg", "fc_norm": False},
        {"global_pool": "avg", "pool_include_prefix": True, "reg_tokens": 2},
        {"class_token": False, "global_pool": "map", "fc_norm": True},
        {"class_token": False, "global_pool": "avg", "reg_tokens": 2},
        {"act_layer": "gelu_tanh"},
        {"pre_norm": True, "reg_tokens": 2},
        {"final_norm": False},
    ],
)
def test_options_of_timm(options, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "test_vit", depth=2, img_size=(32, 48), num_classes=5, **options
    )
    check_timm(model, 0.2, (32, 48), tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"class_token": False, "global_pool": "max", "fc_norm": False},
        {"norm_layer": "rmsnorm"},
        {"qk_norm": True},
        {"proj_bias": False},
        {"pos_embed": "none"},
        {"scale_attn_norm": True},
    ],
)
def test_other_models_of_timm_are_refused(options, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit", depth=1, img_size=32, **options)
    with pytest.raises(ValueError, match="|".join(options)):
        convert("timm", save_timm(model, tmp_path), tmp_path / "out")


PHOTO = np.random.default_rng(3).integers(0, 256, (61, 83, 3)).astype(np.uint8)


@pytest.mark.parametrize(
    "cfg",
    [
        {"crop_pct": 0.875, "interpolation": "bicubic"},
        {"crop_pct": 0.9, "interpolation": "bilinear", "crop_mode": "squash"},
        {"crop_pct": 1.0, "interpolation": "bicubic"},
    ],
)
def test_images_are_prepared_as_by_timm(cfg, tmp_path):
    timm = pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    from timm.data import create_transform, resolve_data_config

    statistics = {"mean": (0.48, 0.45, 0.4), "std": (0.26, 0.25, 0.27)}
    cfg = {**cfg, **statistics, "input_size": (3, 32, 32)}
    model = timm.create_model(
        "test_vit", depth=1, img_size=32, pretrained_cfg_overlay=cfg
    )
    convert("timm", save_timm(model, tmp_path), tmp_path / "converted")
    loaded = relattn.load_pretrained(tmp_path / "converted")
    image = Image.fromarray(PHOTO)
    transform = create_transform(**resolve_data_config(model=model))
    expected = transform(image).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(loaded.preprocess(image)[0], expected, atol=1e-5)


@pytest.mark.parametrize(
    "source, model, processor, options",
    [
        ("hf_clip", "CLIPVisionModel", "CLIPImageProcessorPil", {"crop_size": 6}),
        ("hf_siglip", "SiglipVisionModel", "SiglipImageProcessorPil", {}),
        ("hf_vit", "ViTModel", "ViTImageProcessorPil", {}),
    ],
)
def test_images_are_prepared_as_by_transformers(
    source, model, processor, options, tmp_path
):
    transformers = pytest.importorskip("transformers")
    pretrained.write_hf_encoder(
        tmp_path, model, "last_hidden_state", intermediate_size=16
    )
    # The crop leaves 3 of 9 pixels.
    size = {"shortest_edge": 9} if options else {"height": 6, "width": 6}
    processor = getattr(transformers, processor)(size=size, **options)
    processor.save_pretrained(tmp_path)
    convert(source, tmp_path / "model.safetensors", tmp_path / "converted")
    loaded = relattn.load_pretrained(tmp_path / "converted")
    image = Image.fromarray(PHOTO)
    expected = processor(image, return_tensors="np")["pixel_values"][0]
    found = loaded.preprocess(image)[0]
    np.testing.assert_allclose(found, expected.transpose(1, 2, 0), atol=1e-5)


def test_features_equal_timms(tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model(
        "vit_small_patch14_reg4_dinov2", depth=3, img_size=(28, 56), num_classes=0
    )
    pretrained.randomize(model, 0.05)
    images = pretrained.draw_images(28, 56)
    convert("timm", save_timm(model, tmp_path), tmp_path / "converted")
    loaded = relattn.load_pretrained(tmp_path / "converted")
    found = loaded.features(images, layers=(0, 2))
    with torch.no_grad():
        x, tokens = model.forward_intermediates(
            torch.from_numpy(images).permute(0, 3, 1, 2),
            indices=[0, 2],
            norm=True,
            output_fmt="NLC",
            return_prefix_tokens=True,
        )
        pooled = model.forward_head(x)
    for ours, (patches, prefix) in zip(found.tokens, tokens, strict=True):
        theirs = torch.cat([prefix, patches], 1).numpy()
        assert np.abs(ours - theirs).max() < BOUND * np.abs(theirs).max()
    for ours, theirs in (
        (found.pooled, pooled),
        (found.cls, x[:, 0]),
        (found.mean, x[:, 5:].mean(1)),
    ):
        theirs = theirs.numpy()
        assert np.abs(ours - theirs).max() < BOUND * np.abs(theirs).max()


@pytest.mark.parametrize(
    "source, name, output, sizes",
    [
        ("hf_vit", "ViTModel", "last_hidden_state", {"intermediate_size": 16}),
        ("hf_dinov2", "Dinov2Model", "pooler_output", {"mlp_ratio": 2}),
        (
            "hf_dinov2",
            "Dinov2ForImageClassification",
            "logits",
            {"mlp_ratio": 2, "use_swiglu_ffn": True, "num_labels": 5},
        ),
        (
            "hf_dinov2",
            "Dinov2WithRegistersModel",
            "pooler_output",
            {"mlp_ratio": 2, "use_swiglu_ffn": True},
        ),
        ("hf_clip", "CLIPVisionModel", "pooler_output", {"hidden_act": "gelu"}),
        ("hf_clip", "CLIPForImageClassification", "logits", {}),
        ("hf_siglip", "SiglipForImageClassification", "logits", {}),
        ("hf_siglip", "SiglipVisionModel", "pooler_output", {"hidden_act": "gelu"}),
    ],
)
def test_image_encoders_of_transformers(source, name, output, sizes, tmp_path):
    pytest.importorskip("transformers")
    pretrained.write_hf_encoder(tmp_path, name, output, **sizes)
    expected = read_safetensors(tmp_path / "expected.safetensors")
    path, images = tmp_path / "model.safetensors", expected["inputs"]
    check_folder(source, path, images, expected["logits"])


@pytest.mark.parametrize("size", [(4, 6), (10, 8)])
@pytest.mark.parametrize(
    "source, name, output",
    [
        ("hf_dinov2", "Dinov2Model", "pooler_output"),
        ("hf_dinov2", "Dinov2WithRegistersModel", "pooler_output"),
        ("hf_vit", "ViTModel", "last_hidden_state"),
        ("hf_siglip", "SiglipVisionModel", "pooler_output"),
        ("hf_clip", "CLIPVisionModel", "pooler_output"),
    ],
)
def test_positions_interpolate_as_in_transformers(source, name, output, size, tmp_path):
    transformers = pytest.importorskip("transformers")
    options = {} if "Dinov2" in name else {"intermediate_size": 17}
    pretrained.write_hf_encoder(tmp_path, name, output, image_size=6, **options)
    model = getattr(transformers, name).from_pretrained(tmp_path).eval()
    images = pretrained.draw_images(*size)
    # DINOv2 always interpolates.
    asked = {} if "Dinov2" in name else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        out = model(torch.from_numpy(images).permute(0, 3, 1, 2), **asked)
    expected = getattr(out, output).numpy()
    expected = expected[:, 0] if expected.ndim == 3 else expected
    convert(source, tmp_path / "model.safetensors", tmp_path / "converted")
    loaded = relattn.load_pretrained(tmp_path / "converted", image_size=size)
    found = np.asarray(quick_jit(loaded.model.apply)(loaded.variables, images))
    assert np.abs(found - expected).max() < BOUND * np.abs(expected).max()


def test_swiglu_in_memory_is_read(tmp_path):
    """State dicts have gate_proj and up_proj, files the two together."""
    pytest.importorskip("transformers")
    from transformers import Dinov2Config, Dinov2Model

    model = pretrained.randomize(
        Dinov2Model(
            Dinov2Config(
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=3,
                image_size=6,
                patch_size=2,
                use_swiglu_ffn=True,
            )
        )
    )
    images = pretrained.draw_images(6, 6)
    with torch.no_grad():
        inputs = torch.from_numpy(images).permute(0, 3, 1, 2)
        expected = model(inputs).pooler_output.numpy()
    check("hf_dinov2", model, images, expected, tmp_path, num_attention_heads=3)


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


@pytest.mark.parametrize(
    "name, options",
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
        ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
        ("Llama", {"rope_parameters": LLAMA3}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
        ("Qwen2", {"max_window_layers": 1}),
        ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
        ("Mistral", {"sliding_window": 3}),
    ],
)
def test_decoders_of_transformers(name, options, tmp_path):
    pytest.importorskip("transformers")
    model = pretrained.hf_llama_model(name, **options)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    tokens = np.random.default_rng(0).integers(23, size=(2, 9)).astype(np.int32)
    expected = pretrained.text_logits(model, tokens)
    path = tmp_path / "model.safetensors.index.json"
    check_folder("hf_llama", path, tokens, expected)


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
        (transformers.ViTConfig(), source_keys.HF_VIT),
        (transformers.ViTMAEConfig(), source_keys.HF_VIT),
        (transformers.Dinov2Config(), source_keys.HF_DINOV2),
        (transformers.Dinov2WithRegistersConfig(), source_keys.HF_DINOV2),
        (transformers.CLIPVisionConfig(), source_keys.HF_CLIP),
        (transformers.SiglipVisionConfig(), source_keys.HF_SIGLIP),
        (transformers.GPT2Config(), source_keys.HF_GPT2),
        (transformers.LlamaConfig(), source_keys.HF_LLAMA),
        (transformers.MistralConfig(), source_keys.HF_LLAMA),
        (transformers.Qwen2Config(), source_keys.HF_LLAMA),
    ):
        known = {*keys.read, *keys.fixed, *keys.harmless, "rope_parameters"}
        assert not {*config.to_dict(), *generation} - known


VISION = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
VISION |= {"image_size": 6, "patch_size": 2}
SMALL = {
    "ViTForImageClassification": ("hf_vit", "logits", {"intermediate_size": 17}),
    "Dinov2WithRegistersForImageClassification": (
        "hf_dinov2",
        "logits",
        {"mlp_ratio": 2, "num_register_tokens": 2},
    ),
    "CLIPVisionModel": ("hf_clip", "pooler_output", {"intermediate_size": 14}),
    "SiglipVisionModel": ("hf_siglip", "pooler_output", {"intermediate_size": 14}),
    "GPT2LMHeadModel": ("hf_gpt2", "", {}),
    "LlamaForCausalLM": ("hf_llama", "", {}),
    "MistralForCausalLM": ("hf_llama", "", {"sliding_window": 3}),
    "Qwen2ForCausalLM": ("hf_llama", "", {}),
}
ACTIVATIONS = (
    *("gelu", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh"),
    *("gelu_python", "gelu_10", "quick_gelu", "relu", "relu2", "silu", "swish"),
    *("mish", "tanh", "linear", "laplace", "leaky_relu", "sigmoid"),
)
ROPES = (
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 50.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0},
    {**LLAMA3, "factor": 2.0},
    {**LLAMA3, "high_freq_factor": 2.0},
)


def other_values(key, value):
    """Values of a key that are not its default."""
    if key in ("hidden_act", "activation_function"):
        return [name for name in ACTIVATIONS if name != value]
    if key == "rope_parameters":
        return ROPES
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 2]
    return [3 * value + 0.01] if isinstance(value, float) else []


def write_small(folder, name, output, options):
    """Writes a small model of transformers; returns inputs and expected outputs."""
    if output:
        pretrained.write_hf_encoder(folder, name, output, **{**VISION, **options})
        expected = read_safetensors(folder / "expected.safetensors")
        return expected["inputs"], expected["logits"]
    if name.startswith("GPT2"):
        sizes = {"vocab_size": 23, "n_positions": 11, "n_embd": 12, "n_layer": 2}
        model = pretrained.hf_gpt2_model(**{**sizes, "n_head": 3, **options})
    else:
        model = pretrained.hf_llama_model(name.removesuffix("ForCausalLM"), **options)
    model.save_pretrained(folder)
    tokens = np.random.default_rng(0).integers(23, size=(2, 7)).astype(np.int32)
    return tokens, pretrained.text_logits(model, tokens)


@pytest.mark.parametrize("name", SMALL)
def test_no_key_of_transformers_is_ignored(name, tmp_path):
    """Each is applied, does not change the logits, or is refused."""
    transformers = pytest.importorskip("transformers")
    source, output, sizes = SMALL[name]
    keys = getattr(transformers, name).config_class().to_dict()
    common = {*transformers.PreTrainedConfig().to_dict()} - {"tie_word_embeddings"}
    equal, refused = set(), set()
    for key in sorted({*keys} - common - {"bos_token_id", "eos_token_id"}):
        for count, value in enumerate(other_values(key, sizes.get(key, keys[key]))):
            folder = tmp_path / f"{key}{count}"
            folder.mkdir()
            try:
                inputs, expected = write_small(
                    folder, name, output, {**sizes, key: value}
                )
            except Exception:  # noqa: BLE001, S112 - of transformers: no such model.
                continue
            try:
                check_folder(source, folder / "model.safetensors", inputs, expected)
                equal.add((key, str(value)))
            except ValueError:
                refused.add((key, str(value)))
    assert len(equal) > 8
    kinds = {value for key, value in equal | refused if key.endswith(("_act", "ion"))}
    assert {*ACTIVATIONS} - kinds <= {keys.get("hidden_act", "gelu_new")}


def test_every_key_of_timm_is_known():
    """Tests pretrained_cfg, and the arguments of VisionTransformer."""
    timm = pytest.importorskip("timm")
    from timm.models import PretrainedCfg

    keys = source_keys.TIMM
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
