"""Conversion: what config.json says is done, or refused by its name."""

import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import relattn
from relattn.convert import SOURCES, convert, read_checkpoint
from relattn.models import source_configs, source_keys
from relattn.models.safetensors import read_safetensors, write_safetensors
from relattn.models.source_configs import TIMM_ARCHITECTURES
from relattn.models.tensor_tables import unwrap
from tests.models.test_pretrained import FIXTURES

DIM, HIDDEN, LAYERS, HEADS, CLASSES, VOCAB, LENGTH = 12, 7, 2, 3, 5, 11, 6
ERF = np.vectorize(math.erf)


def draw(shapes):
    rng = np.random.default_rng(0)
    return {k: rng.normal(0, 0.4, shape).astype("f4") for k, shape in shapes.items()}


def both(name, *shape):
    """The shapes of a weight and of a bias of PyTorch's layers."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def timm_tensors(*, cls=True, extra=1, bias=True, scale=False, grid=(2, 3), head=True):
    """The tensors of timm's VisionTransformer, on patches of 2x2; extra positions."""
    positions = math.prod(grid) + extra
    shapes = {"pos_embed": (1, positions, DIM), **both("norm", DIM)}
    shapes |= both("patch_embed.proj", DIM, 3, 2, 2)
    shapes |= {"cls_token": (1, 1, DIM)} if cls else {}
    shapes |= both("head", CLASSES, DIM) if head else {}
    for layer in range(LAYERS):
        name = f"blocks.{layer}."
        shapes |= both(f"{name}norm1", DIM) | both(f"{name}norm2", DIM)
        shapes |= both(f"{name}attn.qkv", 3 * DIM, DIM)
        shapes |= both(f"{name}attn.proj", DIM, DIM)
        shapes |= both(f"{name}mlp.fc1", HIDDEN, DIM)
        shapes |= both(f"{name}mlp.fc2", DIM, HIDDEN)
        if not bias:
            del shapes[f"{name}attn.qkv.bias"]
        if scale:
            shapes |= {f"{name}ls1.gamma": (DIM,), f"{name}ls2.gamma": (DIM,)}
    return draw(shapes)


def gpt2_tensors(head=False):
    """The tensors of transformers' GPT-2, whose linear layers are [inputs, outputs]."""
    shapes = {"transformer.wte.weight": (VOCAB, DIM)}
    shapes |= {"transformer.wpe.weight": (LENGTH, DIM)}
    shapes |= both("transformer.ln_f", DIM)
    shapes |= {"lm_head.weight": (VOCAB, DIM)} if head else {}
    for layer in range(LAYERS):
        name = f"transformer.h.{layer}."
        shapes |= both(f"{name}ln_1", DIM) | both(f"{name}ln_2", DIM)
        for part, inputs, outputs in (
            ("attn.c_attn", DIM, 3 * DIM),
            ("attn.c_proj", DIM, DIM),
            ("mlp.c_fc", DIM, HIDDEN),
            ("mlp.c_proj", HIDDEN, DIM),
        ):
            shapes[f"{name}{part}.weight"] = (inputs, outputs)
            shapes[f"{name}{part}.bias"] = (outputs,)
    return draw(shapes)


def norm(t, name, x, eps):
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]


def attention(qkv, heads, scale, allowed):
    n = len(qkv)
    q, k, v = np.moveaxis(qkv.reshape(n, 3, heads, -1), [0, 2], [2, 1])
    scores = np.where(allowed, q @ k.transpose(0, 2, 1) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.moveaxis(weights @ v, 0, 1).reshape(n, -1)


def exact_gelu(x):
    return x * (1 + ERF(x / np.sqrt(2))) / 2


def tanh_gelu(x):
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def naive_vit(t, image, heads):
    """Logits of timm's VisionTransformer, float64."""
    t = {name: np.float64(x) for name, x in t.items()}

    def linear(name, x):
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0)

    rows, columns = image.shape[0] // 2, image.shape[1] // 2
    patches = np.float64(image).reshape(rows, 2, columns, 2, 3)
    x = np.einsum("aibjc,dcij->abd", patches, t["patch_embed.proj.weight"])
    x = x.reshape(rows * columns, DIM) + t["patch_embed.proj.bias"]
    position = t["pos_embed"][0]
    if len(position) == len(x):
        x = x + position
        x = np.concatenate([t["cls_token"][0], x]) if "cls_token" in t else x
    else:
        x = np.concatenate([t["cls_token"][0], x]) + position
    for layer in range(LAYERS):
        name = f"blocks.{layer}."
        qkv = linear(f"{name}attn.qkv", norm(t, f"{name}norm1", x, 1e-6))
        y = attention(qkv, heads, (DIM // heads) ** -0.5, True)
        x = x + linear(f"{name}attn.proj", y) * t.get(f"{name}ls1.gamma", 1)
        y = exact_gelu(linear(f"{name}mlp.fc1", norm(t, f"{name}norm2", x, 1e-6)))
        x = x + linear(f"{name}mlp.fc2", y) * t.get(f"{name}ls2.gamma", 1)
    x = norm(t, "norm", x, 1e-6)
    return linear("head", x[0] if "cls_token" in t else x.mean(0))


def naive_gpt2(t, tokens, settings):
    """Logits of transformers' GPT-2, float64."""
    t = {name.removeprefix("transformer."): np.float64(x) for name, x in t.items()}
    heads, eps = settings["n_head"], settings.get("layer_norm_epsilon", 1e-5)
    exact = settings.get("activation_function", "gelu_new") == "gelu"
    x = t["wte.weight"][tokens] + t["wpe.weight"][: len(tokens)]
    allowed = np.tri(len(tokens), dtype=bool)
    for layer in range(LAYERS):
        name = f"h.{layer}."

        def linear(part, x, name=name):
            return x @ t[f"{name}{part}.weight"] + t[f"{name}{part}.bias"]

        scale = 1.0
        if settings.get("scale_attn_weights", True):
            scale /= np.sqrt(DIM / heads)
        if settings.get("scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        qkv = linear("attn.c_attn", norm(t, f"{name}ln_1", x, eps))
        x = x + linear("attn.c_proj", attention(qkv, heads, scale, allowed))
        y = linear("mlp.c_fc", norm(t, f"{name}ln_2", x, eps))
        x = x + linear("mlp.c_proj", exact_gelu(y) if exact else tanh_gelu(y))
    tied = settings.get("tie_word_embeddings", True)
    head = t["wte.weight" if tied else "lm_head.weight"]
    return norm(t, "ln_f", x, eps) @ head.T


def write(folder, tensors, settings):
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder / "model.safetensors"


def check_logits(source, folder, tensors, settings, inputs, expected, **options):
    path = write(folder / "theirs", tensors, settings)
    convert(source, path, folder / "ours", **options)
    loaded = relattn.load_pretrained(folder / "ours")
    found = jax.jit(loaded.model.apply)(loaded.variables, jnp.asarray(inputs))[0]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def hub(**arguments):
    """A config.json of timm, as on the hub; arguments are model_args."""
    return {
        "architecture": "vit_huge_patch14_224",
        "num_classes": CLASSES,
        "num_features": DIM,
        "global_pool": arguments.get("global_pool", "token"),
        "model_args": {"embed_dim": DIM, "num_heads": HEADS, **arguments},
        "pretrained_cfg": {"num_classes": 1000, "input_size": [3, 4, 6], "tag": "x"},
    }


@pytest.mark.quick("tensors0-settings0")
@pytest.mark.parametrize(
    "tensors, settings",
    [
        ({}, hub(depth=LAYERS, mlp_ratio=0.6, dynamic_img_size=True)),
        ({"bias": False, "scale": True}, hub(qkv_bias=False, init_values=1e-5)),
        ({"extra": 0}, hub(no_embed_class=True)),
        (
            {"cls": False, "extra": 0},
            hub(class_token=False, global_pool="avg", fc_norm=False),
        ),
    ],
)
def test_timm_models_equal_the_formula(tensors, settings, tmp_path):
    tensors = timm_tensors(**tensors)
    images = np.random.default_rng(1).normal(size=(1, 4, 6, 3)).astype("f4")
    expected = naive_vit(tensors, images[0], HEADS)
    check_logits("timm", tmp_path, tensors, settings, images, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_halves_are_joined_in_single_precision(dtype, tmp_path):
    """Positions of CLS are added to it, and factors of LayerScale multiplied."""
    tensors = timm_tensors(bias=False, scale=True)
    tensors = {name: x.astype(dtype) for name, x in tensors.items()}
    images = np.random.default_rng(1).normal(size=(1, 4, 6, 3)).astype("f4")
    expected = naive_vit(tensors, images[0], HEADS)
    settings = hub(qkv_bias=False, init_values=1e-5)
    check_logits("timm", tmp_path, tensors, settings, images, expected)


@pytest.mark.quick("settings0")
@pytest.mark.parametrize(
    "settings",
    [
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {"scale_attn_weights": False, "activation_function": "gelu"},
        {"tie_word_embeddings": False, "layer_norm_epsilon": 0.1},
    ],
)
def test_gpt2_models_equal_the_formula(settings, tmp_path):
    settings = {"model_type": "gpt2", "n_head": HEADS, **settings}
    tensors = gpt2_tensors(head="tie_word_embeddings" in settings)
    tokens = np.array([[3, 1, 4, 1, 5]])
    expected = naive_gpt2(tensors, tokens[0], settings)
    check_logits("hf_gpt2", tmp_path, tensors, settings, tokens, expected)


def test_heads_are_those_of_the_architecture():
    """The heads of vit_huge are 80 wide, and those of vit_base 64."""
    assert TIMM_ARCHITECTURES["vit_huge_patch14_224"] == (1280, 16)
    tensors = timm_tensors(grid=(2, 2))
    settings = {"architecture": "vit_base_patch16_224.augreg_in21k"}
    settings["model_args"] = {"embed_dim": DIM}
    converted = SOURCES["timm"](tensors, settings)
    assert converted.config["model"]["num_heads"] == 12
    with pytest.raises(ValueError, match="num_heads=3 does .* num_heads=12"):
        SOURCES["timm"](tensors, {**settings, "num_heads": 3})
    del settings["model_args"]
    with pytest.raises(ValueError, match=r"embed_dim=768 .*proj.weight has 12"):
        SOURCES["timm"](tensors, settings)


def llama(**settings):
    """The tensors and the keys of the small Mistral."""
    tensors = read_safetensors(FIXTURES / "hf_llama" / "model.safetensors")
    stored = json.loads((FIXTURES / "hf_llama" / "config.json").read_text())
    return unwrap(tensors), {**stored, **settings}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 5}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "of config.json has no original_max_position_embeddings, which ro",
        ),
        (
            {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}},
            "low_freq_factor=2.0, which relattn's rope1d does not have: expected 1.0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "of config.json has facto"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn', which relattn's rope1d doe"),
        (
            {"rope_scaling": {"rope_type": ["default"]}},
            r"\['default'\], which relattn's",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "keys whose meaning is unknown: factor; r"),
        (
            {"rope_scaling": LLAMA3},
            "rope_parameters and rope_scaling of config.json differ: remove one",
        ),
        ({"rope_theta": 10.0}, "rope_theta=10.0 does not fit: rope_parameters has rop"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not fit: .* has 2"),
        ({"num_attention_heads": 8}, "has 8 rows, which do not fit 8 heads of 3"),
        ({"head_dim": 2}, "head_dim=2 does not fit"),
        (
            {"attention_bias": True},
            "attention_bias=True does .* has no self_attn.q_proj.bias",
        ),
        ({"mlp_bias": True}, "mlp_bias=True does not fit"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"vocab_size": 24}, "vocab_size=24"),
        ({"tie_word_embeddings": True}, "lm_head.weight is not embed_tokens.weight"),
        ({"model_type": "llama"}, "sliding_window=3, which Llama does not use: remove"),
        ({"model_type": "qwen3"}, "model_type='qwen3'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
        ({"max_position_embeddings": None}, "do not show max_position_embeddings: set"),
        ({"quantization_config": {}}, "quantization_config"),
    ],
)
def test_another_llama_is_refused_by_its_key(settings, message):
    with pytest.raises(ValueError, match=message):
        SOURCES["hf_llama"](*llama(**settings))


def test_the_window_of_mistral_is_asked_for():
    tensors, settings = llama()
    del settings["sliding_window"]
    with pytest.raises(ValueError, match="do not show sliding_window: set it in a con"):
        SOURCES["hf_llama"](tensors, settings)
    with pytest.raises(ValueError, match="model_type='phi3', which relattn's model d"):
        SOURCES["hf_llama"](tensors, {**settings, "model_type": "phi3"})
    settings = {"num_attention_heads": 6}
    message = "max_position_embeddings, rms_norm_eps, rope_theta, sliding_window: set"
    with pytest.raises(ValueError, match=message):
        SOURCES["hf_llama"](tensors, settings)
    every = SOURCES["hf_llama"](*llama(sliding_window=None)).config["model"]
    assert every["attention"] == "softmax"
    # As older versions of transformers wrote it, and with the keys of SmolLM2.
    old = {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": None}
    smol = {
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"dtype": "q4"},
    }
    converted, known, same = (
        SOURCES["hf_llama"](*llama(**x)).config for x in (old, smol, {})
    )
    assert converted == known == same
    assert same["model"]["position"] == "rope1d(base=500.0)"
    assert same["model"]["attention"] == "softmax(window=3)"


@pytest.mark.parametrize(
    "rope, options",
    [
        (LLAMA3, "base=9.0, factor=8.0, original_length=5"),
        ({"type": "linear", "factor": 2}, "base=9.0, factor=2"),
        ({"rope_type": "default", "type": "default"}, "base=9.0"),
    ],
)
def test_scaled_positions_are_those_of_rope1d(rope, options):
    for keys in (
        {"rope_parameters": None, "rope_scaling": rope, "rope_theta": 9.0},
        {"rope_parameters": {**rope, "rope_theta": 9.0}},
        {"rope_parameters": {**rope, "rope_theta": 9.0}, "rope_scaling": rope},
    ):
        model = SOURCES["hf_llama"](*llama(**keys)).config["model"]
        assert model["position"] == f"rope1d({options})"


def test_qwen2_has_no_window_unless_it_is_used():
    qwen2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    qwen2 |= {"use_sliding_window": False, "max_window_layers": 1, "use_mrope": False}
    model = SOURCES["hf_llama"](*llama(**qwen2)).config["model"]
    assert model["attention"] == "softmax"


def test_a_llama_without_its_head_is_refused():
    tensors, settings = llama()
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        SOURCES["hf_llama"](tensors, settings)


@pytest.mark.parametrize("source", ["timm", "hf_vit", "hf_gpt2", "translution"])
def test_heads_are_asked_for(source, tmp_path):
    path = FIXTURES / source / "model.safetensors"
    settings = json.loads((FIXTURES / source / "config.json").read_text())
    heads = {"timm": 3, "hf_vit": 3, "hf_gpt2": 3, "translution": 2}[source]
    copied = tmp_path / "model.safetensors"
    copied.write_bytes(path.read_bytes())
    if source == "hf_vit":
        # Its images are not square.
        (tmp_path / "config.json").write_text('{"image_size": [6, 10]}')
    with pytest.raises(ValueError, match="do not show the number of heads: pass --num"):
        convert(source, copied, tmp_path / "out")
    config = convert(source, copied, tmp_path / "out", num_heads=heads)
    assert config["model"]["num_heads"] == heads
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=rf"num_heads=.*{heads}"):
        convert(source, copied, tmp_path / "out", num_heads=heads + 2)


@pytest.mark.parametrize(
    ("source", "names", "keys"),
    [
        ("hf_vit", list("abcde"), {"id2label": {str(n): "abcde"[n] for n in range(5)}}),
        ("hf_vit", None, {}),
        ("timm", list("abcde"), {"label_names": list("abcde")}),
        ("timm", None, {"label_names": list("abc")}),
    ],
)
def test_names_of_the_classes_are_kept(tmp_path, source, names, keys):
    path = FIXTURES / source / "model.safetensors"
    settings = json.loads((FIXTURES / source / "config.json").read_text())
    copied = write(tmp_path, read_safetensors(path), settings | keys)
    config = convert(source, copied, tmp_path / "out")
    assert config["num_classes"] == 5 and config.get("class_names") == names
    assert relattn.load_pretrained(tmp_path / "out").config == config


def test_heads_of_performers_are_in_their_projections():
    tensors = unwrap(read_safetensors(FIXTURES / "performer" / "model.safetensors"))
    assert SOURCES["performer"](tensors, {}).config["model"]["num_heads"] == 2
    with pytest.raises(ValueError, match=r"heads=3 does not fit: .* has 2"):
        SOURCES["performer"](tensors, {"heads": 3})


@pytest.mark.parametrize(
    "width, given, patch",
    [
        (9, {}, (1, 3)),
        (12, {}, (3, 2)),
        (16, {}, (1, 4)),
        (16, {"channels": 4}, (4, 2)),
        (18, {"channels": 2}, (2, 3)),
        (18, {}, "18 values, not a square patch of 3 channels: set channels in"),
        (12, {"channels": 1}, "12 values, not a square patch of 1 channels"),
        (12, {"channels": "3"}, "not a square patch of .3. channels"),
        (12, {"channels": 0}, "not a square patch of 0 channels"),
    ],
)
def test_patches_of_translution(width, given, patch):
    tensors = unwrap(read_safetensors(FIXTURES / "translution" / "model.safetensors"))
    for name in ("1.weight", "1.bias"):
        tensors[f"to_patch_embedding.{name}"] = np.ones(width, "f4")
    tensors["to_patch_embedding.2.weight"] = np.ones((6, width), "f4")
    settings = {"num_heads": 2, **given}
    if isinstance(patch, str):
        with pytest.raises(ValueError, match=patch):
            SOURCES["translution"](tensors, settings)
        return
    channels, side = patch
    config = SOURCES["translution"](tensors, settings).config
    assert config["model"]["patch_size"] == side
    assert config["image_shape"] == [3 * side, 3 * side, channels]


def test_sizes_of_translution_without_positions():
    tensors = unwrap(read_safetensors(FIXTURES / "translution" / "model.safetensors"))
    del tensors["pos_embedding"]
    settings = {"num_heads": 2}
    assert SOURCES["translution"](tensors, settings).config["image_shape"] == [6, 6, 3]
    # 3 x 7 offsets of a grid of 2 x 4, and three rows for CLS.
    for name in [name for name in tensors if name.endswith("unique_params")]:
        tensors[name] = tensors[name][:24]
    with pytest.raises(ValueError, match="set image_size in a config.json"):
        SOURCES["translution"](tensors, settings)
    settings["image_size"] = [4, 8]
    assert SOURCES["translution"](tensors, settings).config["image_shape"] == [4, 8, 3]


TIMM = {"num_heads": HEADS, "image_size": [4, 6]}
HF_VIT = json.loads((FIXTURES / "hf_vit" / "config.json").read_text())
GPT2 = {"n_head": HEADS}


@pytest.mark.parametrize(
    "source, tensors, settings, message",
    [
        ("timm", {}, {**TIMM, "global_pool": "max"}, "not have global_pool='max': "),
        ("timm", {}, {**TIMM, "global_pool": ""}, "not have global_pool='': "),
        ("timm", {}, {**TIMM, "global_pool": "map"}, "has no attn_pool.q"),
        ("timm", {"cls": False}, {**TIMM, "global_pool": "token"}, "has no cls_token"),
        ("timm", {}, {**TIMM, "fc_norm": True}, "fc_norm=True does not fit"),
        ("timm", {}, {**TIMM, "pre_norm": True}, "pre_norm=True does not fit"),
        ("timm", {}, {**TIMM, "final_norm": False}, "final_norm=False does not fit"),
        ("timm", {}, {**TIMM, "class_token": False}, "class_token=False"),
        ("timm", {}, {**TIMM, "no_embed_class": True}, "no_embed_class=True"),
        ("timm", {"extra": 0}, {**TIMM, "no_embed_class": False}, "no_embed_class"),
        ("timm", {}, {**TIMM, "qkv_bias": False}, "qkv_bias=False"),
        ("timm", {"bias": False}, {**TIMM, "qkv_bias": True}, "have no biases"),
        ("timm", {}, {**TIMM, "init_values": 0.1}, "ls1.gamma is missing"),
        ("timm", {}, {**TIMM, "reg_tokens": 4}, "reg_tokens=4"),
        ("timm", {}, {**TIMM, "act_layer": "relu"}, "activation 'relu'"),
        ("timm", {}, {**TIMM, "act_layer": "silu"}, "has no gate: .* SwiGLU only"),
        ("timm", {}, {**TIMM, "depth": 3}, "depth=3"),
        ("timm", {}, {**TIMM, "mlp_ratio": 4.0}, "mlp_ratio=4.0 does not fit"),
        ("timm", {}, {**TIMM, "num_classes": 6}, "num_classes=6"),
        ("timm", {}, {**TIMM, "in_chans": 1}, "in_chans=1"),
        ("timm", {}, {**TIMM, "patch_size": 4}, r"patch_size=\[4, 4\]"),
        ("timm", {}, {**TIMM, "image_size": [4, 7]}, r"4x7 pixels.* to \[4, 6\]"),
        ("timm", {}, {**TIMM, "image_size": [9, 7]}, "9x7 pixels, which are 12 patch"),
        ("timm", {}, {**TIMM, "image_size": 8}, "8x8 pixels, which are 16 .* 7 rows"),
        ("timm", {}, {**TIMM, "temperature": 2}, "unknown: temperature"),
        ("timm", {}, {"model_args": {"ratio": 1}}, "unknown: ratio"),
        ("timm", {}, {"model_args": [1]}, r"model_args=\[1\], which must be an object"),
        ("timm", {}, {"architecture": "my_vit"}, "architecture='my_vit'"),
        ("timm", {}, {**TIMM, "num_heads": "3"}, "num_heads='3' must be an integer"),
        ("timm", {}, {**TIMM, "num_heads": 5}, "divides the width, 12"),
        ("timm", {}, {"num_heads": HEADS}, "7 rows, not a square grid"),
        ("timm", {"head": False}, {**TIMM, "image_size": 8}, "8x8 pixels, which are"),
        ("timm", {"cls": False}, {"num_heads": HEADS}, "cls_token is missing"),
        ("hf_vit", None, {**HF_VIT, "hidden_act": "relu"}, "activation 'relu'"),
        ("hf_vit", None, {**HF_VIT, "model_type": "deit"}, "model_type='deit'"),
        ("hf_vit", None, {**HF_VIT, "architectures": ["X"]}, r"architectures=\['X'\]"),
        ("hf_vit", None, {**HF_VIT, "hidden_size": 16}, "hidden_size=16"),
        ("hf_vit", None, {**HF_VIT, "num_hidden_layers": 3}, "num_hidden_layers=3"),
        ("hf_vit", None, {**HF_VIT, "id2label": {"0": "a"}}, "num_labels=1"),
        ("hf_vit", None, {**HF_VIT, "qkv_bias": False}, "qkv_bias=False"),
        ("hf_vit", None, {**HF_VIT, "pruned_heads": {"0": [1]}}, "pruned_heads="),
        ("hf_vit", None, {**HF_VIT, "quantization_config": {}}, "quantization_config"),
        ("hf_gpt2", {}, {**GPT2, "activation_function": "relu"}, "function='relu'"),
        ("hf_gpt2", {}, {**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ("hf_gpt2", {}, {**GPT2, "vocab_size": 12}, "vocab_size=12"),
        ("hf_gpt2", {}, {**GPT2, "n_positions": 7}, "n_positions=7"),
        ("hf_gpt2", {}, {**GPT2, "n_embd": DIM}, "n_inner=48"),
        ("hf_gpt2", {}, {**GPT2, "n_layer": 3}, "n_layer=3"),
        ("hf_gpt2", {}, {**GPT2, "hidden_size": 8, "n_embd": 12}, "hidden_size is 8"),
        ("hf_gpt2", {}, {**GPT2, "tie_word_embeddings": False}, "missing lm_head"),
        ("hf_gpt2", {"head": True}, GPT2, "lm_head.weight is not wte.weight"),
        ("hf_gpt2", {}, {**GPT2, "rotary": True}, "unknown: rotary"),
        # Not taken for True, False or the default.
        ("timm", {}, {**TIMM, "class_token": "true"}, "class_token='true', which must"),
        ("hf_vit", None, {**HF_VIT, "qkv_bias": None}, "qkv_bias=None, which must be"),
        ("hf_gpt2", {}, {**GPT2, "scale_attn_weights": "false"}, "='false', which mus"),
        ("hf_gpt2", {}, {**GPT2, "scale_attn_weights": None}, "=None, which must be t"),
        ("hf_gpt2", {}, {**GPT2, "tie_word_embeddings": "false"}, "embeddings='false'"),
        ("hf_gpt2", {}, {**GPT2, "scale_attn_by_inverse_layer_idx": 2}, "layer_idx=2,"),
    ],
)
def test_another_function_is_refused_by_its_name(source, tensors, settings, message):
    if source == "timm":
        tensors = timm_tensors(**tensors)
    elif source == "hf_gpt2":
        tensors = gpt2_tensors(**tensors)
    else:
        tensors = read_safetensors(FIXTURES / source / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        SOURCES[source](unwrap(tensors), settings)


@pytest.mark.parametrize(
    "name, message",
    [
        ("dist_token", "distillation token"),
        ("blocks.1.attn.q_norm.weight", "qk_norm"),
        ("blocks.0.mlp.norm.weight", "scale_mlp_norm"),
        ("pre_logits.fc.weight", "representation_size"),
        ("rope.periods", "rotary positions as in DINOv3"),
    ],
)
def test_parts_that_vit_lacks_are_named_first(name, message):
    tensors = {**timm_tensors(grid=(5, 39), extra=0), name: np.ones(3)}
    for settings in ({"num_heads": HEADS}, {"architecture": "unknown"}):
        with pytest.raises(ValueError, match=rf"{re.escape(name)}: .*{message}"):
            SOURCES["timm"](tensors, settings)


def test_norm_pre_needs_activation_and_epsilon():
    """The tensors of CLIP's ViTs do not show whether they have quick_gelu."""
    tensors = {**timm_tensors(), **draw(both("norm_pre", DIM))}
    with pytest.raises(ValueError, match="norm_pre.weight: .* set the architecture"):
        SOURCES["timm"](tensors, TIMM)
    settings = {**TIMM, "act_layer": "quick_gelu", "layer_norm_eps": 1e-5}
    model = SOURCES["timm"](tensors, settings).config["model"]
    assert model["activation"] == "quick_gelu"
    assert model["pre_norm"]
    assert model["norm_eps"] == 1e-5


def test_clip_and_siglip_need_an_activation():
    """Without a config.json, nothing shows which GELU they have."""
    tensors = {**timm_tensors(), **draw({"attn_pool.q.weight": (DIM, DIM)})}
    message = "attn_pool.q.weight: .*, such as SigLIP's, differ .* set the architecture"
    with pytest.raises(ValueError, match=message):
        SOURCES["timm"](tensors, TIMM)
    tensors = unwrap(read_safetensors(FIXTURES / "hf_clip" / "model.safetensors"))
    with pytest.raises(ValueError, match="set hidden_act, which is 'quick_gelu' for"):
        SOURCES["hf_clip"](tensors, {"num_heads": 3})
    settings = {"num_heads": 3, "hidden_act": "gelu"}
    model = SOURCES["hf_clip"](tensors, settings).config["model"]
    assert model.get("activation", "gelu") == "gelu"


def test_a_norm_layer_has_its_own_epsilon():
    """Not that of the architecture; timm's LayerNorm has 1e-6."""
    name = "vit_base_patch16_clip_224"
    for arguments, eps in (({}, 1e-5), ({"norm_layer": "layernorm"}, 1e-6)):
        settings = {"architecture": name, "model_args": arguments}
        assert source_configs.timm_settings(settings)["layer_norm_eps"] == eps


@pytest.mark.parametrize("old", [{}, {"vision_config": None}, "another"])
def test_vision_config_dict_replaces_vision_config(old):
    """Of the older files of CLIP; where both are given, transformers takes it."""
    given = {"hidden_size": 8, "num_attention_heads": 2, "hidden_act": "gelu"}
    settings = {"model_type": "clip", "vision_config_dict": given}
    if old == "another":
        # The second has the class's default of it.
        old = {"vision_config": {**given, "hidden_act": "relu", "layer_norm_eps": 0.1}}
    found = source_configs.hf_settings({**settings, **old}, source_keys.HF_CLIP)
    assert found == given


def test_dinov3_is_refused():
    tensors = read_safetensors(FIXTURES / "hf_dinov2" / "model.safetensors")
    with pytest.raises(ValueError, match="rotary positions as in DINOv3, .* DINOv2"):
        SOURCES["hf_dinov2"](unwrap(tensors), {"model_type": "dinov3_vit"})


def test_a_gate_needs_its_activation():
    """The tensors of a GLU do not show whether its gate has silu or GELU."""
    tensors = timm_tensors()
    for layer in range(LAYERS):
        shapes = both(f"blocks.{layer}.mlp.fc1", 2 * HIDDEN, DIM)
        tensors |= draw(shapes)
    with pytest.raises(ValueError, match="has a gate, .* set act_layer='silu'"):
        SOURCES["timm"](tensors, TIMM)
    model = SOURCES["timm"](tensors, {**TIMM, "act_layer": "silu"}).config["model"]
    assert (model["activation"], model["mlp_dim"]) == ("swiglu", HIDDEN)


def test_text_classifiers_are_refused():
    tensors = unwrap({**gpt2_tensors(), "score.weight": np.ones((2, DIM), "f4")})
    with pytest.raises(ValueError, match="score.weight: .* convert GPT2LMHeadModel"):
        SOURCES["hf_gpt2"](tensors, GPT2)


def test_distilgpt2(tmp_path):
    """A config.json with the keys of that of distilgpt2."""
    settings = {
        "_num_labels": 1,
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 10,
        "embd_pdrop": 0.1,
        "eos_token_id": 10,
        "id2label": {"0": "LABEL_0"},
        "initializer_range": 0.02,
        "label2id": {"LABEL_0": 0},
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": LENGTH,
        "n_embd": DIM,
        "n_head": HEADS,
        "n_inner": HIDDEN,
        "n_layer": LAYERS,
        "n_positions": LENGTH,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True}},
        "vocab_size": VOCAB,
    }
    tokens = np.array([[3, 1, 4, 1, 5]])
    expected = naive_gpt2(gpt2_tensors(), tokens[0], settings)
    check_logits("hf_gpt2", tmp_path, gpt2_tensors(), settings, tokens, expected)


def test_what_is_missing_is_named_before_sizes():
    tensors = timm_tensors(grid=(5, 39), extra=0)
    del tensors["blocks.1.norm2.bias"]
    with pytest.raises(ValueError, match=r"missing blocks\.1\.norm2\.bias"):
        SOURCES["timm"](tensors, {"num_heads": HEADS})
    tensors = unwrap(read_safetensors(FIXTURES / "hf_vit" / "model.safetensors"))
    for name in ("cls_token", "position_embeddings"):
        rest = {k: x for k, x in tensors.items() if not k.endswith(name)}
        with pytest.raises(ValueError, match=rf"missing vit\.embeddings\.{name}"):
            SOURCES["hf_vit"](rest, HF_VIT)


@pytest.mark.parametrize("source", ["timm", "hf_vit", "hf_gpt2"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"_orig_mod.module.model.{name}",
        lambda name: f"model.backbone._orig_mod.{name}",
        lambda name: re.sub(r"(\.\d+\.)", r"\1_orig_mod.module.", name),
        lambda name: re.sub(r"^(vit|transformer)\.", "", name),
    ],
)
def test_wrappers_are_removed(source, wrap):
    tensors = read_safetensors(FIXTURES / source / "model.safetensors")
    settings = json.loads((FIXTURES / source / "config.json").read_text())
    plain = SOURCES[source](unwrap(tensors), settings)
    wrapped = {wrap(name): x for name, x in tensors.items()}
    found = SOURCES[source](unwrap(wrapped), settings)
    assert found.config == plain.config
    jax.tree.map(np.testing.assert_array_equal, found.tensors, plain.tensors)


def test_checkpoint_of_another_source_is_refused():
    tensors = unwrap(read_safetensors(FIXTURES / "hf_vit" / "model.safetensors"))
    message = "patch_embed.proj.weight is missing: the checkpoint is of another --sou"
    with pytest.raises(ValueError, match=message):
        SOURCES["timm"](tensors, {})
    # Before its unknown keys, which nobody should remove.
    settings = json.loads((FIXTURES / "hf_dinov2" / "config.json").read_text())
    message = "has model_type='dinov2_with_registers', which relattn's model does not"
    with pytest.raises(ValueError, match=message):
        SOURCES["hf_vit"](tensors, settings)


def test_classifier_without_its_last_layer_pools_as_one():
    """As transformers writes it with num_labels=0."""
    tensors = unwrap(read_safetensors(FIXTURES / "hf_dinov2" / "model.safetensors"))
    settings = json.loads((FIXTURES / "hf_dinov2" / "config.json").read_text())
    settings["id2label"] = {}
    rest = {k: x for k, x in tensors.items() if not k.startswith("classifier.")}
    config = SOURCES["hf_dinov2"](rest, settings).config
    assert config["num_classes"] == 0
    assert config["model"]["pool"] == "cls_mean"
    tensors = unwrap(read_safetensors(FIXTURES / "hf_clip" / "model.safetensors"))
    settings = json.loads((FIXTURES / "hf_clip" / "config.json").read_text())
    settings["architectures"] = ["CLIPForImageClassification"]
    del tensors["visual_projection.weight"]
    model = SOURCES["hf_clip"](tensors, settings).config["model"]
    assert (model["pool"], model["final_norm"]) == ("mean", False)


def test_two_models_in_one_file_are_refused():
    tensors = {"model.norm.bias": np.ones(3), "module.norm.bias": np.zeros(3)}
    with pytest.raises(ValueError, match=r"model.norm.bias and module.norm.bias are"):
        unwrap(tensors)
    tensors = {"vision_model.norm.bias": np.ones(3), "dinov2.norm.bias": np.zeros(3)}
    message = "vision_model.norm.bias and dinov2.norm.bias are of two encoders: save"
    with pytest.raises(ValueError, match=message):
        SOURCES["hf_dinov2"](tensors, {})


def test_a_grid_with_and_without_registers_is_asked_for():
    """25 rows are 5 x 5 patches, or 4 x 4 after CLS and eight registers."""
    tensors = timm_tensors(grid=(4, 4), extra=9)
    tensors["reg_token"] = np.ones((1, 8, DIM), "f4")
    with pytest.raises(ValueError, match="25 rows, more than one square grid: set ima"):
        SOURCES["timm"](tensors, {"num_heads": HEADS})
    for size in (8, 10):
        settings = {"num_heads": HEADS, "image_size": size}
        found = SOURCES["timm"](tensors, settings).config["image_shape"]
        assert found == [size, size, 3]


def test_names_of_transformers_5_in_memory_are_read():
    tensors = read_safetensors(FIXTURES / "hf_vit" / "model.safetensors")
    plain = SOURCES["hf_vit"](unwrap(tensors), HF_VIT)
    names = {
        "encoder.layer.": "layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }
    renamed = {}
    for name, x in tensors.items():
        for written, memory in names.items():
            name = name.replace(written, memory)
        renamed[name] = x
    assert "vit.layers.0.mlp.fc2.weight" in renamed
    found = SOURCES["hf_vit"](unwrap(renamed), HF_VIT)
    jax.tree.map(np.testing.assert_array_equal, found.tensors, plain.tensors)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool"])
def test_integers_are_no_parameters(dtype):
    tensors = timm_tensors(grid=(2, 2))
    tensors["blocks.1.attn.proj.weight"] = np.ones((DIM, DIM), dtype)
    message = rf"not floats blocks\.1\.attn\.proj\.weight \({dtype}\)"
    with pytest.raises(ValueError, match=message):
        SOURCES["timm"](tensors, {"num_heads": HEADS})


@pytest.mark.parametrize(
    "text",
    ["[1]", '"vit"', "{", '{"num_heads": 3, "mlp_ratio": [4]}', '{"input_size": 4}'],
)
def test_damaged_config_is_refused(text, tmp_path):
    path = write(tmp_path, timm_tensors(grid=(2, 2)), {})
    (tmp_path / "config.json").write_text(text)
    message = r"config\.json (is not JSON|has .*, which must be)"
    with pytest.raises(ValueError, match=message):
        convert("timm", path, tmp_path / "out")


def write_parts(folder, tensors, index):
    """Writes the tensors to two files, and an index of them."""
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        write_safetensors(folder / part, {name: tensors[name] for name in held})
    weight_map = {name: part for part, held in parts.items() for name in held}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / index


def test_checkpoint_in_parts(tmp_path):
    whole = FIXTURES / "hf_gpt2"
    tensors = read_safetensors(whole / "model.safetensors")
    path = write_parts(tmp_path, tensors, "model.safetensors.index.json")
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    convert("hf_gpt2", path, tmp_path / "parts")
    convert("hf_gpt2", whole / "model.safetensors", tmp_path / "whole")
    parts, plain = (
        read_safetensors(tmp_path / name / "model.safetensors")
        for name in ("parts", "whole")
    )
    jax.tree.map(np.testing.assert_array_equal, parts, plain)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[]", r"i.index.json has \[\], which must be an object"),
        ("{}", "i.index.json has no weight_map"),
        ('{"weight_map": {"x": 3}}', "has weight_map.x=3, which must be a string"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "parts are files beside it"),
        ('{"weight_map": {"x": "/a.safetensors"}}', "parts are files beside it"),
        ('{"weight_map": {"x": ""}}', "parts are files beside it"),
        (
            '{"weight_map": {"x": ".."}}',
            "names '..', but there is no such file beside it",
        ),
        ('{"weight_map": {"x": "i.index.json"}}', "parts are files beside it"),
        (
            '{"weight_map": {"x": "c.safetensors"}}',
            "names 'c.safetensors', but there is no such file",
        ),
        ('{"weight_map": {"x": "a.safetensors"}}', "has 'x' in 'a.safetensors', which"),
        # Held by the other file, and by both.
        (
            '{"weight_map": {"a": "b.safetensors", "b": "a.safetensors"}}',
            "has 'a' in 'b.safetensors', which does not hold it",
        ),
        (
            '{"weight_map": {"a": "a.safetensors", "b": "again.safetensors"}}',
            "names 'a.safetensors' and 'again.safetensors', which both hold 'a': save",
        ),
        ('{"weight_map": {"a": "b.safetensors", "a": "a.safetensors"}}', "given twice"),
    ],
)
def test_damaged_index_is_refused(text, message, tmp_path):
    path = write_parts(tmp_path, {"a": np.ones(2), "b": np.ones(2)}, "i.index.json")
    write_safetensors(
        tmp_path / "again.safetensors", {"a": np.ones(2), "b": np.ones(2)}
    )
    path.write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert("timm", path, tmp_path / "out")


def test_tensors_that_the_index_does_not_name_are_read(tmp_path):
    """As transformers does; those of no parameter are refused by their names."""
    path = write_parts(tmp_path, {"a": np.ones(2), "b": np.ones(2)}, "i.index.json")
    held = {"a": np.ones(2), "c": np.ones(2)}
    write_safetensors(tmp_path / "a.safetensors", held)
    assert {*read_checkpoint(path)} == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        ([], "", "the folder .* has no model.safetensors: pass the file of the weight"),
        (
            ["model.safetensors.index.json"],
            "model.safetensors",
            "no file .*, which is in parts: give their index, .*tensors.index.json$",
        ),
        ([], "model.safetensors", "there is no file .*/model.safetensors$"),
        (
            ["model-00002-of-00003.safetensors"],
            "model-00002-of-00003.safetensors",
            "one of the 3 files of a checkpoint: .*/model.safetensors.index.json$",
        ),
        (
            ["pytorch_model-00001-of-00002.bin"],
            "pytorch_model-00001-of-00002.bin",
            "one of the 2 files .*/pytorch_model.bin.index.json$",
        ),
    ],
)
def test_the_file_to_give_is_named(files, given, message, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        convert("timm", tmp_path / given, tmp_path / "out")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_the_folder_of_a_checkpoint_takes_its_place(name, tmp_path):
    held = {"a": np.ones(2), "b": np.ones(3)}
    path = write_parts(tmp_path, held, "model.safetensors.index.json")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    if name != path.name:
        path.unlink()
        write_safetensors(tmp_path / name, held)
    assert {*read_checkpoint(tmp_path)} == {"a", "b"}
    with pytest.raises(ValueError, match=f"{tmp_path / name}: .* is missing"):
        convert("hf_vit", tmp_path, tmp_path / "out")


def test_a_sentence_says_that_torch_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_text('{"weight_map": {"a": "pytorch_model-00001-of-00002.bin"}}')
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    message = r"-00001-of-00002.bin is not named .*: pip install torch, or save .*safe_"
    with pytest.raises(ImportError, match=message):
        convert("hf_gpt2", path, tmp_path / "out")


def test_count_of_averaged_models_is_no_parameter():
    tensors = {"n_averaged": np.array(3), "module.norm.bias": np.ones(2)}
    assert list(unwrap(tensors)) == ["norm.bias"]


def test_heads_of_a_run_are_its_own(tmp_path):
    with pytest.raises(ValueError, match="its number of heads: leave --num_heads out"):
        convert("run", tmp_path, tmp_path / "out", num_heads=3)


def test_checkpoints_are_not_replaced(tmp_path):
    path = write(tmp_path, timm_tensors(grid=(2, 2)), {"num_heads": HEADS})
    before = path.read_bytes()
    for given in (path, path.parent):
        with pytest.raises(ValueError, match="is the folder of the checkpoint, whose"):
            convert("timm", given, path.parent / ".." / path.parent.name)
    with pytest.raises(OSError, match="model.safetensors is a file: name a directory"):
        convert("timm", path, path)
    assert path.read_bytes() == before
