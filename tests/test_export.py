"""Exports: loaded again by other programs, with the logits of the trained model."""

import json
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

import relattn
from relattn import cli, data, export, training
from relattn.convert import convert
from relattn.data.tokenizers import load_tokenizer
from relattn.data.user_images import prepare_squares
from relattn.manifest import find_damage
from relattn.models.pretrained import save_pretrained
from relattn.models.safetensors import read_safetensors
from tests.data.test_tokenizers import write_tokenizer
from tests.helpers.export import PLATFORMS, unchecked_annotations
from tests.helpers.quick import quick_jit
from tests.models.test_targets import GPT, VIT, make
from tests.training.test_initialize import train

POINTS = {
    "model": {
        "name": "point_transformer",
        "dim": 6,
        "num_heads": 2,
        "num_layers": 1,
        "mlp_dim": 6,
    },
    "num_classes": 3,
    "point_shape": [5, 2, 1],
}


def save(folder, config, **options):
    """Saves a model; returns it."""
    model, config, variables = make(config, **options)
    variables = jax.tree.map(lambda x: x / 2, variables)
    save_pretrained(folder, config, variables)
    return quick_jit(model.apply), variables


def run_export(tmp_path, format):
    """Runs the command; returns the folder."""
    options = [f"--format={format}", f"--output={tmp_path / 'out'}"]
    with unchecked_annotations():
        cli.main(["export", str(tmp_path / "saved"), *options])
    folder = tmp_path / "out"
    assert find_damage(folder, ["config.json"]) == ""
    return folder


def draw(shape, vocab_size):
    rng = np.random.default_rng(3)
    if len(shape) > 2:
        return rng.normal(size=shape).astype(np.float32)
    return rng.integers(vocab_size, size=shape, dtype=np.int32)


MODELS = [
    (VIT, {"attention": "favor(num_features=5)"}, [(4, 4, 4, 1), (1, 4, 4, 1)]),
    # Of any length, and of one; sets of any number of points.
    (GPT, {"attention": "favor(num_features=5)"}, [(3, 5), (1, 2)]),
    (GPT, {"attention": "translution"}, [(3, 5), (1, 5)]),
    (POINTS, {"attention": "favor(num_features=5)"}, [(4, 5, 3), (1, 9, 3)]),
]


@pytest.mark.quick("vit")
@pytest.mark.parametrize(
    "config, options, shapes", MODELS, ids=["vit", "gpt", "fixed", "points"]
)
def test_stablehlo_is_loaded_again(config, options, shapes, tmp_path, capsys):
    pytest.importorskip("flatbuffers")
    apply, variables = save(tmp_path / "saved", config, **options)
    folder = run_export(tmp_path, "stablehlo")
    assert "the logits differ by" in capsys.readouterr().out
    content = (folder / "model.stablehlo").read_bytes()
    exported = jax.export.deserialize(bytearray(content))
    assert exported.platforms == PLATFORMS
    for shape in shapes:
        inputs = draw(shape, 7)
        found, expected = exported.call(inputs), apply(variables, inputs)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    written = json.loads((folder / "config.json").read_text())
    assert written == json.loads((tmp_path / "saved" / "config.json").read_text())


def test_a_model_of_the_hub_is_exported(tmp_path, monkeypatch, capsys):
    _, variables = save(tmp_path / "saved", VIT, norm_eps=1e-6)

    def snapshot_download(name, **options):
        assert name == "some-one/vit"
        return str(tmp_path / "saved")

    fake = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    output = str(tmp_path / "out")
    cli.main(["export", "hf:some-one/vit", "--format=hf", f"--output={output}"])
    assert "the parameters are the same" in capsys.readouterr().out
    written = read_safetensors(tmp_path / "out" / "model.safetensors")
    expected = variables["params"]["head"]["kernel"]
    np.testing.assert_array_equal(written["classifier.weight"].T, expected)
    assert (tmp_path / "out" / "config.json").read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("content", "token", "index"),
    [
        ("{}", None, None),
        ('{"added_tokens": [{"content": "<eos>", "id": 5}]}', "<eos>", 5),
        ('{"model": {"vocab": [["a", -1.0], ["</s>", -2.0]]}}', "</s>", 1),
    ],
)
def test_a_tokenizer_is_written_with_its_model(tmp_path, content, token, index):
    save(tmp_path / "saved", GPT)
    (tmp_path / "saved" / "tokenizer.json").write_text(content)
    folder = run_export(tmp_path, "hf")
    assert (folder / "tokenizer.json").read_text() == content
    files = {
        name: json.loads((folder / name).read_text())
        for name in ("config.json", "tokenizer_config.json", "manifest.json")
    }
    assert files["config.json"]["eos_token_id"] == index
    assert files["tokenizer_config.json"]["eos_token"] == token
    assert {*files.pop("manifest.json")} == {
        "model.safetensors",
        "tokenizer.json",
        *files,
    }


@pytest.mark.slow
def test_transformers_reads_the_tokenizer_of_an_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    save(tmp_path / "saved", GPT)
    file = write_tokenizer(tmp_path / "saved" / "tokenizer.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run_export(tmp_path, "hf"))
    ours = load_tokenizer(str(file))
    assert len(tokenizer) == ours.vocab_size
    assert tokenizer.eos_token_id == ours.end_of_text == 0


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors-timm", "hf"])
def test_weights_are_converted_back(format, tmp_path):
    apply, variables = save(tmp_path / "saved", VIT, norm_eps=1e-6)
    folder = run_export(tmp_path, format)
    source = {"safetensors-timm": "timm", "hf": "hf_vit"}[format]
    convert(source, folder / "model.safetensors", tmp_path / "again")
    again = relattn.load_pretrained(tmp_path / "again")
    inputs = draw((2, 4, 4, 1), 0)
    np.testing.assert_array_equal(
        apply(variables, inputs), quick_jit(again.model.apply)(again.variables, inputs)
    )


@pytest.mark.slow
def test_a_run_has_its_predictions_and_preprocessing(tmp_path):
    """The mean of two draws, whose logits are not those of the saved draw."""
    pytest.importorskip("flatbuffers")
    run = train(tmp_path / "run", eval_draws=2, model={"attention": "favor"})
    with unchecked_annotations():
        export.export(tmp_path / "run", tmp_path / "out", format="stablehlo")
    content = (tmp_path / "out" / "model.stablehlo").read_bytes()
    exported = jax.export.deserialize(bytearray(content))
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 5, 1), np.uint8)
    inputs = np.asarray(data.prepare_images(images, run.config.data, run.data))
    found = jax.nn.softmax(exported.call(inputs))
    expected = run.predict(images).probabilities
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    one = jax.nn.softmax(training.make_predict_fn(run, 1)(inputs))
    assert np.abs(one - expected).max() > 1e-4


def test_runs_are_prepared_as_described():
    """Images of the stored size; the run standardises them."""
    info = data.ImageInfo(
        "x", ("a",), (5, 5, 3), (0.1, 0.2, 0.3), (0.5, 2.0, 1.0), 7, ""
    )
    config = ConfigDict({"image_size": 5, "standardize": True})
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 5, 3), np.uint8)
    expected = data.prepare_images(images, config, info)
    values = data.library_preprocessing(config, info)
    found = prepare_squares(images, image_shape=(5, 5, 3), **values)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_formats_and_folders_are_checked_first(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"unknown --format 'onx': did you mean 'onnx'"
    ):
        export.export(tmp_path, tmp_path / "out", format="onx")
    with pytest.raises(ValueError, match="is the folder of the model: choose another"):
        export.export(tmp_path, f"{tmp_path}/../{tmp_path.name}", format="hf")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    for format, missing in (
        ("onnx", r"needs jax2onnx, .*save_pretrained, .* with 'relattn\[onnx\]'"),
        ("stablehlo", r"needs flatbuffers: pip install 'relattn\[stablehlo\]'"),
    ):
        with pytest.raises(ImportError, match=missing):
            export.export(tmp_path, tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


def test_models_of_gigabytes_are_refused(tmp_path, monkeypatch):
    """A file of flatbuffers or protobuf holds less than 2 GiB."""
    monkeypatch.setattr(export, "find_spec", lambda name: name)
    _, config, variables = make(VIT)
    save_pretrained(tmp_path / "saved", config, variables)
    arrays = jax.tree.leaves(variables)
    monkeypatch.setattr(export, "_MAX_BYTES", sum(array.nbytes for array in arrays))
    for format in ("stablehlo", "onnx"):
        with pytest.raises(ValueError, match=rf" GB, but a file of {format} holds"):
            export.export(tmp_path / "saved", tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("runs, count", [([], 0), (["a", "--workdir=b"], 2)])
def test_one_run_is_exported(runs, count, capsys):
    with pytest.raises(SystemExit):
        export.main([*runs, "--format=hf", "--output=x"])
    assert f"error: got {count} runs, expected one: name it" in capsys.readouterr().err


def test_another_function_is_not_written():
    """Such as that of a converter with an error."""
    model = SimpleNamespace(inputs="tokens")
    config = {"vocab_size": 7, "context_length": 5}
    source = export._Source(model, {}, config, lambda *_: lambda x: x[..., None])
    assert export._compare(source, lambda x: x[..., None], "ONNX", (5,)) == 0
    for wrong in (lambda x: x[..., None] + 1, lambda x: x[..., None] * np.nan):
        with pytest.raises(ValueError, match="the model in ONNX has other logits than"):
            export._compare(source, wrong, "ONNX", (5,))
    broken = source._replace(make_predict=lambda *_: lambda x: x[..., None] * np.nan)
    with pytest.raises(ValueError, match="the trained model has NaN or inf among its"):
        export._compare(broken, lambda x: x[..., None], "ONNX", (5,))
