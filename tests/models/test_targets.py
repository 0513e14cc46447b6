"""Models by the names of timm and transformers: read from files, written again."""

import json

import jax
import numpy as np
import pytest

from relattn.models import preprocessing, pretrained, variable_names
from relattn.models.safetensors import read_safetensors
from relattn.models.sources import SOURCES
from relattn.models.targets import to_library
from relattn.models.tensor_tables import unwrap
from tests.helpers.quick import normal_like
from tests.models.test_pretrained import FIXTURES

VIT = {
    "model": {
        "name": "vit",
        "dim": 6,
        "num_heads": 2,
        "num_layers": 1,
        "mlp_dim": 6,
        "patch_size": 2,
        "position": "learned",
        "embedding_norms": False,
    },
    "num_classes": 3,
    "image_shape": [4, 4, 1],
}
GPT = {
    "model": {
        "name": "gpt",
        "dim": 6,
        "num_heads": 2,
        "num_layers": 1,
        "mlp_dim": 6,
        "position": "learned",
        "qkv_bias": True,
        "head_norm": False,
    },
    "vocab_size": 7,
    "context_length": 5,
}


def assert_same(found, expected):
    """The same arrays, to the sign of zero."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


def read(name):
    """Converts a checkpoint of PyTorch; returns its tensors, and our model."""
    (source,) = [source for source in SOURCES if name.startswith(source)]
    tensors = read_safetensors(FIXTURES / name / "model.safetensors")
    settings = json.loads((FIXTURES / name / "config.json").read_text())
    converted = SOURCES[source](unwrap(tensors), settings)
    model = pretrained.build(converted.config)
    like = pretrained.abstract(model, converted.config)
    variables = variable_names.unflatten(model, like, converted.tensors, name)
    return source, tensors, converted, model, variables


def make(config, **options):
    """A model of any options, and parameters that are drawn."""
    config = {**config, "model": {**config["model"], **options}}
    model = pretrained.build(config)
    variables = normal_like(pretrained.abstract(model, config))
    return model, config, variables


PREFIXES = ("vit.", "dinov2_with_registers.", "vision_model.", "transformer.")


def short(name):
    """A name without that of the encoder, which some classes lack."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


@pytest.mark.quick("hf_gpt2-hf", "timm_registers-timm", "hf_clip-hf")
@pytest.mark.parametrize(
    "name, library",
    [
        ("timm", "timm"),
        ("timm_registers", "timm"),
        ("hf_vit", "hf"),
        ("hf_vit_mae", "hf"),
        ("hf_dinov2", "hf"),
        ("hf_clip", "hf"),
        ("hf_siglip", "hf"),
        ("hf_gpt2", "hf"),
    ],
)
def test_checkpoints_are_written_as_pytorch_wrote_them(name, library):
    source, theirs, converted, model, variables = read(name)
    files = to_library(library, model, converted.config, variables)
    again = SOURCES[source](unwrap(files.tensors), files.config)
    assert again.tensors.keys() == converted.tensors.keys()
    for key, array in converted.tensors.items():
        assert_same(again.tensors[key], array)
    theirs = {
        short(key): np.ascontiguousarray(x)
        for key, x in theirs.items()
        if not key.startswith(("text_", "logit_scale"))
    }
    found = {short(key): x for key, x in files.tensors.items()}
    assert found.keys() == theirs.keys()
    # What conversion joins: positions of CLS with it, LayerScale with the layer before.
    token, positions = (
        next((key for key in theirs if key.endswith(ends)), "")
        for ends in (
            ("cls_token", "class_embedding"),
            ("position_embeddings", "position_embedding.weight", "pos_embed"),
        )
    )
    joined = ("ls1", "ls2", "layer_scale", "mask_token", "attn.proj", "mlp.fc2")
    joined += ("attention.output",)
    is_scaled = any("ls1" in key or "layer_scale" in key for key in theirs)
    for key, x in theirs.items():
        if key in (token, positions) or is_scaled and any(p in key for p in joined):
            continue
        assert_same(found[key], x)
    for ends in ("ls1.gamma", "layer_scale2.lambda1"):
        for key in [key for key in theirs if key.endswith(ends)]:
            np.testing.assert_array_equal(found[key], 1)
    if token:
        # The CLS token has the first position, if there is one more than patches.
        rows = theirs[positions].reshape(-1, theirs[token].shape[-1])
        if len(rows) % 3:
            np.testing.assert_array_equal(
                found[token].reshape(-1), theirs[token].reshape(-1) + rows[0]
            )
            patches = found[positions].reshape(rows.shape)[1:]
            np.testing.assert_array_equal(patches, rows[1:])


@pytest.mark.quick(
    message=[
        "timm has no model with attention='fav",
        "timm has no GPT, only ViT: export this model as stable",
        "norm_type='rms_norm': GPT-2 has",
        "SigLIP cannot hold this model: it has images of 4x16 pixels and patches",
    ]
)
@pytest.mark.parametrize(
    "config, library, options, message",
    [
        (VIT, "timm", {"attention": "favor"}, "timm has no model with attention='fav"),
        (VIT, "hf", {"position": "none"}, "hf has no model with position='none': ViT"),
        (
            VIT,
            "hf",
            {"position": "learned(antialias=False) + t5_bias"},
            "position='learned.antialias=False. . t5_bias'",
        ),
        (VIT, "hf", {"position": "learned + t5_bias"}, "position='learned . t5_bias'"),
        (VIT, "hf", {"embedding_norms": True}, "embedding_norms=True: ViT has emb"),
        (VIT, "timm", {"patch_overlap": 1}, "patch_overlap=1: timm's VisionTransfor"),
        (VIT, "timm", {"head": "mlp"}, "head='mlp': timm's .* has head='linear'"),
        (VIT, "timm", {"head_dim": 2}, "head_dim=2: .* has head_dim=0"),
        (VIT, "timm", {"norm_eps": 1e-3}, "norm_eps=0.001: .* norm_eps=1e-06 or 1e-05"),
        (VIT, "timm", {"pool": "cls_mean"}, "pool='cls_mean': .* pool='cls' or 'mean'"),
        (VIT, "hf", {"pool": "mean"}, "qkv_bias=False: SigLIP has qkv_bias=True; exp"),
        (VIT, "hf", {"fc_norm": True, "patch_overlap": 1}, "overlap=1, fc_norm=True"),
        (
            VIT,
            "hf",
            {"pool": "cls_mean", "mlp_dim": 9},
            "DINOv2 cannot hold this model: mlp_dim=9 does not follow from dim=6",
        ),
        (
            VIT,
            "hf",
            {"pool": "cls_mean", "patch_size": [2, 1]},
            "DINOv2 cannot hold this model: it has images of 4x4 pixels and patches of "
            "2x1, not squares: export it as stablehlo or onnx",
        ),
        (
            {**VIT, "image_shape": [4, 16, 1]},
            "hf",
            {"pool": "mean", "qkv_bias": True},
            "SigLIP cannot hold this model: it has images of 4x16 pixels and patches",
        ),
        (
            VIT,
            "hf",
            {"pre_norm": True, "qkv_bias": True},
            "CLIP cannot hold this model: embedding.bias is not zero, and",
        ),
        (
            VIT,
            "hf",
            {"norm_type": "rms_norm"},
            "norm_type='rms_norm': ViT has norm_typ",
        ),
        (VIT, "timm", {"num_kv_heads": 1}, "num_kv_heads=1: timm's .* num_kv_heads=0"),
        (VIT, "timm", {"mlp_bias": False}, "mlp_bias=False: timm's .* mlp_bias=True"),
        (GPT, "timm", {}, "timm has no GPT, only ViT: export this model as stable"),
        (GPT, "hf", {"attention": "relu"}, "attention='relu': GPT-2 has attention='so"),
        (
            GPT,
            "hf",
            {"norm_type": "rms_norm"},
            "norm_type='rms_norm': GPT-2 has",
        ),
        (GPT, "hf", {"qkv_bias": False}, "qkv_bias=False: GPT-2 has qkv_bias=True"),
    ],
)
def test_models_without_counterpart_are_refused_by_what_differs(
    config, library, options, message
):
    model, config, variables = make(config, **options)
    with pytest.raises(ValueError, match=message):
        to_library(library, model, config, variables)


def test_models_of_volumes_are_refused():
    volumes = {**VIT, "image_shape": [2, 4, 4, 1]}
    model, config, variables = make(volumes, patch_size=(1, 2, 2))
    with pytest.raises(ValueError, match="timm has no model of volumes: export"):
        to_library("timm", model, config, variables)


@pytest.mark.quick("hf-options5-3-ViTForImageClassification")
@pytest.mark.parametrize(
    "library, options, size, expected",
    [
        ("timm", {"norm_eps": 1e-6}, 3, "vit_tiny_patch16_224"),
        ("timm", {"attention": "softmax()", "dropout": 0.5}, 0, "vit_xsmall_pa"),
        ("timm", {"num_registers": 2, "pool": "mean", "class_token": True}, 3, "xsm"),
        ("timm", {"mlp_dim": 11, "activation": "gelu_tanh"}, 3, "vit_xsmall"),
        ("timm", {"pool": "attention", "patch_size": [4, 2]}, 3, "vit_xsmall"),
        (
            "hf",
            {
                "head_dim": 3,
                "scan_layers": False,
                "position": " learned (antialias=True)",
            },
            3,
            "ViTForImageClassification",
        ),
        ("hf", {"qkv_bias": False, "patch_size": [4, 2]}, 0, "ViTModel"),
        (
            "hf",
            {"activation": "swiglu", "mlp_dim": 16, "pool": "cls_mean"},
            3,
            "Dinov2ForImageClassification",
        ),
        ("hf", {"num_registers": 1}, 0, "Dinov2WithRegistersModel"),
        (
            "hf",
            {"pool": "mean", "qkv_bias": True, "activation": "gelu_tanh"},
            3,
            "SiglipForImageClassification",
        ),
        ("hf", {"pool": "mean", "qkv_bias": True}, 0, "SiglipVisionModel"),
    ],
)
def test_options_that_the_library_has_are_written(library, options, size, expected):
    model, config, variables = make({**VIT, "num_classes": size}, **options)
    # Which are not those of other models.
    files = to_library(library, model, config, variables)
    named = files.config.get("architectures", [files.config.get("architecture")])
    assert expected in named[0]
    tensors = sum(x.size for x in files.tensors.values())
    ours = sum(x.size for x in jax.tree.leaves(variables))
    assert tensors >= ours


@pytest.mark.quick("converted")
@pytest.mark.parametrize("kind", ["converted", "trained"])
def test_names_of_the_classes_are_written(kind):
    model, config, variables = make(VIT, norm_eps=1e-6)
    names = {"class_names": ["cat", "dog", "owl"]}
    config |= names if kind == "converted" else {"data": names}
    files = to_library("hf", model, config, variables)
    assert files.config["id2label"] == {"0": "cat", "1": "dog", "2": "owl"}
    assert files.config["label2id"]["owl"] == 2
    files = to_library("timm", model, config, variables)
    assert files.config["label_names"] == ["cat", "dog", "owl"]


@pytest.mark.parametrize("resized, size", [(256, 224), (235, 224), (7, 6), (6, 6)])
@pytest.mark.parametrize("squash", [False, True])
def test_preprocessing_is_read_as_it_was_written(resized, size, squash, tmp_path):
    values = {"resized": resized, "squash": squash, "interpolation": "lanczos"}
    values |= {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.25, 2.0]}
    written = preprocessing.write_timm_preprocessing(values, size)
    settings = {"pretrained_cfg": written}
    assert preprocessing.timm_preprocessing(settings, size) == values
    written = preprocessing.write_hf_preprocessing(values, size)
    (tmp_path / preprocessing.PREPROCESSOR).write_text(json.dumps(written))
    values["floor_crop"] = True
    assert preprocessing.hf_preprocessing(tmp_path, size, "hf_vit") == values
