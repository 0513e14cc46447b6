"""Conversion, saving and loading of pretrained models."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

import relattn
from relattn.convert import SOURCES, convert
from relattn.data import TextInfo, load_tokenizer
from relattn.export import export
from relattn.manifest import find_damage, write_manifest
from relattn.models import pretrained, variable_names
from relattn.models.safetensors import read_safetensors, write_safetensors
from relattn.training.errors import CheckpointError
from relattn.training.predict import read_tokenizer_file
from relattn.training.saved_run import load_run, load_text_run
from tests.data.test_tokenizers import write_tokenizer
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal_like, quick_jit

FIXTURES = Path(__file__).parents[1] / "pretrained"
# Largest difference, of the largest logit.
BOUND = 1e-4


def assert_logits_equal(found, expected):
    difference = np.abs(np.asarray(found) - expected).max()
    assert difference < BOUND * np.abs(expected).max()


CHECKPOINTS = [path.parent.name for path in sorted(FIXTURES.glob("*/config.json"))]


@pytest.mark.quick("hf_siglip", "hf_llama")
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_pytorch(name, tmp_path):
    (source,) = [source for source in SOURCES if name.startswith(source)]
    convert(source, FIXTURES / name / "model.safetensors", tmp_path)
    config = (tmp_path / "config.json").read_text()
    # The authors' eps follows a maximum over the batch; the logits have none.
    changed = config.replace(", eps=0.0001", "")
    if changed != config:
        (tmp_path / "config.json").write_text(changed)
        write_manifest(tmp_path, ["config.json", "model.safetensors"])
    loaded = relattn.load_pretrained(tmp_path)
    assert repr(loaded) == f"Pretrained({type(loaded.model).__name__}, '{tmp_path}')"
    expected = read_safetensors(FIXTURES / name / "expected.safetensors")
    logits = quick_jit(loaded.model.apply)(loaded.variables, expected["inputs"])
    assert_logits_equal(logits, expected["logits"])


def test_positions_interpolate_as_timm(tmp_path):
    convert("timm", FIXTURES / "timm" / "model.safetensors", tmp_path)
    loaded = relattn.load_pretrained(tmp_path, image_size=(10, 14))
    with pytest.raises(
        ValueError, match="does not say how the model's images are prep"
    ):
        loaded.preprocess(np.zeros((1, 10, 14, 3), np.uint8))
    assert loaded.config["image_shape"] == [10, 14, 3]
    expected = read_safetensors(FIXTURES / "timm" / "expected.safetensors")
    inputs = jnp.asarray(expected["large_inputs"])
    logits = loaded.model.apply(loaded.variables, inputs)
    assert_logits_equal(logits, expected["large_logits"])


PHOTO = np.random.default_rng(3).integers(0, 256, (9, 13, 3)).astype(np.uint8)
MEAN, STD = [0.5, 0.25, 0.75], [0.5, 0.2, 0.25]
CENTRAL = {"resized": 9, "squash": False, "interpolation": "bicubic"}
FLOORED = {**CENTRAL, "floor_crop": True}
SQUASHED = {**FLOORED, "resized": 6, "squash": True, "interpolation": "bilinear"}


def by_pillow(pixels, resized, squash, interpolation, floor_crop=False):
    """Resizes and crops as torchvision, or transformers, with images of Pillow."""
    size = (resized, resized) if squash else (resized * 13 // 9, resized)
    image = Image.fromarray(pixels).resize(
        size, Image.Resampling[interpolation.upper()]
    )
    left, top = ((x - 6) // 2 if floor_crop else round((x - 6) / 2) for x in size)
    pixels = np.asarray(image.crop((left, top, left + 6, top + 6)), np.float64)
    return (pixels / 255 - MEAN) / STD


@pytest.mark.quick("hf_clip")
@pytest.mark.parametrize(
    "source, file, settings, expected",
    [
        (
            "timm",
            "config.json",
            {
                "num_heads": 3,
                "pretrained_cfg": {
                    "mean": MEAN,
                    "std": STD,
                    "crop_pct": 0.66,
                    "interpolation": "bicubic",
                },
            },
            CENTRAL,
        ),
        (
            "hf_siglip",
            "preprocessor_config.json",
            {
                "do_resize": True,
                "image_mean": MEAN,
                # As some versions wrote it.
                "image_processor_type": "ViTFeatureExtractor",
                "image_std": STD,
                "resample": 2,
                "rescale_factor": 0.00392156862745098,
                "size": {"height": 6, "width": 6},
            },
            SQUASHED,
        ),
        (
            "hf_clip",
            "preprocessor_config.json",
            {
                "crop_size": 6,
                "do_center_crop": True,
                "image_mean": MEAN,
                "image_std": STD,
                "resample": 3,
                "size": 9,
            },
            FLOORED,
        ),
        (
            "hf_dinov2",
            "preprocessor_config.json",
            {
                "crop_size": {"height": 6, "width": 6},
                "image_mean": MEAN,
                "image_std": STD,
                "resample": 3,
                "size": {"shortest_edge": 9},
            },
            FLOORED,
        ),
        # A number is both sides for DeiT, and the shorter one for DINOv2 by default.
        (
            "hf_siglip",
            "preprocessor_config.json",
            {
                "crop_size": 6,
                "do_center_crop": True,
                "feature_extractor_type": "DeiTFeatureExtractor",
                "image_mean": MEAN,
                "image_std": STD,
                "resample": 3,
                "size": 9,
            },
            {**FLOORED, "squash": True},
        ),
        (
            "hf_dinov2",
            "preprocessor_config.json",
            {
                "crop_size": 6,
                "image_mean": MEAN,
                "image_std": STD,
                "resample": 3,
                "size": 9,
            },
            FLOORED,
        ),
        # Nothing is cropped: what the model sees is the whole image.
        (
            "hf_clip",
            "preprocessor_config.json",
            {
                "do_center_crop": None,
                "image_mean": MEAN,
                "image_std": STD,
                "resample": 2,
                "size": {"height": 9, "width": 9},
            },
            SQUASHED,
        ),
        # The file prepares 12 pixels, and the model sees 6.
        (
            "hf_dinov2",
            "processor_config.json",
            {
                "processor_class": "AutoProcessor",
                "image_processor": {
                    "crop_size": {"height": 12, "width": 12},
                    "do_center_crop": True,
                    "image_mean": MEAN,
                    "image_std": STD,
                    "resample": 3,
                    "size": {"shortest_edge": 18},
                },
            },
            FLOORED,
        ),
    ],
    ids=[
        "timm",
        "hf_siglip",
        "hf_clip",
        "hf_dinov2",
        "both_sides",
        "short_side",
        "whole",
        "scaled",
    ],
)
def test_images_are_prepared_as_the_checkpoint_says(
    source, file, settings, expected, tmp_path
):
    shutil.copytree(FIXTURES / source, tmp_path / "in")
    (tmp_path / "in" / file).write_text(json.dumps(settings))
    convert(source, tmp_path / "in" / "model.safetensors", tmp_path / "out")
    loaded = relattn.load_pretrained(tmp_path / "out")
    stored = {**expected, "mean": MEAN, "std": STD}
    assert loaded.config["preprocessing"] == stored
    pixels = by_pillow(PHOTO, **expected)
    for images in (PHOTO, Image.fromarray(PHOTO)):
        found = loaded.preprocess(images)
        np.testing.assert_allclose(found, pixels[None], atol=1e-5)
    large = relattn.load_pretrained(tmp_path / "out", image_size=12)
    assert large.config["preprocessing"]["resized"] == 2 * expected["resized"]
    assert large.preprocess(PHOTO).shape == (1, 12, 12, 3)
    oblong = relattn.load_pretrained(tmp_path / "out", image_size=(12, 6))
    with pytest.raises(ValueError, match="squares, but the model sees 6x12 pixels"):
        oblong.preprocess(PHOTO)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"do_resize": False}, "do_resize=False, .* remove the file"),
        ({"rescale_factor": 1.0}, "rescale_factor=1.0, and .* divides by 255"),
        ({"size": {"shortest_edge": 5}}, "expected one side of at least 6 pixels"),
        ({"size": {"height": 8, "width": 9}}, "expected one side of at least 6 pix"),
        (
            {"do_center_crop": True, "crop_size": {"height": 6, "width": 4}},
            "crop_size=.* crops squares: remove",
        ),
        ({"resample": None}, "has no resample, whose default depends on the class"),
        ({"size": None}, "has no size, whose default"),
        ({"crop_size": None}, "has no crop_size, whose default"),
        ({"do_normalize": None}, "do_normalize=False, .* remove the file"),
        ({"do_center_crop": False}, "size=7 and crops nothing, so .* remove the file"),
        (
            {"image_processor_type": "ViTImageProcessor", "default_to_square": False},
            "size=7 and crops nothing",
        ),
        ({"resample": 9}, "resample=9"),
        (
            {"size": {"shortest_edge": 7, "longest_edge": 9}},
            "expected one side of at l",
        ),
        ({"crop_pct": 0.8}, "preprocessor_config.json .* unknown: crop_pct; remove"),
        (
            {"image_processor_type": "ConvNextImageProcessor"},
            "image_processor_type='ConvNextIm.*, which relattn's preprocessing does",
        ),
        ({"do_pad": True}, "do_pad=True"),
        ({"image_mean": "0.5"}, "image_mean='0.5'"),
    ],
)
def test_other_preprocessing_is_refused(settings, message, tmp_path):
    shutil.copytree(FIXTURES / "hf_clip", tmp_path / "in")
    path = tmp_path / "in" / "preprocessor_config.json"
    known = {"size": 7, "crop_size": 6, "resample": 3}
    known |= {"image_mean": MEAN, "image_std": STD}
    path.write_text(json.dumps({**known, **settings}))
    with pytest.raises(ValueError, match=message):
        convert("hf_clip", tmp_path / "in" / "model.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_channels_are_adapted_as_by_timm(tmp_path):
    """Grey images give what their copies in three channels give."""
    settings = {"mean": MEAN, "std": STD, "num_heads": 3}
    shutil.copytree(FIXTURES / "timm", tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps(settings))
    convert("timm", tmp_path / "in" / "model.safetensors", tmp_path / "out")
    three, one, four = (
        relattn.load_pretrained(tmp_path / "out", channels=channels)
        for channels in (3, 1, 4)
    )
    assert one.config["image_shape"] == [6, 6, 1]
    assert one.config["preprocessing"]["mean"] == [0.5]
    assert one.preprocess(PHOTO[..., :1]).shape == (1, 6, 6, 1)
    grey = np.random.default_rng(0).normal(size=(2, 6, 6, 1)).astype("f4")
    expected = quick_jit(three.model.apply)(three.variables, grey.repeat(3, axis=-1))
    assert_logits_equal(quick_jit(one.model.apply)(one.variables, grey), expected)
    # timm's adapt_input_conv: channels 0, 1, 2, 0, times 3 / 4.
    kernel = three.variables["params"]["embedding"]["kernel"].reshape(4, 3, 15)
    found = four.variables["params"]["embedding"]["kernel"].reshape(4, 4, 15)
    np.testing.assert_allclose(found, kernel[:, [0, 1, 2, 0]] * 0.75, rtol=1e-6)
    with pytest.raises(ValueError, match="channels=0 needs a model whose embedding"):
        relattn.load_pretrained(tmp_path / "out", channels=0)


def rewrite(folder, change):
    """Copies timm's fixture, with changed tensors."""
    shutil.copytree(FIXTURES / "timm", folder, dirs_exist_ok=True)
    path = folder / "model.safetensors"
    tensors = {name: np.array(x) for name, x in read_safetensors(path).items()}
    change(tensors)
    write_safetensors(path, tensors)
    return path


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.pop("blocks.1.norm2.bias"), r"missing blocks\.1\.norm2\.bias"),
        (lambda x: x.pop("pos_embed"), "missing pos_embed"),
        (lambda x: x.update(extra=np.ones(3)), "unexpected extra"),
        (
            lambda x: x.update({"norm.bias": np.ones(14, np.float32)}),
            r"params\.norm\.bias \(14,\) instead of \(15,\)",
        ),
        (
            lambda x: x.update({"blocks.0.attn.qkv.bias": np.ones(44)}),
            r"wrong shape: blocks\.0\.attn\.qkv\.bias \(44,\)",
        ),
        (lambda x: x.update(dist_token=np.ones((1, 1, 15))), "distillation token"),
    ],
)
def test_other_tensors_are_refused(change, message, tmp_path):
    path = rewrite(tmp_path / "in", change)
    with pytest.raises(ValueError, match=message):
        convert("timm", path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", [0, 7, 100, 17000])
def test_truncated_file_is_refused(keep, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((FIXTURES / "timm" / "model.safetensors").read_bytes()[:keep])
    with pytest.raises(ValueError, match="truncated"):
        read_safetensors(path)


def test_saved_weights_of_another_model_are_refused(tmp_path):
    convert("timm", FIXTURES / "timm" / "model.safetensors", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["num_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_manifest(tmp_path, ["config.json", "model.safetensors"])
    with pytest.raises(ValueError, match=r"missing params\.layers\.2\.attention\."):
        relattn.load_pretrained(tmp_path)


def test_variables_of_another_model_are_not_saved(tmp_path):
    variables = save_gpt(tmp_path).variables
    other = {**GPT_CONFIG, "vocab_size": 7}
    for config, given, message in (
        (GPT_CONFIG, variables["params"], "missing params.* unexpected blocks?_0"),
        (other, variables, r"another shape params.embedding.embedding \(6, 4\) inst"),
    ):
        with pytest.raises(ValueError, match=f"variables does not fit .*{message}"):
            pretrained.save_pretrained(tmp_path / "new", config, given)
    assert not (tmp_path / "new").exists()


@unchecked_annotations()
def test_changes_of_another_type_are_refused(tmp_path):
    convert("timm", FIXTURES / "timm" / "model.safetensors", tmp_path)
    for change, message in (
        ({"model": "favor"}, "model must be a dict of options, such as .*, got 'fa"),
        ({"model": {"image_size": 8}}, "image_size belongs to its data: pass image_s"),
        (
            {"image_size": "12"},
            "image_size must be a whole number of pixels, or .* '12",
        ),
        ({"image_size": (8, 8, 1)}, r"or two \(height and width\), got \(8, 8, 1\)$"),
    ):
        with pytest.raises(ValueError, match=message):
            relattn.load_pretrained(tmp_path, **change)


@pytest.mark.quick("model0")
@pytest.mark.parametrize(
    "model",
    [
        {"attention": "softmax", "position": "learned + rope2d_mixed"},
        {"attention": "favor", "position": "none"},
        {"attention": "translution", "num_relative_layers": 1},
        {"attention": "routing(clusters=2)", "position": "learned"},
    ],
)
def test_every_variable_survives_saving(model, tmp_path):
    sizes = {"dim": 6, "num_heads": 3, "num_layers": 2, "mlp_dim": 7, "patch_size": 2}
    config = {"model": {"name": "vit", **sizes, **model}}
    config |= {"num_classes": 5, "image_shape": [4, 6, 1]}
    module = pretrained.build(config)
    images = jax.random.normal(jax.random.key(1), (2, 4, 6, 1))
    variables = jax.jit(module.init)(jax.random.key(0), images)
    pretrained.save_pretrained(tmp_path, config, variables)
    loaded = relattn.load_pretrained(tmp_path)
    carried = {name: variables[name] for name in loaded.variables}
    jax.tree.map(np.testing.assert_array_equal, carried, loaded.variables)


@unchecked_annotations()
def test_configurations_of_numpy_and_ml_collections_are_saved(tmp_path):
    model = {"name": "vit", "dim": 6, "num_heads": 3, "num_layers": 1, "patch_size": 2}
    config = {"model": ConfigDict(model), "num_classes": np.int64(5)}
    config["image_shape"] = np.array([4, 6, 1])
    variables = jax.eval_shape(
        pretrained.build(config).init, jax.random.key(0), jnp.ones((1, 4, 6, 1))
    )
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), variables)
    pretrained.save_pretrained(tmp_path, config, variables)
    size, half = np.array([6, 8]), {"dtype": jnp.bfloat16}
    loaded = relattn.load_pretrained(tmp_path, image_size=size, model=half)
    pretrained.save_pretrained(tmp_path, loaded.config, loaded.variables)
    saved = json.loads((tmp_path / "config.json").read_text())
    model["dtype"] = "bfloat16"
    assert saved == {"model": model, "num_classes": 5, "image_shape": [6, 8, 1]}


@pytest.mark.slow
def test_another_attention_keeps_parameters_and_draws_features(tmp_path):
    sizes = {"dim": 6, "num_heads": 3, "num_layers": 2, "mlp_dim": 7, "patch_size": 2}
    config = {"model": {"name": "vit", "attention": "favor", **sizes}}
    config |= {"num_classes": 5, "image_shape": [4, 6, 1]}
    images = jax.random.normal(jax.random.key(1), (2, 4, 6, 1))
    variables = jax.jit(pretrained.build(config).init)(jax.random.key(2), images)
    pretrained.save_pretrained(tmp_path, config, variables)
    changes = {"precision": "highest", "attention": "favor"}
    precise = relattn.load_pretrained(tmp_path, model=changes)
    chex.assert_trees_all_equal(precise.variables, dict(variables))
    softmax = relattn.load_pretrained(tmp_path, model={"attention": "softmax"})
    assert softmax.config["model"]["attention"] == softmax.model.attention == "softmax"
    params = {"params": variables["params"]}
    chex.assert_trees_all_equal(
        variable_names.flatten(softmax.model, softmax.variables),
        variable_names.flatten(precise.model, params),
    )
    more = relattn.load_pretrained(
        tmp_path, model={"attention": "favor(num_features=7)"}
    )
    chex.assert_trees_all_equal(more.variables["params"], params["params"])
    drawn = jax.tree.leaves(more.variables["random_features"])
    assert {leaf.shape[-2] for leaf in drawn} == {7}
    chex.assert_tree_all_finite(more.model.apply(more.variables, images))
    with pytest.raises(ValueError, match=r"does not fit the model: missing .*k_table"):
        relattn.load_pretrained(tmp_path, model={"attention": "translution"})
    with pytest.raises(ValueError, match=r"^unknown model name 'vti': .*'vit'"):
        relattn.load_pretrained(tmp_path, model={"name": "vti"})


def test_the_same_attention_keeps_its_features(tmp_path):
    """Also where the file leaves it out, or has another spelling of it."""
    sizes = {"dim": 6, "num_heads": 3, "num_layers": 1, "mlp_dim": 7}
    config = {"model": {"name": "performer", "position": "none", **sizes}}
    config |= {"num_classes": 5, "image_shape": [1, 2, 1]}
    variables = pretrained.abstract(pretrained.build(config), config)
    variables = jax.tree.map(lambda x: np.full(x.shape, 0.5, x.dtype), variables)
    pretrained.save_pretrained(tmp_path, config, variables)
    loaded = relattn.load_pretrained(tmp_path, model={"attention": "favor()"})
    chex.assert_trees_all_equal(loaded.variables, variables)


def test_options_that_change_the_weights_name_a_fix(tmp_path):
    sizes = {"dim": 6, "num_heads": 3, "num_layers": 1, "mlp_dim": 7, "patch_size": 2}
    config = {"model": {"name": "vit", **sizes}}
    config |= {"num_classes": 5, "image_shape": [4, 6, 1]}
    model = pretrained.build(config)
    variables = model.init(jax.random.key(2), jnp.zeros((1, 4, 6, 1)))
    pretrained.save_pretrained(tmp_path, config, variables)
    with pytest.raises(
        ValueError, match=r"num_classes belongs to its data: .*init_fro"
    ):
        relattn.load_pretrained(tmp_path, model={"num_classes": 3})
    with pytest.raises(
        ValueError, match=r"leave out of model= what .*'dim': 12.*init_f"
    ):
        relattn.load_pretrained(tmp_path, model={"dim": 12})
    with pytest.raises(ValueError, match="'gpt' is for tokens and needs vocab_size"):
        pretrained.build({"model": {"name": "gpt"}})
    for config in ({}, {"model": None}, {"model": {"dim": 8}}):
        with pytest.raises(ValueError, match="the configuration has no model: pass"):
            pretrained.build(config)


@pytest.mark.slow
def test_weights_are_saved_in_half_precision(tmp_path):
    config = {"model": {"name": "vit", "dim": 6, "num_heads": 3, "num_layers": 1}}
    config["model"] |= {"mlp_dim": 7, "patch_size": 2, "attention": "favor"}
    config |= {"num_classes": 5, "image_shape": [4, 6, 1]}
    images = jax.random.normal(jax.random.key(1), (2, 4, 6, 1))
    variables = jax.jit(pretrained.build(config).init)(jax.random.key(0), images)
    pretrained.save_pretrained(tmp_path, config, variables, dtype="float16")
    stored = read_safetensors(tmp_path / "model.safetensors").values()
    assert {x.dtype for x in stored if x.dtype.kind == "f"} == {np.dtype(np.float16)}
    loaded = relattn.load_pretrained(tmp_path).variables["params"]
    rounded = jax.tree.map(lambda x: x.astype("float16"), variables["params"])
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
    chex.assert_trees_all_equal_dtypes(loaded, variables["params"])
    # Whether or not other numbers are NaN.
    large = jax.tree.map(
        lambda x: jnp.full_like(x, 1e5).at[(0,) * x.ndim].set(jnp.nan),
        variables["params"],
    )
    with pytest.raises(ValueError, match=r"params\.\S+ is too large for float16"):
        pretrained.save_pretrained(
            tmp_path, config, variables | {"params": large}, dtype="float16"
        )


@pytest.mark.parametrize(
    "position", ["fourier_bias + fourier_values", "circulant_string"]
)
def test_frequencies_of_positions_are_not_rounded(tmp_path, position):
    """A token at position 1,000 would be turned by a radian."""
    config = {"model": {"name": "gpt", "dim": 6, "num_heads": 2, "num_layers": 1}}
    config["model"] |= {"mlp_dim": 7, "position": position}
    config |= {"vocab_size": 11, "context_length": 5}
    variables = normal_like(pretrained.abstract(pretrained.build(config), config))
    pretrained.save_pretrained(tmp_path, config, variables, dtype="bfloat16")
    loaded = relattn.load_pretrained(tmp_path).variables["params"]
    same = {
        jax.tree_util.keystr(path[-1:]): bool((old == new).all())
        for (path, old), new in zip(
            jax.tree_util.tree_leaves_with_path(variables["params"]),
            jax.tree.leaves(loaded),
            strict=True,
        )
    }
    exact = {name for name, is_same in same.items() if is_same}
    assert exact == {name for name in same if "frequencies" in name or "circ" in name}


def read_by_the_format(path):
    """Reads a file by the documentation of its format."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    names = {"F32": "float32", "BF16": "bfloat16", "I64": "int64"}
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        first, last = (start + offset for offset in entry["data_offsets"])
        values = np.frombuffer(data[first:last], jnp.dtype(names[entry["dtype"]]))
        tensors[name] = values.reshape(entry["shape"])
    return tensors


def test_files_have_the_format(tmp_path):
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {
        "transposed": values.T,
        "scalar": np.array(7),
        "half": jnp.asarray(values, jnp.bfloat16),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = tmp_path / "model.safetensors"
    write_safetensors(path, tensors)
    for found in (read_by_the_format(path), read_safetensors(path)):
        chex.assert_trees_all_equal(found, tensors)
        chex.assert_trees_all_equal_dtypes(found, tensors)
    # As readable as other files; a part of a file does not remain.
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {*tmp_path.iterdir()} == {path, tmp_path / "other"}


def write_header(path, header):
    """Writes a file with this header, in JSON or as bytes, and 8 bytes of values."""
    if not isinstance(header, bytes):
        header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"{}}",
        b"[" * 10000,
        [1],
        {"a": 3},
        {"a": {**ENTRY, "shape": [-2]}},
        {"a": {**ENTRY, "shape": [2**62, 4]}},
        {"a": {**ENTRY, "dtype": "X" * 10000}},
        {"a": {**ENTRY, "data_offsets": [4, 12]}},
        {"a": ENTRY, "b": ENTRY},
    ],
    ids=range(9),
)
def test_damaged_file_is_refused(header, tmp_path):
    path = tmp_path / "model.safetensors"
    write_header(path, header)
    message = f"{path} is truncated, damaged or not a safetensors file: copy or save it"
    with pytest.raises(ValueError, match=message) as raised:
        read_safetensors(path)
    assert len(str(raised.value)) < 700
    assert len(str(raised.value).splitlines()) == 1


def test_file_with_a_dtype_that_numpy_lacks_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    write_header(path, {"a": {**ENTRY, "dtype": "F8_E4M3", "shape": [8]}})
    with pytest.raises(ValueError, match=f"{path} holds .*float8: save .* as float32"):
        read_safetensors(path)


@pytest.mark.quick("int8", "uint8", "bool")
@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "bool", "complex64", np.int32, "float8_e4m3fn", "flaot"]
)
def test_weights_are_saved_as_floats_only(dtype, tmp_path):
    config = {"model": {"name": "vit", "dim": 6, "num_heads": 3, "num_layers": 1}}
    config["model"] |= {"mlp_dim": 7, "patch_size": 2, "attention": "softmax"}
    config |= {"num_classes": 5, "image_shape": [4, 6, 1]}
    module = pretrained.build(config)
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 4, 6, 1)))
    variables = jax.tree.map(lambda x: np.full(x.shape, 0.4, x.dtype), variables)
    with pytest.raises(ValueError, match="must be one of float16, bfloat16, float32"):
        pretrained.save_pretrained(tmp_path / "out", config, variables, dtype=dtype)
    assert not (tmp_path / "out").exists()


def test_integers_are_not_loaded_as_weights(tmp_path):
    convert("timm", FIXTURES / "timm" / "model.safetensors", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = dict(read_safetensors(path))
    tensors["params.norm.bias"] = tensors["params.norm.bias"].astype(np.int8)
    write_safetensors(tmp_path / "new", tensors)
    (tmp_path / "new").replace(path)
    write_manifest(tmp_path, ["config.json", "model.safetensors"])
    with pytest.raises(ValueError, match=r"not floats params\.norm\.bias \(int8\)"):
        relattn.load_pretrained(tmp_path)


GPT_CONFIG = {
    "model": {"name": "gpt", "dim": 4, "num_heads": 1, "num_layers": 1, "mlp_dim": 4},
    "vocab_size": 6,
    "context_length": 3,
    "data": {
        "kind": "tokens",
        "name": "letters",
        "tokenizer": "hf:0123456789abcdef",
        "vocab_size": 6,
        "context_length": 3,
        "num_train": 7,
        "origin": "here",
    },
}


def save_gpt(folder, tokenizer=None, name=GPT_CONFIG["data"]["tokenizer"]):
    """Saves a model of text, and loads it."""
    config = {**GPT_CONFIG, "data": {**GPT_CONFIG["data"], "tokenizer": name}}
    like = pretrained.abstract(pretrained.build(config), config)
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    pretrained.save_pretrained(folder, config, variables, tokenizer=tokenizer)
    return relattn.load_pretrained(folder)


def test_the_folder_of_a_model_may_be_in_a_home_directory(tmp_path, monkeypatch):
    config = {"model": GPT_CONFIG["model"], "vocab_size": 256, "context_length": 3}
    config["tokenizer"] = "bytes"
    like = pretrained.abstract(pretrained.build(config), config)
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
    monkeypatch.setenv("HOME", str(tmp_path))
    pretrained.save_pretrained("~/gpt", config, variables)
    assert relattn.load_pretrained("~/gpt").folder == tmp_path / "gpt"
    run = load_text_run("~/gpt")
    assert run.workdir == tmp_path / "gpt"
    run.save_pretrained("~/saved")
    assert (tmp_path / "saved" / "README.md").is_file()
    with pytest.raises(CheckpointError, match=rf"no complete checkpoint in {tmp_path}"):
        load_run("~/run")


def test_the_file_of_a_tokenizer_is_saved_and_verified(tmp_path):
    save_gpt(tmp_path, b"{}")
    assert (tmp_path / "tokenizer.json").read_bytes() == b"{}"
    (tmp_path / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(ValueError, match=r"tokenizer.json is damaged .*: copy the fol"):
        relattn.load_pretrained(tmp_path)


def test_the_saved_tokenizer_encodes_as_in_training(tmp_path):
    pytest.importorskip("tokenizers")
    content = write_tokenizer(tmp_path / "tokenizer.json").read_bytes()
    expected = load_tokenizer(str(tmp_path / "tokenizer.json"))
    loaded = save_gpt(tmp_path / "saved", content, expected.name)
    tokenizer = loaded.load_tokenizer()
    assert tokenizer.encode("ab a").tolist() == expected.encode("ab a").tolist()
    other = write_tokenizer(tmp_path / "b", added_tokens=[]).read_bytes()
    stale = save_gpt(tmp_path / "saved", other, expected.name)
    with pytest.raises(ValueError, match=r"is the tokenizer 'hf:.*', not 'hf:"):
        stale.load_tokenizer()
    # The folder of the file may be another.
    assert stale.load_tokenizer(str(tmp_path)).name == expected.name


def test_a_sentence_says_where_a_tokenizer_is_missing(tmp_path):
    loaded = save_gpt(tmp_path)
    message = rf"{tmp_path} has no tokenizer.json: copy that of the training into it, "
    with pytest.raises(FileNotFoundError, match=message):
        loaded.load_tokenizer()
    images = pretrained.Pretrained(relattn.ViT(3), {}, {"image_shape": [4, 4, 1]})
    with pytest.raises(ValueError, match="^ViT reads no text: use preprocess"):
        images.load_tokenizer()
    config = {key: GPT_CONFIG[key] for key in ("model", "vocab_size")}
    converted = pretrained.Pretrained(loaded.model, {}, config)
    with pytest.raises(ValueError, match="does not name the tokenizer of the model: c"):
        converted.load_tokenizer()


@pytest.mark.parametrize("missing", [False, True])
def test_a_run_hands_on_the_file_of_its_tokenizer(missing, tmp_path):
    pytest.importorskip("tokenizers")
    file = write_tokenizer(tmp_path / "tokenizer.json")
    content, name = file.read_bytes(), load_tokenizer(str(file)).name
    data = TextInfo("letters", name, 6, 3, 7, "here")
    config = ConfigDict({"data": {"data_dir": str(tmp_path)}})
    run = SimpleNamespace(data=data, config=config)
    if not missing:
        assert read_tokenizer_file(run) == content
        return
    file.unlink()
    with pytest.warns(UserWarning, match=r"without its tokenizer.json \(.*missing"):
        assert read_tokenizer_file(run) is None


def copy_gpt2(folder, tokenizer):
    shutil.copytree(FIXTURES / "hf_gpt2", folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return folder / "model.safetensors"


def test_the_tokenizer_beside_a_checkpoint_is_converted_and_exported(tmp_path):
    content = b'{"model": {"type": "BPE"}}'
    path = copy_gpt2(tmp_path / "theirs", content)
    config = convert("hf_gpt2", path, tmp_path / "ours")
    # Computed by sha256sum.
    assert config["tokenizer"] == "hf:8bb2d91febcec5f8"
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == content
    checked = find_damage(tmp_path / "ours", ["tokenizer.json"])
    assert checked == ""
    assert pretrained.read_config(tmp_path / "ours")[0] == config
    export(tmp_path / "ours", tmp_path / "back", format="hf")
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == content


def test_another_file_is_not_taken_for_a_tokenizer(tmp_path):
    path = copy_gpt2(tmp_path / "theirs", b"[]")
    with pytest.raises(ValueError, match="tokenizer.json has .* must be an object"):
        convert("hf_gpt2", path, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused():
    config = {"vocab_size": 6, "tokenizer": "bytes"}
    loaded = pretrained.Pretrained(relattn.GPT(6, 3), {}, config)
    message = "vocabulary of 6 tokens, but its tokenizer 'bytes' has 256: remove those"
    with pytest.raises(ValueError, match=message):
        loaded.load_tokenizer()


def test_other_runs_have_no_file_of_a_tokenizer():
    for data in (TextInfo("a", "bytes", 256, 3, 7, "here"), None):
        assert read_tokenizer_file(SimpleNamespace(data=data)) is None
