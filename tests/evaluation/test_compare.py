import csv
import dataclasses
import gc
import importlib
import re
import weakref

import chex
import jax
import numpy as np
import pytest

from relattn import cli
from relattn.command import is_user_error
from relattn.data import TextInfo, load_images
from relattn.evaluation import shift_runs
from relattn.evaluation.compare import (
    class_index,
    compare,
    shift_report,
)
from relattn.evaluation.shift import NOT_ALLOWED, shifted_predictions
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.models import resize_grid
from relattn.training import (
    CheckpointError,
    WorkdirError,
    evaluate,
    load_run,
    make_predict_fn,
    train_and_evaluate,
)
from relattn.training.saved_run import SavedRun, open_run
from tests.helpers.quick import quick_jit
from tests.helpers.shifting import naive_shift
from tests.test_readme import read, run_examples


def tiny_config(seed=0):
    config = importlib.import_module("configs.performer").get_config(
        "fashion_mnist,smoke"
    )
    config.seed = seed
    config.num_steps = 2
    config.model.num_layers = 1
    config.model.patch_size = 8
    config.model.attention = "softmax"
    config.model.position = "learned"
    config.model.dim = 16
    config.progress = False
    return config


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    train_and_evaluate(tiny_config(), str(folder), devices=jax.local_devices()[:1])
    return folder


def test_shifted_predictions_are_those_of_the_model(workdir):
    run = load_run(str(workdir))
    data = load_images(run.config.data)
    small = type(data.test)(data.test.images[:37], data.test.labels[:37])
    run.config.eval_batch_size = 16
    found = shifted_predictions(run, small, max_shift=1, axis="y")
    images = np.asarray(run.preprocess({"image": small.images}))
    variables = jax.device_put(run.variables)
    apply = quick_jit(run.model.apply)
    for (_, pixels), predicted in zip(found.shifts, found.predicted, strict=True):
        shifted = np.stack([naive_shift(image, pixels, "y") for image in images])
        expected = np.asarray(apply(variables, shifted).argmax(axis=-1))
        allowed = predicted != NOT_ALLOWED
        chex.assert_trees_all_equal(predicted[allowed], expected[allowed])
    assert (found.unshifted != NOT_ALLOWED).all()


@pytest.mark.quick("x-shifts0")
@pytest.mark.parametrize(
    "axis, shifts",
    [
        ("x", [(-2, 0), (-1, 0), (0, 0), (1, 0), (2, 0)]),
        ("xy", [(dx, dy) for dy in range(-2, 3) for dx in range(-2, 3)]),
    ],
)
def test_report_has_a_row_for_each_shift(workdir, tmp_path, axis, shifts):
    options = {"max_shift": 2, "num_images": 101, "classes": "trouser"}
    text = shift_report(
        open_shift_runs([workdir]), tmp_path, axis=axis, boundary="circular", **options
    )
    with (tmp_path / "shift.csv").open() as file:
        rows_of = {"1": [], "all": []}
        for row in csv.DictReader(file):
            rows_of[row["class"]].append(row)
    *rows, random = rows_of["1"]
    assert len(rows_of["all"]) == len(rows) + 1
    assert [(int(row["shift_x_px"]), int(row["shift_y_px"])) for row in rows] == shifts
    assert {row["source"] for row in rows} == {"measured"}
    assert (random["source"], random["shift_x_px"]) == ("random", "")
    assert len({row["num_images"] for row in [*rows, random]}) == 1
    unshifted = rows[shifts.index((0, 0))]
    assert (unshifted["consistency_mean"], unshifted["consistency_std"]) == (
        "1.000000",
        "0.000000",
    )
    assert (tmp_path / "shift.png").read_bytes()[1:4] == b"PNG"
    assert text == (tmp_path / "summary.md").read_text()
    assert "## Class 1 (Trouser)" in text
    assert "## All classes" in text


@pytest.mark.slow
def test_report_of_the_first_images(workdir, tmp_path):
    options = {"max_shift": 1, "classes": "all", "num_images": 11}
    text = shift_report(open_shift_runs([workdir]), tmp_path, **options)
    with (tmp_path / "shift.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert {row["class"] for row in rows} == {"all"} and "## Class" not in text
    unshifted = rows[1]
    run = load_run(workdir)
    first = load_images(run.config.data).test
    first = type(first)(first.images[:11], first.labels[:11])
    accuracy = evaluate(run, first, batch_size=4)["accuracy"]
    assert unshifted["num_images"] == "11"
    assert float(unshifted["accuracy_mean"]) == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.quick(
    "options0-max_shift=32 does not fit images of 32x32 pixels",
    "options1-image_size=-4 must be at least 1",
    "options2-axis must be x, y or xy",
    "options3-unknown class '10': available: all, 0 to 9",
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_shift": 32}, "max_shift=32 does not fit images of 32x32 pixels"),
        ({"image_size": -4}, "image_size=-4 must be at least 1"),
        ({"axis": "z"}, "axis must be x, y or xy"),
        ({"classes": 10}, "unknown class '10': available: all, 0 to 9"),
        ({"classes": "trouserr"}, "did you mean 'Trouser'"),
        ({"num_images": 0}, "num_images=0 must be an integer from 1 to 1000"),
        ({"num_images": 1001}, "num_images=1001 must be an integer from 1"),
        (
            {"data_dir": "data"},
            "--data_dir=data does not apply to .* with relattn: leav",
        ),
        (
            {"max_shift": 31, "num_images": 5},
            "no test image of fashion_mnist can move 31 pixels along x without",
        ),
        (
            {"max_shift": 2, "num_images": 5, "classes": "0"},
            "none of the 5 test images of fashion_mnist is of class 0: choose another",
        ),
        (
            {"max_shift": 6, "num_images": 20, "classes": "0"},
            "no test image of class 0 .* can move 6 pixels along x .* --boundary=circ",
        ),
    ],
)
def test_report_refuses_what_does_not_fit(workdir, tmp_path, options, message):
    opening = {
        key: options.pop(key) for key in ("image_size", "data_dir") if key in options
    }
    with pytest.raises(ValueError, match=message):
        shift_report(open_shift_runs([workdir], **opening), tmp_path / "out", **options)
    assert not [*(tmp_path / "out").glob("*")]


def test_data_without_a_source_ship_with_relattn(workdir, monkeypatch):
    saved = open_run(workdir)
    with saved.task.config.unlocked():
        del saved.task.config.data["source"]
    monkeypatch.setattr(shift_runs, "open_run", lambda *_: saved)
    with pytest.raises(ValueError, match="--data_dir=data does not apply to .*/tiny,"):
        open_shift_runs([workdir], data_dir="data")


@pytest.mark.parametrize(
    "output, message",
    [
        ("file", "--output .*/file is a file: name a directory"),
        ("file/out", "--output .*/file/out: .*/file is a file: name a directory"),
        ("", "--output is empty"),
    ],
)
def test_an_invalid_output_is_refused_first(tmp_path, output, message, capsys):
    (tmp_path / "file").touch()
    output = tmp_path / output if output else output
    with pytest.raises(WorkdirError, match=message) as raised:
        shift_report([], output)
    assert is_user_error(raised.value)
    with pytest.raises(SystemExit, match="2"):
        cli.eval_shift([f"--workdir={tmp_path}/run", f"--output={output}"])
    assert re.search(message, capsys.readouterr().err)


def test_runs_on_other_data_are_refused(workdir, monkeypatch):
    saved = open_run(workdir)
    text = TextInfo("plays", "bytes", 256, 7, 100, "a file")
    task = dataclasses.replace(saved.task, info=text)
    monkeypatch.setattr(
        shift_runs, "open_run", lambda *_: dataclasses.replace(saved, task=task)
    )
    message = "tiny was trained on tokens: only runs on images can be shifted"
    with pytest.raises(ValueError, match=message):
        open_shift_runs([workdir])


@pytest.mark.slow
def test_data_with_other_classes_are_refused(workdir, monkeypatch):
    data = load_images(load_run(workdir).config.data)
    for change, message in [
        (
            {"class_names": tuple("abcdefghij")},
            "predicts 10 classes .* has 10 ",
        ),
        (
            {"train": in_colour(data.train), "test": in_colour(data.test)},
            r"tiny was trained on images of 1 channels, but those of .* have 3",
        ),
    ]:
        other = dataclasses.replace(data, **change)
        monkeypatch.setattr(shift_runs, "load_data", lambda config, x=other: x)
        with pytest.raises((CheckpointError, ValueError), match=message):
            open_shift_runs([workdir])


def in_colour(split):
    images = np.repeat(split.images[:16], 3, axis=-1)
    return type(split)(images, split.labels[:16])


@pytest.mark.slow
def test_a_convolutional_network_and_a_performer_share_a_figure(workdir, tmp_path):
    config = importlib.import_module("configs.baselines").get_config(
        "alexnet,fashion_mnist,smoke"
    )
    config.num_steps = config.eval_every_steps = 1
    config.progress = False
    baseline = tmp_path / "baseline"
    train_and_evaluate(config, baseline, devices=jax.local_devices()[:1])
    text = shift_report(
        open_shift_runs([workdir, baseline]), tmp_path / "out", max_shift=1
    )
    with (tmp_path / "out" / "shift.csv").open() as file:
        models = [row["model"] for row in csv.DictReader(file)]
    assert models == 2 * (["softmax + learned"] * 4 + ["alexnet"] * 4)
    assert "| fashion_mnist | alexnet | 1 |" in text
    assert load_run(baseline, image_size=40).config.data.image_size == 40
    with pytest.raises(ValueError, match="must be at least 29 for AlexNet, .* 28x28"):
        load_run(baseline, image_size=28)


def test_a_checkpoint_of_another_model_is_refused(workdir):
    config = importlib.import_module("configs.baselines").get_config(
        "alexnet,fashion_mnist,smoke"
    )
    config.seed = 1
    before = sorted(workdir.rglob("*"))
    with pytest.raises(
        WorkdirError, match="model.name: 'performer' there, 'alexnet' now"
    ):
        train_and_evaluate(config, workdir)
    assert sorted(workdir.rglob("*")) == before


class TwoSeeds(SavedRun):
    """A run of one seed that is used as two."""

    seeds = range(2)

    def load(self):
        runs = [load_run(self.workdir) for _ in self.seeds]
        runs[1].config.seed = 1
        return runs


@pytest.mark.slow
def test_seeds_of_one_run_are_averaged(workdir, tmp_path, monkeypatch):
    saved = TwoSeeds(**vars(open_run(workdir)))
    monkeypatch.setattr(shift_runs, "open_run", lambda *_: saved)
    shift_report(open_shift_runs([workdir]), tmp_path, max_shift=1, num_images=5)
    with (tmp_path / "shift.csv").open() as file:
        assert {row["run"] for row in csv.DictReader(file)} == {"tiny:0 tiny:1"}


@pytest.mark.slow
def test_one_run_is_in_memory_at_a_time(workdir, monkeypatch):
    load, loaded = SavedRun.load, []

    def load_alone(self):
        gc.collect()
        assert all(array() is None for array in loaded)
        runs = load(self)
        loaded.extend(map(weakref.ref, jax.tree.leaves(runs[0].variables)))
        return runs

    monkeypatch.setattr(SavedRun, "load", load_alone)
    compare(open_shift_runs([workdir] * 2), max_shift=0, num_images=1)
    assert len(loaded) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_shift": 8, "axis": "xy", "num_images": 5},
            "8 pixels along x and 8 pixels along y",
        ),
        (
            {"max_shift": 6, "num_images": 20, "class_name": "0"},
            "no test image of class 0 .* can move 6 pixels along x",
        ),
    ],
)
def test_a_shift_that_no_image_allows_is_found_in_the_first_run(
    workdir, monkeypatch, options, message
):
    load, loaded = SavedRun.load, []
    monkeypatch.setattr(SavedRun, "load", lambda self: loaded.append(1) or load(self))
    with pytest.raises(ValueError, match=message):
        compare(open_shift_runs([workdir] * 2), **options)
    assert loaded == [1]


def test_runs_without_random_features_have_one_draw(
    workdir, tmp_path, monkeypatch, capsys
):
    """The first run is not evaluated before the others are checked."""
    monkeypatch.setattr(SavedRun, "load", None)
    with pytest.raises(SystemExit, match="2"):
        cli.eval_shift([f"--workdir={workdir}", f"--output={tmp_path}", "--draws=4"])
    message = f"error: {workdir}: draws=4 needs random features to draw, but the model"
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_evaluates_images_of_another_size(workdir):
    trained, run = load_run(workdir), load_run(workdir, image_size=40)
    size = trained.config.data.image_size
    assert (size, run.config.data.image_size) == (32, 40)
    grids = [(side // trained.model.patch_size,) * 2 for side in (size, 40)]
    expected = resize_grid(trained.model, trained.variables, *grids)
    chex.assert_trees_all_equal(run.variables, jax.device_get(expected))
    test = load_images(run.config.data).test
    small = type(test)(test.images[:16], test.labels[:16])
    images = run.preprocess({"image": small.images})
    assert images.shape[1:3] == (40, 40)
    logits = make_predict_fn(run)(images)
    right = np.asarray(logits.argmax(axis=-1)) == small.labels
    assert evaluate(run, small, 16)["accuracy"] == right.mean()
    found = shifted_predictions(run, small, max_shift=0)
    chex.assert_trees_all_equal(found.predicted[0] == found.labels, right)


def test_an_image_size_that_does_not_fit_is_refused(workdir):
    with pytest.raises(ValueError, match="larger than the image of 1x1 pix") as raised:
        load_run(workdir, image_size=1)
    assert is_user_error(raised.value)


def test_a_run_without_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        open_shift_runs([tmp_path])


@pytest.mark.parametrize(("name", "label"), [("0", 0), ("2", 2), ("BAG", 2), ("7", 1)])
def test_a_class_is_found_by_number_or_name(name, label):
    assert class_index(name, ("coat", "7", "Bag")) == label


def test_unknown_class_is_refused_with_the_closest():
    message = "unknown class 'trousers': did you mean 'Trouser'"
    with pytest.raises(ValueError, match=message):
        class_index("trousers", ("Dress", "Trouser"))
    with pytest.raises(ValueError, match="unknown class '2'.* 0 to 1, Dress, Trouser"):
        class_index("2", ("Dress", "Trouser"))


@pytest.mark.slow
def test_example_loads_a_run_for_larger_images(workdir, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "s1").symlink_to(workdir)
    monkeypatch.chdir(tmp_path)
    run = run_examples(read("docs/positions.md"))["run"]
    assert run.config.data.image_size == 48
