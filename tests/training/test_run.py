import collections
import csv
import dataclasses
import functools
import io
import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

from relattn import training
from relattn.command import is_user_error
from relattn.evaluation import predict as predict_lib
from relattn.training.checkpoint import read_meta
from relattn.training.metrics_log import read_rows
from relattn.training.workdir import write_text
from tests.helpers.export import unchecked_annotations
from tests.training.conftest import make_data
from tests.training.test_checkpoint import forge

pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture
def workdir(finished, tmp_path):
    """A copy of the folder of a finished run, to be changed."""
    return shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)


def test_predictions_equal_the_evaluation(workdir, config, finished):
    _, result = finished
    run = training.load_run(workdir)
    assert run.step == result["best_step"]
    assert run.config.to_dict() == config.to_dict()
    assert run.data.class_names == ("left", "middle", "right")
    assert run.data.image_shape == (5, 3, 1)
    test = make_data().test
    # A batch holds at most all examples.
    assert training.evaluate(run, test, batch_size=10**9)["count"] == len(test)
    scores = training.evaluate(run, test, batch_size=8)
    np.testing.assert_allclose(scores["accuracy"], result["test_accuracy"])
    np.testing.assert_allclose(scores["loss"], result["test_loss"], rtol=1e-5)
    assert scores["count"] == len(test)
    predict = training.make_predict_fn(run)
    images = run.preprocess({"image": test.images})
    assert images.shape == (29, 5, 5, 1)
    logits = predict(images)
    assert np.mean(np.argmax(logits, -1) == test.labels) == scores["accuracy"]
    np.testing.assert_array_equal(predict(images), logits)


def test_batches_are_those_of_the_evaluation(workdir):
    run, test, seen = training.load_run(workdir), make_data().test, set()
    run.config.eval_batch_size = 11

    def preprocess(batch):
        seen.add(len(batch["image"]))
        return run.preprocess(batch)

    changed = dataclasses.replace(run, preprocess=preprocess)
    changed.predict(test.images)
    training.evaluate(changed, test, devices=jax.devices()[:1])
    assert seen == {11}


@pytest.mark.parametrize("size", [0, -1, 2.5, "3"])
def test_batches_without_examples_are_refused(workdir, size):
    run = training.load_run(workdir)
    images = np.zeros((2, 5, 3, 1), np.uint8)
    predict, features = (
        functools.partial(call, images) for call in (run.predict, run.features)
    )
    for call in (predict, features, run.evaluate):
        message = f"integer of at least 1, got {size!r}"
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            call(batch_size=size)


@pytest.mark.parametrize("size", ["42", (42,), 42.0])
def test_an_image_size_is_an_integer(workdir, size):
    message = r"image_size=.* must be an integer, or two: the height and the width"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        training.load_run(workdir, image_size=size)


def test_predict_takes_arrays_pil_images_and_files(workdir, tmp_path):
    run = training.load_run(workdir)
    images = make_data().test.images[:7]
    found = run.predict(images, batch_size=3)
    logits = training.make_predict_fn(run)(run.preprocess({"image": images}))
    expected = jax.nn.softmax(logits)
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-5)
    assert found.labels.tolist() == np.argmax(expected, -1).tolist()
    names = ("left", "middle", "right")
    assert found.classes == [names[label] for label in found.labels]
    pictures = [Image.fromarray(image[..., 0]) for image in images]
    paths = [tmp_path / f"{i}.png" for i in range(len(images))]
    for picture, path in zip(pictures, paths, strict=True):
        picture.save(path)
    same = (images[..., 0], images.astype(int), list(images), pictures, paths)
    # As a column of a Hugging Face data set, which is no list.
    same += (collections.UserList([images[0], *paths[1:3], *pictures[3:]]),)
    for given in same:
        again = run.predict(given, batch_size=3)
        np.testing.assert_array_equal(again.probabilities, found.probabilities)
    for one in (paths[1], str(paths[1]), pictures[1], images[1], images[1, ..., 0]):
        np.testing.assert_allclose(
            run.predict(one).probabilities, found.probabilities[1:2], rtol=1e-5
        )
    assert run.predict([]).probabilities.shape == (0, 3)


def test_predict_warns_of_logits_of_nan(workdir):
    """Their class would be the first."""
    run = training.load_run(workdir)
    params = jax.tree.map(lambda x: np.full_like(x, np.nan), run.variables["params"])
    broken = dataclasses.replace(run, variables={**run.variables, "params": params})
    with pytest.warns(UserWarning, match="logits are NaN for 2 of 2 inputs, so it"):
        broken.predict(make_data().test.images[:2])


def test_predict_scales_images_of_another_size(workdir):
    run = training.load_run(workdir)
    image = make_data().test.images[3, ..., 0]
    large = Image.fromarray(image.repeat(4, 0).repeat(4, 1))
    scaled = np.asarray(large.resize((3, 5), Image.Resampling.BILINEAR))
    expected = run.predict(scaled).probabilities
    np.testing.assert_array_equal(run.predict(large).probabilities, expected)
    wide = np.zeros((3, 20, 52), np.uint8)
    wide[:, :, 20:32] = np.asarray(large)
    # Only the first change is in the central part, of width 12.
    wide[1, :, 22:25] = 255
    wide[2, :, :10] = 255
    plain, inside, outside = run.predict(wide).probabilities
    np.testing.assert_array_equal(outside, plain)
    assert not np.allclose(inside, plain)


def test_command_writes_a_row_for_each_file(workdir, tmp_path, capsys):
    images = make_data().test.images[:5, ..., 0]
    names = ["a/2.png", "a/1.PNG", "a/b/3.png", "a/.hidden.png", "z,.png"]
    for name, image in zip(names, images, strict=True):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(image).save(path)
    (tmp_path / "a" / "notes.txt").touch()
    folder, file = tmp_path / "a", tmp_path / "z,.png"
    arguments = [f"--workdir={workdir}", f"--input={file}", "--input", str(folder)]
    output = tmp_path / "new" / "found.csv"
    predict_lib.main([*arguments, "--probabilities", f"--output={output}"])
    expected = training.load_run(workdir).predict(images[[4, 1, 0, 2]])
    with output.open(newline="") as opened:
        header, *rows = csv.reader(opened)
    assert header[:4] == ["file", "class", "label", "probability"]
    assert header[4:] == [
        f"probability of {name}" for name in ("left", "middle", "right")
    ]
    files = [str(tmp_path / names[i]) for i in (4, 1, 0, 2)]
    labels = [str(label) for label in expected.labels]
    assert [row[:3] for row in rows] == list(
        map(list, zip(files, expected.classes, labels, strict=True))
    )
    values = np.array([row[3:] for row in rows], np.float32)
    np.testing.assert_allclose(values[:, 1:], expected.probabilities, atol=1e-6)
    np.testing.assert_array_equal(values[:, 0], values[:, 1:].max(axis=1))
    predict_lib.main(arguments)
    assert list(csv.reader(io.StringIO(capsys.readouterr().out))) == [
        row[:4] for row in (header, *rows)
    ]


def test_command_takes_the_run_and_the_images_without_options(
    workdir, tmp_path, capsys, monkeypatch
):
    run, loaded = training.load_run(workdir), []

    def load_run(folder, *args, **kwargs):
        loaded.append(folder)
        return run

    # Loading it each time would compile it again.
    monkeypatch.setattr(predict_lib, "load_run", load_run)
    images = make_data().test.images[:2, ..., 0]
    files = [tmp_path / "1.png", tmp_path / "2.png"]
    for file, image in zip(files, images, strict=True):
        Image.fromarray(image).save(file)
    first, second = map(str, files)
    predict_lib.main([str(workdir), first, second, "--top=3"])
    out = capsys.readouterr().out
    header, *rows = csv.reader(io.StringIO(out))
    assert header == [
        *("file", "class", "label", "probability"),
        *("class 2", "label 2", "probability 2"),
        *("class 3", "label 3", "probability 3"),
    ]
    expected = run.predict(images)
    column = run.predict(np.array([first, second], object))
    np.testing.assert_array_equal(column.probabilities, expected.probabilities)
    for row, file, values in zip(rows, files, expected.probabilities, strict=True):
        order = sorted(range(3), key=lambda label: -values[label])
        assert row[0] == str(file)
        assert [int(label) for label in row[2::3]] == order
        assert row[1::3] == [expected.class_names[label] for label in order]
        assert row[3::3] == [f"{values[label]:.6f}" for label in order]
    output = tmp_path / "found.csv"
    # Options may stand anywhere.
    for words in (
        [str(workdir), "--top=3", first, second],
        ["--top=3", f"--workdir={workdir}", first, second],
        ["--top=3", str(workdir), "--input", first, second],
    ):
        predict_lib.main([*words, f"--output={output}"])
        assert output.read_text() == out
    # A file of arrays among them: the same images, with names of their own.
    arrays = str(tmp_path / "both.npz")
    np.savez(arrays, images=images)
    predict_lib.main([str(workdir), first, arrays, "--top=3"])
    _, single, *both = csv.reader(io.StringIO(capsys.readouterr().out))
    assert single == rows[0]
    assert both == [[f"{arrays}[{index}]", *row[1:]] for index, row in enumerate(rows)]
    assert loaded == [str(workdir)] * 5
    unnamed = str(tmp_path / "unnamed.npz")
    np.savez(unnamed, pixels=images)
    for words, message in (
        ([str(workdir), unnamed], "has no array images, only pixels: name the array"),
        ([str(workdir), "/missing.npz"], "missing.npz is missing"),
        ([str(workdir)], "the images are missing: pass files or folders after the run"),
        ([], "the run and the images are missing: pass them, as in relattn predict"),
        ([str(workdir), first, "--top=4"], "--top=4 must be from 1 to 3, the classes"),
        ([str(workdir), first, "--tops=4"], "unknown option --tops: did you mean"),
        (
            [str(workdir), first, str(workdir / "run.json"), __file__],
            "2 of the 3 images cannot be read: ",
        ),
    ):
        with pytest.raises(SystemExit):
            predict_lib.main(words)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.ones((2, 5, 3, 1)) / 2, r"from 0.5 to 0.5, .*pass \(255 \* images\)"),
        (np.full((5, 3), 200.0), r"from 200 to 200, .*: pass images.round\(\)"),
        (-np.ones((5, 3)), "from -1 to -1, .*: pass images that are not standardised"),
        (np.ones((5, 3), bool), "image 0 has bool values from 1 to 1"),
        (np.full((5, 3), 256), "from 256 to 256, but .*: pass images th"),
        (np.zeros((2, 5, 3, 3), np.uint8), r"shape \(5, 3, 3\), but .*width, 1\]"),
        (np.zeros((5, 6, 4), np.uint8), r"shape \(5, 6, 4\), which is an image in"),
        ({"image": 7}, r"must be a path, a Pillow image, .* these, got {'image': 7}"),
        (np.zeros(7, np.uint8), r"shape \(7,\), expected \[n, height, width, 1\]"),
        (Image.new("RGB", (3, 5)), "image 0 is in colour .*: convert it with"),
        (".", "is a folder: pass a list of image files"),
    ],
)
def test_predict_refuses_other_values_and_channels(workdir, images, message):
    run = training.load_run(workdir)
    with pytest.raises(ValueError, match=message) as raised:
        run.predict(images)
    assert is_user_error(raised.value)


def test_a_run_evaluates_its_own_data_and_other_data(workdir):
    run = training.load_run(workdir)
    kind = type(run.model).__name__
    assert repr(run) == f"Run('{workdir}', {kind}, step {run.step}, {run.data.name})"
    data = make_data()
    expected = training.evaluate(run, data.test)
    assert run.evaluate() == run.evaluate(data) == run.evaluate(data.test) == expected
    assert run.evaluate(data, split="validation")["count"] == 23
    with pytest.raises(ValueError, match="unknown split 'tests': did you mean 'test'"):
        run.evaluate(data, split="tests")
    other = dataclasses.replace(data, class_names=("a", "b", "c"))
    with pytest.raises(training.CheckpointError, match="use the data that it was"):
        run.evaluate(other)
    images = data.test.images
    message = r"must be a data set or one of its splits, such as .*, got ndarray"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        run.evaluate(images)
    # A label of -1 would count as the last class in the loss.
    for label in (-1, 3):
        labels = np.full_like(data.test.labels, label)
        wrong = dataclasses.replace(data.test, labels=labels)
        message = f"the labels of the split are from {label} to {label}, expected 0 to"
        with pytest.raises(ValueError, match=message):
            run.evaluate(wrong)


def test_latest_is_the_last_step(workdir):
    assert training.load_run(workdir, "latest").step == 15
    message = "unknown checkpoint 'last': did you mean 'latest'"
    with pytest.raises(ValueError, match=message):
        training.load_run(workdir, "last")


def test_the_metrics_of_a_card_are_those_of_its_checkpoint(workdir, tmp_path):
    best = training.load_run(workdir)
    # As the latest checkpoint, or the best one of a run that was extended.
    for run in (best, dataclasses.replace(best, step=best.step + 1)):
        run.save_pretrained(tmp_path / "saved")
        card = (tmp_path / "saved" / "README.md").read_text()
        assert ("test_accuracy" in card) == (run is best)


def test_a_model_is_not_saved_in_the_directory_of_its_run(workdir):
    before = contents(workdir)
    with pytest.raises(ValueError, match="is the run directory, .*: choose another"):
        training.load_run(workdir).save_pretrained(workdir)
    assert contents(workdir) == before


def test_a_directory_without_checkpoint(tmp_path):
    with pytest.raises(training.CheckpointError, match="no complete checkpoint in"):
        training.load_run(tmp_path)
    with pytest.raises(training.CheckpointError, match="no complete checkpoint in"):
        training.load_run(tmp_path / "missing")


def flip_a_bit(workdir, step):
    (path,) = (workdir / "checkpoints" / str(step) / "state" / "d").iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return path.name


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_damaged_best_checkpoint_is_not_replaced_by_a_worse_one(
    config, tmp_path, one_device
):
    config.optimizer.learning_rate = 1e-9
    config.redraw_every = 0
    training.train_and_evaluate(config, tmp_path, devices=one_device)
    name = flip_a_bit(tmp_path, 15)
    before = contents(tmp_path)
    replaced = pytest.warns(UserWarning, match=f"{name} is damaged .*/10 is used")
    with replaced:
        assert training.load_run(tmp_path, "latest").step == 10
    with replaced:
        assert training.load_run(tmp_path).step == 5
    assert contents(tmp_path) == before
    rows = read_rows(tmp_path / "metrics.jsonl")
    rows[-1]["validation_accuracy"] = 1.0
    write_text(tmp_path / "metrics.jsonl", "\n".join(map(json.dumps, rows)))
    best = r"15, with the best validation accuracy \(1.0000\), is damaged"
    with replaced, pytest.raises(training.CheckpointError, match=best):
        training.load_run(tmp_path)
    name = flip_a_bit(tmp_path, 5)
    rows[-1]["validation_accuracy"] = 0.0
    write_text(tmp_path / "metrics.jsonl", "\n".join(map(json.dumps, rows)))
    with replaced, pytest.raises(training.CheckpointError, match=f"{name} is damaged"):
        training.load_run(tmp_path)


def test_a_model_that_cannot_be_built_is_reported(workdir):
    folder = workdir / "checkpoints"
    meta = read_meta(folder, 15)
    changes = {
        "unexpected keyword argument 'a'": {"model": {"a": 5}},
        "config.batch_size must be at least 1, got 0": {"batch_size": 0},
        "unknown config.a:": {"a": 5},
    }
    for problem, change in changes.items():
        forge(folder / "15", {**meta, "config": {**meta["config"], **change}})
        with pytest.raises(
            training.CheckpointError,
            match=rf"15 has metadata that this version .* cannot use \(.*{problem}",
        ) as raised:
            training.load_run(workdir, "latest")
        assert is_user_error(raised.value)
        assert len(str(raised.value).splitlines()) == 1


def test_damaged_metrics_give_a_warning(workdir):
    best = training.load_run(workdir).step
    path = workdir / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(b"\xff\n5\n" + content)
    with pytest.warns(UserWarning, match=r"rows that .* are left out \(line 1, 2\)"):
        assert training.load_run(workdir).step == best
    assert path.read_bytes() == b"\xff\n5\n" + content


def test_an_empty_split(workdir):
    run = training.load_run(workdir)
    with pytest.raises(ValueError, match="the split is empty"):
        training.evaluate(run, make_data(num_test=0).test, batch_size=8)
