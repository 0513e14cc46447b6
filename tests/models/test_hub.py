"""Models of the Hugging Face hub, from its cache, and cards that it takes."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import relattn
from relattn.models import hub, pretrained
from relattn.models.model_card import model_card
from relattn.training import initialize

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model": {"name": "vit", "dim": 8, "num_heads": 2, "num_layers": 1, "mlp_dim": 4},
    "num_classes": 3,
    "image_shape": [32, 32, 1],
}
FILES = (pretrained.CONFIG, pretrained.WEIGHTS, pretrained.MANIFEST)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = pretrained.build(CONFIG)
    rng = np.random.default_rng(7)
    variables = jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(x.dtype),
        pretrained.abstract(model, CONFIG),
    )
    pretrained.save_pretrained(folder, CONFIG, variables)
    return folder, variables


def check_equal(loaded, variables):
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, variables)


def test_the_folder_that_the_hub_returns_is_loaded(saved, monkeypatch):
    folder, variables = saved
    calls = []

    def snapshot_download(*args, **kwargs):
        calls.append((args, kwargs))
        return str(folder)

    fake = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    check_equal(relattn.load_pretrained("hf:some-one/vit.1"), variables)
    hub.download("hf:some-one/vit.1@v1.0/a", FILES)
    small = [pretrained.CONFIG, pretrained.MANIFEST, pretrained.TOKENIZER]
    assert calls == [
        (("some-one/vit.1",), {"revision": None, "allow_patterns": small}),
        (
            ("some-one/vit.1",),
            {"revision": None, "allow_patterns": [*small, pretrained.WEIGHTS]},
        ),
        (("some-one/vit.1",), {"revision": "v1.0/a", "allow_patterns": [*FILES]}),
    ]
    # `config.init_from` takes the same names; the model needs no weights.
    del calls[:-1]
    assert initialize.read_source_config("hf:some-one/vit.1") == CONFIG
    assert calls.pop()[1]["allow_patterns"] == small
    # A path is never taken for a name of the hub.
    with pytest.raises(FileNotFoundError, match="holds no model"):
        relattn.load_pretrained(Path("hf:some-one/vit"))
    assert len(calls) == 1


def test_a_sentence_says_that_huggingface_hub_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = r"^hf:owner/name needs huggingface_hub: pip install 'relattn\[hf\]'$"
    with pytest.raises(ImportError, match=message):
        relattn.load_pretrained("hf:owner/name")


@pytest.mark.parametrize(
    "name",
    ["hf:", "hf:vit", "hf:/vit", "hf:a/b/c", "hf:a/b@", "hf:a/b c", "hf:https://x/a/b"],
)
def test_other_names_are_refused(name):
    message = (
        rf"^{re.escape(repr(name))} is not a model on the hub: write hf:owner/name"
    )
    with pytest.raises(ValueError, match=message):
        relattn.load_pretrained(name)


TIMM = {"architecture": "vit_base_patch16_224.augreg_in1k", "num_classes": 1000}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "^hf:a/b holds no model: it has no config.json; name a folder"),
        ({}, "^hf:a/b/config.json describes no model of relattn: it has no model$"),
        ({"model_type": "bert"}, "it has model_type='bert', which relattn cannot conv"),
        ({"model_type": ["bert"]}, r"it has model_type=\['bert'\], which relattn can"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
            "has model_type='mistral': .*, relattn convert --source=hf_llama --checkp",
        ),
        (TIMM, "it has architecture='vit_base_.*, relattn convert --source=timm --ch"),
        ({"architecture": "resnet50"}, "'resnet50', which relattn cannot convert$"),
        ({"model": {"name": "bert"}}, "unknown model.name 'bert'"),
        ({**CONFIG, "model": {**CONFIG["model"], "depth": 3}}, "depth"),
        ({**CONFIG, "model": {**CONFIG["model"], "num_heads": 3}}, "^hf:a/b/config"),
    ],
)
def test_another_model_is_refused_before_its_weights_are_downloaded(
    config, message, tmp_path, monkeypatch
):
    def snapshot_download(name, *, allow_patterns, **options):
        assert not {pretrained.WEIGHTS, "*"} & {*allow_patterns}
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    fake = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        relattn.load_pretrained("hf:a/b")


def test_errors_of_the_hub_become_sentences(monkeypatch):
    class RepositoryNotFoundError(OSError):
        pass

    def snapshot_download(*args, **kwargs):
        raise RepositoryNotFoundError("404 Client Error.\n\nRepository Not Found")

    fake = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    message = (
        r"^hf:a/b cannot be downloaded \(RepositoryNotFoundError: 404 .* Not Found\): "
        r"check the name and, if the model is private, log in by `hf auth login`$"
    )
    with pytest.raises(FileNotFoundError, match=message):
        relattn.load_pretrained("hf:a/b")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns the empty cache of huggingface_hub, which must use no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def add(cache, folder):
    """Adds a model to the cache as a download does."""
    home = cache / "models--owner--name"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    (home / "blobs").mkdir()
    snapshot = home / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for number, name in enumerate(FILES):
        blob = home / "blobs" / f"{number:040x}"
        shutil.copy(folder / name, blob)
        (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
    return home


def test_a_model_of_the_cache_is_loaded_without_a_network(cache, saved):
    folder, variables = saved
    home = add(cache, folder)
    check_equal(relattn.load_pretrained("hf:owner/name"), variables)
    check_equal(relattn.load_pretrained(f"hf:owner/name@{COMMIT}"), variables)
    blob = home / "blobs" / f"{FILES.index(pretrained.WEIGHTS):040x}"
    blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        relattn.load_pretrained("hf:owner/name")


def test_a_cache_without_the_weights_is_refused(cache, saved):
    home = add(cache, saved[0])
    (home / "snapshots" / COMMIT / pretrained.WEIGHTS).unlink()
    message = "^hf:owner/name has no model.safetensors, or the cache of huggingface_hub"
    with pytest.raises(FileNotFoundError, match=message):
        relattn.load_pretrained("hf:owner/name")


def test_a_model_that_is_not_in_the_cache_is_refused(cache, saved):
    add(cache, saved[0])
    message = (
        "^hf:owner/other is not in the cache of huggingface_hub, and cannot be "
        "downloaded: connect to a network, or download it elsewhere and pass its folder"
    )
    with pytest.raises(FileNotFoundError, match=message):
        relattn.load_pretrained("hf:owner/other")


def cards():
    data = {
        "name": "a: b",
        "class_names": ["0", "1"],
        "image_shape": [5, 5, 1],
        "mean": [0.1],
        "std": [0.3],
        "num_train": 7,
        "origin": "# here",
    }
    training = {"training": {"data": {}}, "checkpoint": "best", "step": 3}
    for license in ("unspecified", "MIT", "cc-by-4.0", "no", 'mine: "x" # 1'):
        config = {**CONFIG, **training, "data": data}
        yield license, model_card(config, {}, license)
    for file in sorted((ROOT / "results" / "models").glob("*/README.md")):
        yield "Apache-2.0", file.read_text("utf-8")


def test_the_hub_knows_the_licence_of_every_card():
    expected = ["unknown", "mit", "cc-by-4.0", "other", "other", "apache-2.0"]
    found = [re.search(r"^license: (.+)$", card, re.M)[1] for _, card in cards()]
    assert found == [*expected, expected[-1]]


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"vocab_size": 256}, ["pipeline_tag: text-generation"]),
        ({"image_shape": [5, 5, 1]}, ["pipeline_tag: image-classification"]),
        ({"image_shape": [8, 5, 5, 1]}, ["pipeline_tag: video-classification"]),
        # The hub has no task for points.
        ({"point_shape": [100, 2, 1]}, []),
    ],
)
def test_the_task_is_that_of_the_inputs(config, task):
    lines = hub.front_matter(config, "mit")
    assert [line for line in lines if line.startswith("pipeline_tag")] == task


def test_cards_are_valid_for_the_hub():
    yaml, package = (pytest.importorskip(name) for name in ("yaml", "huggingface_hub"))
    for license, card in cards():
        values = yaml.safe_load(card.split("---\n")[1])
        assert values["library_name"] == "relattn"
        assert values["pipeline_tag"] == "image-classification"
        assert values["tags"] == ["jax", "flax"]
        assert values["license"] in hub.LICENSES
        if values["license"] == "other":
            assert values["license_name"] == license
        read = package.ModelCard(card).data
        assert (read.license, read.library_name) == (values["license"], "relattn")
        assert card.split("---\n", 2)[2].startswith("# ")
