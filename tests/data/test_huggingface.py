"""Image sets of Hugging Face on disk; `datasets` is needed to write them."""

import io
import json
import sys

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn.data.load import load_data, load_images


def encode(level, size=(5, 3)):
    file = io.BytesIO()
    Image.new("L", size, level).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def options(folder, **changes):
    config = ConfigDict({"name": "fruits", "source": "hf", "data_dir": str(folder)})
    config.update(image_size=5, num_validation=0)
    config.update(changes)
    return config


def test_a_sentence_says_that_datasets_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"^the data.source 'hf' needs datasets: pip install 'relattn\[hf\]'$"
    with pytest.raises(ImportError, match=message):
        load_data(options(tmp_path))


@pytest.fixture(scope="module")
def datasets():
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    return found


@pytest.fixture
def make(datasets):
    """Returns a function that makes a data set of images of given grey levels."""

    def make(levels, labels, label=None, size=None, **columns):
        if label is None:
            label = datasets.ClassLabel(names=["kiwi", "fig", "lime"])
        features = {"image": datasets.Image(), "label": label}
        features |= {name: kind for name, (kind, _) in columns.items()}
        rows = {"image": [encode(x, size or (5, 3)) for x in levels], "label": labels}
        rows |= {name: values for name, (_, values) in columns.items()}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(features))

    return make


def pairs(split):
    (batch,) = split.batches(11)
    rows = batch["weight"] > 0
    levels = batch["image"][rows, 0, 0, 0].tolist()
    return dict(zip(levels, batch["label"][rows].tolist(), strict=True))


@pytest.mark.parametrize("streamed", [False, True])
def test_splits_and_classes_are_read(tmp_path, datasets, make, monkeypatch, streamed):
    if streamed:
        monkeypatch.setattr("relattn.data.load.MEMORY_BYTES", 0)
    sets = {
        "train": make([1, 2, 3, 4, 5], [0, 1, 2, 0, 1]),
        "validation": make([11, 12], [2, 0]),
        "test": make([21, 22, 23], [1, 1, 2]),
        "unsupervised": make([31], [None]),
    }
    datasets.DatasetDict(sets).save_to_disk(tmp_path / "a")
    with pytest.warns(UserWarning, match="left out split unsupervised"):
        data = load_data(options(tmp_path / "a"))
    assert data.info.streamed == streamed
    # The order of ClassLabel, not of the alphabet.
    assert data.info.class_names == ("kiwi", "fig", "lime")
    assert data.info.origin == f"the Hugging Face data set in {tmp_path / 'a'}"
    assert pairs(data.eval_splits["validation"]) == {11: 2, 12: 0}
    assert pairs(data.eval_splits["test"]) == {21: 1, 22: 1, 23: 2}
    with data.train_loader(5, seed=1) as loader:
        batches = [next(loader)[1] for _ in range(3)]
    levels = batches[0]["image"][:, 0, 0, 0].tolist()
    found = dict(zip(levels, batches[0]["label"].tolist(), strict=True))
    assert found == {1: 0, 2: 1, 3: 2, 4: 0, 5: 1}
    with data.train_loader(5, seed=1, start_step=2) as loader:
        _, batch = next(loader)
    np.testing.assert_array_equal(batch["image"], batches[2]["image"])
    with pytest.raises(ValueError, match="num_validation=1 .* of their own: set data"):
        load_data(options(tmp_path / "a", num_validation=1))


def test_one_split_is_the_training_images(tmp_path, make):
    make([1, 2, 3, 4], [0, 1, 2, 0]).save_to_disk(tmp_path / "a")
    data = load_images(options(tmp_path / "a", num_validation=1))
    assert (len(data.train), len(data.validation)) == (3, 1)
    assert pairs(data.train) | pairs(data.validation) == {1: 0, 2: 1, 3: 2, 4: 0}


def test_shuffled_rows_keep_their_labels(tmp_path, make):
    found = make(range(1, 8), [0, 1, 2, 0, 1, 2, 0]).shuffle(seed=3)
    found.select(range(5)).save_to_disk(tmp_path / "a")
    expected = {x["image"].getpixel((0, 0)): x["label"] for x in found.select(range(5))}
    assert pairs(load_images(options(tmp_path / "a")).train) == expected


@pytest.mark.parametrize(
    "mode, stored, expected",
    [
        ("L", "RGB", [18]),
        ("RGB", "L", [60, 60, 60]),
        ("L", "RGBA", [0]),
        ("RGB", "LA", [0, 0, 0]),
    ],
)
def test_images_have_the_mode_of_their_column(
    tmp_path, datasets, make, mode, stored, expected
):
    file = io.BytesIO()
    Image.new(stored, (5, 3), 60).save(file, "PNG")
    features = make([1], [0]).features | {"image": datasets.Image(mode=mode)}
    image = {"bytes": file.getvalue(), "path": None}
    rows = {"image": [image, image], "label": [0, 1]}
    found = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    found.save_to_disk(tmp_path / "a")
    # Images with an alpha channel are transparent.
    images = load_images(options(tmp_path / "a", background="black")).train.images
    assert images[:, 0, 0].tolist() == [expected, expected]


@pytest.mark.parametrize("kind", ["string", "int64"])
def test_labels_without_names(tmp_path, datasets, make, kind):
    labels = ["b", "a", "b"] if kind == "string" else [10, 9, 10]
    make([1, 2, 3], labels, datasets.Value(kind)).save_to_disk(tmp_path / "a")
    data = load_images(options(tmp_path / "a"))
    assert data.info.class_names == (("a", "b") if kind == "string" else ("9", "10"))
    assert pairs(data.train) == {1: 1, 2: 0, 3: 1}


def test_a_column_named_label_is_preferred(tmp_path, datasets, make):
    source = {"source": (datasets.ClassLabel(names=["web", "camera"]), [0, 0, 1])}
    found = make([1, 2, 3], ["b", "a", "b"], datasets.Value("string"), **source)
    found.save_to_disk(tmp_path / "a")
    assert pairs(load_images(options(tmp_path / "a")).train) == {1: 1, 2: 0, 3: 1}


@pytest.mark.parametrize("column", [True, False])
def test_a_split_without_labels_is_left_out(tmp_path, datasets, make, column):
    sets = {"train": make([1, 2], [0, 1]), "test": make([11, 12], [-1, -1])}
    if not column:
        sets["test"] = sets["test"].select_columns(["image"])
    datasets.DatasetDict(sets).save_to_disk(tmp_path / "a")
    with pytest.warns(UserWarning, match="left out split test, which has no labels"):
        data = load_data(options(tmp_path / "a"))
    assert data.eval_splits["test"] is data.eval_splits["validation"]


def test_nothing_is_read_from_a_network_or_from_paths(tmp_path, datasets, make):
    secret = tmp_path / "secret.png"
    secret.write_bytes(encode(7)["bytes"])
    rows = {"image": [{"bytes": None, "path": str(secret)}, encode(2)]}
    kinds = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    features = make([1], [0]).features | {"image": kinds}
    found = datasets.Dataset.from_dict(
        {**rows, "label": [0, 1]}, features=datasets.Features(features)
    )
    found.save_to_disk(tmp_path / "a")
    # Otherwise save_to_disk would read the file.
    state = tmp_path / "a" / "dataset_info.json"
    info = json.loads(state.read_text())
    info["features"]["image"] = {"_type": "Image"}
    state.write_text(json.dumps(info))
    message = r"^row 0 of .* cannot be read as an image \(the row has .*save_to_disk$"
    with pytest.raises(ValueError, match=message):
        load_data(options(tmp_path / "a"))


def test_each_problem_is_a_sentence_with_a_fix(tmp_path, datasets, make):
    kind = datasets.ClassLabel(names=["x", "y"])
    two = {"coarse": (kind, [0, 1]), "fine": (kind, [0, 1])}
    several = make([1, 2], [0, 1], **two).remove_columns("label")
    cases = {
        r"no column of labels named 'label', but coarse, fine: rename one of th": (
            several
        ),
        r"has no column of images, only 'label': cast it to datasets.Image$": (
            make([1, 2], [0, 1]).select_columns(["label"])
        ),
        r"has no column of labels, only 'image': cast it to datasets.ClassLabel$": (
            several.select_columns(["image"])
        ),
        r"are of one class, 'fig': add images of another class": make([1, 2], [1, 1]),
        r"^row 1 of the split train in .* has the label None, expected 0 to 2: cor": (
            make([1, 2, 3], [0, None, 1])
        ),
        r"has no training images, only the splits test: save a DatasetDict with": (
            datasets.DatasetDict(test=make([1, 2], [0, 1]))
        ),
        r"the class 'lime' of row 0 of .* has no training images: add some": (
            datasets.DatasetDict(train=make([1, 2], [0, 1]), test=make([3], [2]))
        ),
        r"the split val in .* is a second one of validation images: delete one": (
            datasets.DatasetDict(
                dict.fromkeys(("train", "validation", "val"), make([1, 2], [0, 1]))
            )
        ),
    }
    for number, (message, found) in enumerate(cases.items()):
        found.save_to_disk(tmp_path / str(number))
        with pytest.raises(ValueError, match=message) as raised:
            load_data(options(tmp_path / str(number)))
        assert len(str(raised.value).splitlines()) == 1
    with pytest.raises(ValueError, match=r"holds no Hugging Face data set \(.*: save"):
        load_data(options(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"a is missing: set it to the folder"):
        load_data(options(tmp_path / "a"))


def test_damaged_images_are_named(tmp_path, datasets, make):
    found = make([1, 2, 3], [0, 1, 0])
    rows = {
        "image": [*found.cast_column("image", datasets.Image(decode=False))["image"]]
    }
    rows["image"][1] = {"bytes": b"no image", "path": None}
    found = datasets.Dataset.from_dict(
        {**rows, "label": [0, 1, 0]}, features=found.features
    )
    found.save_to_disk(tmp_path / "a")
    message = r"^row 1 of the split train in .* cannot be read as an image \(not a JPEG"
    with pytest.raises(ValueError, match=message):
        load_data(options(tmp_path / "a"))


@pytest.mark.slow
def test_worker_processes_read_the_same_batches(tmp_path, make):
    sizes = make([1, 2, 3, 4], [0, 1, 2, 0], size=(9, 4))
    sizes.save_to_disk(tmp_path / "a")
    config = options(tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("relattn.data.load.MEMORY_BYTES", 0)
        batches = []
        for num_workers in (0, 2):
            config.num_workers = num_workers
            with load_data(config).train_loader(2, seed=0) as loader:
                batches.append([next(loader)[1] for _ in range(3)])
    for alone, shared in zip(*batches, strict=True):
        for key, values in alone.items():
            np.testing.assert_array_equal(values, shared[key])
