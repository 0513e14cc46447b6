"""Models and checkpoints that others wrote are refused in one sentence.

Values of ``config.json`` are replaced one by one, headers of safetensors are damaged.
"""

import copy
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import relattn
from relattn.convert import convert
from relattn.manifest import write_manifest
from relattn.models import pretrained
from relattn.models.model_card import model_card
from relattn.models.safetensors import read_safetensors, write_safetensors
from tests.helpers.sentences import assert_refused
from tests.models.test_pretrained import ENTRY, FIXTURES, write_header

VIT = {"name": "vit", "dim": 6, "num_heads": 3, "num_layers": 2, "mlp_dim": 7}
VIT |= {"patch_size": 2, "attention": "softmax", "position": "learned"}
CONFIG = {
    "model": VIT,
    "num_classes": 2,
    "image_shape": [4, 4, 1],
    "data": {
        "name": "digits",
        "class_names": ["0", "1"],
        "image_shape": [5, 5, 1],
        "mean": [0.1],
        "std": [0.3],
        "num_train": 7,
        "origin": "here",
        "kind": "images",
        "streamed": False,
    },
    "training": {"data": {"standardize": True}},
    "step": 3,
    "checkpoint": "best",
}
WRONG = {
    "null": None,
    "true": True,
    "minus": -1,
    "zero": 0,
    "half": 0.5,
    "large": 10**12,
    "huge": 10**5000,
    "large float": 1e300,
    "nan": float("nan"),
    "text": "nonsense",
    "long text": "x" * 10_000,
    "line breaks": "a\nb\x1b[31m",
    "surrogate": "\ud800",
    "list": [],
    "nested": [[3]],
    "long list": [3] * 1000,
    "object": {},
}
QUICK = ("-minus",)


def dump(values):
    """JSON with an integer that Python refuses to print."""
    return json.dumps(values).replace('"HUGE"', "1" + "0" * 5000)


def replace(values, path, value):
    """A copy of nested dicts with another value at a path."""
    values = copy.deepcopy(values)
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "HUGE" if value is WRONG["huge"] else value
    return values


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a model."""
    folder = tmp_path_factory.mktemp("saved")
    module = pretrained.build(CONFIG)
    like = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 4, 4, 1)))
    arrays = jax.tree.map(lambda x: np.full(x.shape, 0.4, x.dtype), like)
    pretrained.save_pretrained(folder, CONFIG, arrays)
    return folder


def use(folder):
    loaded = relattn.load_pretrained(folder)
    loaded.preprocess(np.zeros((1, 5, 5, 1), np.uint8))


def with_config(saved, folder, text):
    """Copies a model with another config.json, which its author wrote."""
    shutil.copytree(saved, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(text)
    write_manifest(folder, ["config.json", "model.safetensors"])
    return folder


PATHS = [
    *(("model", key) for key in VIT),
    *(("data", key) for key in CONFIG["data"]),
    ("model",),
    ("data",),
    ("num_classes",),
    ("image_shape",),
    ("training",),
    ("training", "data"),
    ("training", "data", "standardize"),
]
VALID = {
    ("model.mlp_dim", "null"),
    ("data.streamed", "true"),
    ("training.data", "object"),
    ("training.data.standardize", "true"),
    *(
        (f"data.{key}", name)
        for key in ("name", "origin")
        for name in ("text", "long text", "line breaks", "surrogate")
    ),
    ("data.num_train", "large"),
    ("data.num_train", "zero"),
}
VARIANTS = [
    (path, name)
    for path in PATHS
    for name in WRONG
    if (".".join(path), name) not in VALID
]


IDS = [f"{'.'.join(path)}-{name}" for path, name in VARIANTS]


@pytest.mark.quick(*(each for each in IDS if each.endswith(QUICK)))
@pytest.mark.parametrize("path, name", VARIANTS, ids=IDS)
def test_wrong_value_in_the_config_of_a_model_is_refused(path, name, saved, tmp_path):
    text = dump(replace(CONFIG, path, WRONG[name]))
    folder = with_config(saved, tmp_path / "model", text)
    assert_refused(lambda: use(folder), "config.json")


@pytest.mark.quick("0", "1", "2")
@pytest.mark.parametrize("seed", range(40))
def test_flipped_bit_is_noticed(seed, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    rng = np.random.default_rng(seed)
    path = tmp_path / ["model.safetensors", "config.json"][seed % 2]
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    path.write_bytes(data)
    damage = f"{path} is damaged (its SHA-256 is not that of manifest.json)"
    assert_refused(lambda: relattn.load_pretrained(tmp_path), damage)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[" * 10_000,
        '{"model.safetensors": 3}',
        '{"model.safetensors": "0"}',
        '{"config.json": "0"}',
        '{"model.safetensors": "0", "model.safetensors": "0", "config.json": "0"}',
        '{"../model.safetensors": "0", "config.json": "0", "model.safetensors": "0"}',
    ],
)
def test_damaged_manifest_is_refused(text, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "manifest.json").write_text(text)
    assert_refused(lambda: relattn.load_pretrained(tmp_path), "manifest.json")


def test_older_folder_loads_with_a_warning(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=f"{tmp_path} has no manifest.json"):
        relattn.load_pretrained(tmp_path)


@pytest.mark.parametrize("make", ["mkdir", "mkfifo"])
def test_manifest_that_is_no_file_is_not_a_verification(make, saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "manifest.json").unlink()
    getattr(os, make)(tmp_path / "manifest.json")
    with pytest.warns(UserWarning, match=f"{tmp_path} has no manifest.json"):
        relattn.load_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_link_to_nowhere_beside_a_checkpoint_is_refused(name, tmp_path):
    shutil.copytree(FIXTURES / "timm", tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)
    path = tmp_path / "model.safetensors"
    out = tmp_path / "out"
    assert_refused(lambda: convert("timm", path, out, num_heads=3), name)
    assert not out.exists()


@pytest.mark.parametrize("part", ["none", "a" * 300, "a\0b", "folder"])
def test_index_of_parts_that_are_not_there_is_refused(part, tmp_path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": part}}))
    assert_refused(lambda: convert("timm", path, tmp_path / "out"), str(path))


def of_fixture(name, keys):
    """Returns some keys of the configuration of a fixture."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    return {key: config[key] for key in keys.split()}


# For each source, the keys that its conversion reads, of the fixtures' values.
BESIDE = {
    "timm": {
        "num_heads": 3,
        "embed_dim": 15,
        "depth": 2,
        "mlp_ratio": None,
        "patch_size": 2,
        "img_size": None,
        "image_size": None,
        "input_size": None,
        "in_chans": 3,
        "num_classes": 5,
        "global_pool": "token",
        "class_token": True,
        "qkv_bias": True,
        "init_values": None,
        "architecture": None,
        "model_args": {},
        "pretrained_cfg": {},
    },
    "hf_vit": of_fixture(
        "hf_vit",
        "num_attention_heads hidden_size num_hidden_layers intermediate_size "
        "layer_norm_eps image_size patch_size num_channels qkv_bias id2label "
        "model_type hidden_act",
    ),
    "hf_gpt2": of_fixture(
        "hf_gpt2",
        "n_head n_embd n_layer n_positions n_inner vocab_size activation_function "
        "layer_norm_epsilon tie_word_embeddings scale_attn_weights",
    ),
    "hf_llama": of_fixture(
        "hf_llama",
        "num_attention_heads num_key_value_heads head_dim max_position_embeddings "
        "rms_norm_eps rope_parameters sliding_window tie_word_embeddings",
    ),
    "translution": {"num_heads": 2, "image_size": None, "channels": None},
    "performer": {"heads": 2, "num_heads": None, "image_size": 5},
}
# Values that mean the same as those of the fixture.
SAME = {
    *((key, "object") for key in ("model_args", "pretrained_cfg")),
    *((key, "true") for key in ("class_token", "qkv_bias")),
    *((key, "true") for key in ("tie_word_embeddings", "scale_attn_weights")),
    # Only the size of the constants; the tensors show nothing of it.
    ("layer_norm_eps", "half"),
    ("layer_norm_epsilon", "half"),
    ("rms_norm_eps", "half"),
    # Of the default base.
    ("rope_parameters", "object"),
    ("image_size", "zero"),
}
BESIDE_VARIANTS = [
    (source, key, name)
    for source, keys in BESIDE.items()
    for key in keys
    for name in WRONG
    # Null stands for a missing key.
    if name != "null" and (key, name) not in SAME
]


BESIDE_IDS = ["-".join(variant) for variant in BESIDE_VARIANTS]


@pytest.mark.quick(*(each for each in BESIDE_IDS if each.endswith(QUICK)))
@pytest.mark.parametrize("source, key, name", BESIDE_VARIANTS, ids=BESIDE_IDS)
def test_wrong_value_in_the_config_beside_a_checkpoint_is_refused(
    source, key, name, tmp_path
):
    path = tmp_path / "model.safetensors"
    path.symlink_to(FIXTURES / source / "model.safetensors")
    keys = {k: v for k, v in BESIDE[source].items() if v is not None}
    text = dump(replace(keys, (key,), WRONG[name]))
    (tmp_path / "config.json").write_text(text)
    assert_refused(lambda: convert(source, path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def entries(**changes):
    return {"a": {**ENTRY, **changes}}


def twice(*pairs):
    return "{" + ", ".join(f'"{key}": {value}' for key, value in pairs) + "}"


A = json.dumps(ENTRY)
HEADERS = {
    "bytes": bytes(range(256)),
    "brackets": b"{}}",
    "deep": b"[" * 10000,
    "list": [1],
    "number": {"a": 3},
    "null": {"a": None},
    "latin-1": '{"é": 3}'.encode("latin-1"),
    "huge": dump(entries(shape=["HUGE"])).encode(),
    "same name": twice(("a", A), ("a", A)).encode(),
    "same key": twice(("a", A.replace("}", ', "dtype": "F16"}'))).encode(),
    "metadata": {"__metadata__": {"a": 3}, "a": ENTRY},
    "metadata list": {"__metadata__": [], "a": ENTRY},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "no shape": {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "overlap": {"a": ENTRY, "b": ENTRY},
    "hole": {"a": {**ENTRY, "shape": [1], "data_offsets": [4, 8]}},
    "nothing": {},
    **{
        f"{key} {name}": entries(**{key: value})
        for key in ENTRY
        for name, value in WRONG.items()
        if name != "huge"
    },
    **{
        f"dtype {dtype}": entries(dtype=dtype, shape=[8])
        for dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "X", "f32")
    },
    **{
        f"shape {shape}": entries(shape=shape)
        for shape in ([-2], [2, 2], [2**62, 4], [2**63], [2**64], [1.5], ["2"], [True])
    },
    **{
        f"offsets {offsets}": entries(data_offsets=offsets)
        for offsets in ([4, 12], [8, 0], [0], [0, 8, 8], [-8, 0], [0, 2**63], [0, 7])
    },
}


@pytest.mark.parametrize("name", HEADERS)
def test_damaged_header_is_refused(name, tmp_path):
    path = tmp_path / "model.safetensors"
    write_header(path, HEADERS[name])
    assert_refused(lambda: read_safetensors(path), str(path))


@pytest.mark.parametrize("length", [9, 2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_header_longer_than_the_file_is_refused(length, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}      ")
    assert_refused(lambda: read_safetensors(path), str(path), f"{length:,} bytes")


NAMES = {
    "timm": "blocks.{}.norm1.weight",
    "hf_vit": "vit.encoder.layer.{}.layernorm_before.weight",
    "hf_gpt2": "transformer.h.{}.ln_1.weight",
    "hf_llama": "model.layers.{}.input_layernorm.weight",
    "translution": "translution.layers.{}.0.norm.weight",
    "performer": "performer.net.layers.{}.0.norm.weight",
}


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize(
    "index", ["3", "99999999999", "9" * 5000, "02", "-1", "٣", "1e9", "0x10"]
)
def test_layer_of_another_index_is_refused(source, index, tmp_path):
    shutil.copytree(FIXTURES / source, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = dict(read_safetensors(path))
    first = tensors[NAMES[source].format(0)] if source != "performer" else np.ones(3)
    tensors[NAMES[source].format(index)] = first
    write_safetensors(path, {name: np.array(x) for name, x in tensors.items()})
    assert_refused(lambda: convert(source, path, tmp_path / "out"), str(path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    ["a\n---\nb: c", "$\\frac$", "<script>x</script>", "|", "\ud800", "```\n# x"],
)
def test_card_shows_names_as_they_are(name):
    data = {**CONFIG["data"], "name": name, "origin": name}
    card = model_card({**CONFIG, "data": data}, {}, license=name)
    front, license, name_line = card.split("\n")[1:4]
    assert (front, license) == ("library_name: relattn", "license: other")
    quoted = name_line.removeprefix("license_name: ")
    assert json.loads(quoted) == name
    for text in ("<script>", "$\\f", "\n# x", "\nb: c", "\ud800"):
        assert text not in card.replace("\\$", "").replace("\\<", "").replace(
            quoted, ""
        )
