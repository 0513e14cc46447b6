"""Data given in memory: a run remembers them, and takes them by argument."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn import cli, models, training
from relattn.data import ImageData, ImageSplit, TextInfo, load_data
from relattn.evaluation import compare, page
from relattn.evaluation import report as report_lib
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.manifest import write_manifest
from relattn.training.config import default_config
from relattn.training.given_data import check_contents, check_source, fingerprint
from tests.helpers.export import unchecked_annotations
from tests.training.conftest import TinyText, build_tiny
from tests.training.conftest import make_config as make_tiny_config

CLASSES = ("rows", "columns")


def make_stripes(seed=0, class_names=CLASSES, channels=1):
    """Rows or columns of noise on a black border, which can move by two pixels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(60) % len(class_names)
    images = np.zeros((60, 8, 8, channels), np.uint8)
    noise = rng.integers(50, 255, (60, 4, 1, channels), dtype=np.uint8)
    rows = (labels % 2 == 0)[:, None, None, None]
    images[:, 2:6, 2:6] = np.where(rows, noise, noise.swapaxes(1, 2))
    return ImageData.from_arrays(
        "stripes",
        images[:40],
        labels[:40],
        class_names,
        num_validation=10,
        test_images=images[40:],
        test_labels=labels[40:],
    )


def make_config(num_steps=2):
    config = default_config()
    config.model.update(name="vit", dim=8, num_heads=2, num_layers=1, mlp_dim=7)
    config.model.patch_size = 4
    # The name of a data set of relattn with ten classes.
    config.data.update(name="mnist", source="embedded", num_validation=5)
    config.update(num_steps=num_steps, num_epochs=0, batch_size=8, progress=False)
    return config


def test_a_description_that_cannot_be_read_again_is_refused(tmp_path):
    """Otherwise the run would end with an error, and could not be loaded."""
    message = r"store .*class_names\[0\]=0, which must be a string\): correct it"
    data = make_stripes()
    with unchecked_annotations():
        data = dataclasses.replace(data, class_names=(0, 1))
        with pytest.raises(ValueError, match=message):
            training.train_and_evaluate(make_config(), tmp_path, data=data)


@pytest.mark.parametrize("option, value", [("augment", "rotate"), ("placement", "x")])
def test_options_that_given_data_do_not_have_are_refused(tmp_path, option, value):
    """Otherwise they would have no effect."""
    config, data = make_config(), make_stripes()
    config.data[option] = value
    message = rf"config.data.{option} is '{value}', but .*'stripes' have {option}='"
    with pytest.raises(ValueError, match=message):
        training.train_and_evaluate(config, tmp_path, data=data)
    changed = dataclasses.replace(data, augment="rotate")
    with pytest.raises(ValueError, match=r"augment is 'none', but .* augment='rotate'"):
        training.train_and_evaluate(make_config(), tmp_path, data=changed)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The directory of a run on stripes."""
    config = make_tiny_config()
    config.data.name = "mnist"
    folder = tmp_path_factory.mktemp("given")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "build_model", build_tiny)
        training.train_and_evaluate(
            config, folder, data=make_stripes(), devices=jax.local_devices()[:1]
        )
    return folder


@pytest.fixture
def tiny_model(monkeypatch):
    """Makes `load_run` build the model of ``given``."""
    monkeypatch.setattr(models, "build_model", build_tiny)


def train(folder, data=None, **options):
    data = make_stripes() if data is None else data
    devices = jax.local_devices()[:1]
    return training.train_and_evaluate(
        make_config(**options), folder, data=data, devices=devices
    )


@pytest.mark.slow
def test_a_run_takes_its_data_by_argument(tmp_path):
    given = tmp_path / "given"
    assert train(given) == json.loads((given / "result.json").read_text())
    run, stripes = training.load_run(given), make_stripes()
    assert run.given
    result = json.loads((given / "result.json").read_text())
    found = run.evaluate(stripes)
    assert found == run.evaluate(stripes.test) == run.evaluate(stripes, split="test")
    np.testing.assert_allclose(found["loss"], result["test_loss"], rtol=1e-6)
    assert found["count"] == 20
    validation = run.evaluate(data=stripes, split="validation")
    assert validation["count"] == 10
    text = report_lib.report(run, data=stripes)
    assert "Run given" in text and "20 test images" in text
    runs = open_shift_runs([given], data=stripes)
    text = compare.shift_report(runs, tmp_path, max_shift=1, classes="columns")
    assert "stripes" in text and "mnist" not in text
    page.write_page(runs, tmp_path / "page.html", max_shift=1)
    assert '"dataset": "stripes"' in (tmp_path / "page.html").read_text()
    # Images need no data set.
    assert len(run.predict(stripes.test.images, progress=False).labels) == 20


@pytest.mark.usefixtures("tiny_model")
def test_what_needs_the_data_says_so(given, tmp_path, capsys):
    run = training.load_run(given)
    assert run.contents == fingerprint(make_stripes())
    said = rf"{given} was trained on data given in memory \('stripes'\), which "
    calls = {
        r"run\.evaluate\(data=": run.evaluate,
        r"report\.report\(run, data=": lambda: report_lib.report(run),
        r"shift_runs\.open_shift_runs\(work": lambda: open_shift_runs([given]),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{said}.*{name}"):
            call()
    programs = {
        cli.eval_shift: [f"--output={tmp_path}", "--max_shift=1"],
        report_lib.main: [],
    }
    for program, words in programs.items():
        with pytest.raises(SystemExit, match="2"):
            program([f"--workdir={given}", *words])
        error = capsys.readouterr().err
        assert "given in memory ('stripes')" in error and "data=..." in error
        assert error.count("\n") == 1
    with pytest.raises(ValueError, match="data_dir='x' does not apply to data in mem"):
        open_shift_runs([given], data=make_stripes(), data_dir="x")
    stripes = make_stripes()
    nothing = ImageSplit(stripes.test.images[:0], stripes.test.labels[:0])
    with pytest.raises(ValueError, match="the test split of stripes is empty: shifts"):
        open_shift_runs(given, data=dataclasses.replace(stripes, test=nothing))
    message = "data must be a data set, .* got ImageSplit"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        open_shift_runs(given, data=stripes.test)


@pytest.mark.usefixtures("tiny_model")
def test_other_data_are_refused(given):
    run = training.load_run(given)
    with pytest.raises(OSError, match="predicts 2 classes.*stripes has 3 classes"):
        run.evaluate(make_stripes(class_names=("a", "b", "c")))
    for call in (
        run.evaluate,
        lambda data: report_lib.report(run, data=data),
        lambda data: open_shift_runs([given], data=data),
    ):
        with pytest.raises(ValueError, match="images of 1 channels, but .* have 3"):
            call(make_stripes(channels=3))
    for data in (make_stripes().test, "text.txt"):
        with pytest.raises(ValueError, match="split='validation' needs a data set"):
            run.evaluate(data, split="validation")
    with pytest.raises(ValueError, match="bpe_dir='x' needs data, the path of a text"):
        run.evaluate(make_stripes(), bpe_dir="x")


@pytest.mark.slow
def test_a_run_resumes_with_the_same_data_only(tmp_path):
    train(tmp_path)
    longer = make_config(num_steps=3)
    with pytest.raises(OSError, match=r"given in memory \('stripes'\).*data=\.\.\.\)"):
        training.train_and_evaluate(longer, tmp_path)
    # Another image of the same class: mean, shape, number and classes are the same.
    swapped = make_stripes()
    images = swapped.train.images.copy()
    images[0, 2, 3:5] = images[0, 2, 4:2:-1] = [[9], [7]]
    other = make_stripes()
    object.__setattr__(other, "train", ImageSplit(images, other.train.labels))
    assert other.info == make_stripes().info
    with pytest.raises(OSError, match="other data, of the same description"):
        train(tmp_path, other, num_steps=3)
    with pytest.raises(OSError, match="other data|predicts 2 classes"):
        train(tmp_path, make_stripes(class_names=("a", "b")), num_steps=3)
    assert train(tmp_path, num_steps=3)["step"] == 3


def test_the_fingerprint_is_of_every_array():
    whole = fingerprint(make_stripes())
    assert whole == fingerprint(make_stripes())
    for name in ("train", "validation", "test"):
        data = make_stripes()
        split = getattr(data, name)
        for images, labels in (
            (split.images ^ np.uint8(1), split.labels),
            (split.images, 1 - split.labels),
        ):
            object.__setattr__(data, name, ImageSplit(images, labels))
            assert fingerprint(data) != whole
    assert fingerprint(TinyText()) == fingerprint(TinyText())
    assert fingerprint(TinyText()) != fingerprint(TinyText(vocab_size=11))


def write_text(folder, token=1):
    folder.mkdir()
    tokens = np.arange(200, dtype="<u2") % 7
    tokens[3] = token
    for name in ("train.bin", "val.bin"):
        tokens.tofile(folder / name)
    write_manifest(folder, ["train.bin", "val.bin"])
    meta = {"tokenizer": "bytes", "vocab_size": 256}
    (folder / "meta.json").write_text(json.dumps(meta))
    options = {"source": "text", "context_length": 8, "data_dir": str(folder)}
    return load_data(ConfigDict(options))


def test_the_fingerprint_of_files(tmp_path):
    text = write_text(tmp_path / "a")
    assert fingerprint(text) == fingerprint(write_text(tmp_path / "b"))
    assert fingerprint(text) != fingerprint(write_text(tmp_path / "c", token=2))
    # The manifest stands for the tokens, which loading compares with it.
    manifest = tmp_path / "a" / "manifest.json"
    manifest.write_text('{"train.bin": "0"}')
    assert fingerprint(text) != fingerprint(write_text(tmp_path / "d"))
    # A text without one is the same text.
    manifest.unlink()
    assert fingerprint(text) == fingerprint(write_text(tmp_path / "e"))
    np.arange(200, dtype="<u2").tofile(tmp_path / "a" / "train.bin")
    assert fingerprint(text) != fingerprint(write_text(tmp_path / "f"))
    rng = np.random.default_rng(0)
    for name in ("a/1", "b/2"):
        path = tmp_path / "photos" / "train" / f"{name}.png"
        path.parent.mkdir(parents=True)
        size = (9 + int(name[-1]), 11, 3)
        Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(path)
    folder = str(tmp_path / "photos")
    options = {"name": "photos", "source": "folder", "data_dir": folder}
    config = ConfigDict({**options, "image_size": 7, "num_workers": 2})
    before = fingerprint(load_data(config))
    assert before == fingerprint(load_data(config))
    path.write_bytes(path.read_bytes() + b"more")
    assert fingerprint(load_data(config)) != before


def test_a_run_does_not_resume_with_other_contents():
    """As when a text of equal length is prepared in place of the one before."""
    finished = {"contents": "old", "data": {}}
    with pytest.raises(OSError, match="x/7 was trained on other data, of the same"):
        check_contents(finished, "new", Path("x/7"))
    check_contents(finished, "old", Path("x/7"))
    # Checkpoints of earlier versions have no fingerprint of files.
    check_contents({"given": ""}, "new", Path("x/7"))


@pytest.mark.slow
def test_text_in_memory(tmp_path):
    config = make_config()
    config.model.update(name="gpt")
    del config.model.patch_size
    text = TinyText()
    assert isinstance(text.info, TextInfo)
    devices = jax.local_devices()[:1]
    training.train_and_evaluate(config, tmp_path, data=text, devices=devices)
    run = training.load_run(tmp_path)
    with pytest.raises(ValueError, match=r"given in memory \('doublings'\)"):
        run.evaluate()
    assert (
        run.evaluate(text)["count"] == run.evaluate(text.eval_splits["test"])["count"]
    )
    (tmp_path / "a.txt").write_text("abc")
    for call in (lambda: run.evaluate(tmp_path / "a.txt"), lambda: run.generate("a")):
        with pytest.raises(ValueError, match="tokenizer 'doubling'"):
            call()
    assert "tokenizer &#x27;doubling&#x27;" in report_lib.report(run)
    with pytest.raises(ValueError, match="num_images and data do not apply to .* text"):
        report_lib.report(run, num_images=3)


@pytest.mark.parametrize("data", [[1, 2], np.zeros((3, 5, 5, 1), np.uint8)])
def test_what_is_no_data_set_is_refused(data):
    with pytest.raises(ValueError, match="must be a data set, .* got (list|ndarray)"):
        check_source(data)
    check_source(make_stripes())
