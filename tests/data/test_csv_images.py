"""Image sets that a CSV file lists."""

import os

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from relattn.data import image_list
from relattn.data.csv_images import find_csv_images
from relattn.data.load import load_data, load_images

# The grey level of an image is its number; 7 is of another size.
LABELS = {1: "dog", 2: "cat", 3: "dog", 4: "cat", 5: "dog", 6: "cat"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in LABELS:
        image = Image.fromarray(np.full((3, 5), number, np.uint8))
        image.save(tmp_path / "photos" / f"{number}.png")
    return tmp_path


def write(folder, text):
    file = folder / "all.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def options(file, **changes):
    config = ConfigDict({"name": "pets", "source": "csv", "data_dir": str(file)})
    config.update(image_size=5, **changes)
    return config


def table(splits=None, numbers=LABELS):
    header = "path,label" + (",split" if splits else "")
    lines = [
        f"photos/{n}.png,{LABELS[n]}" + (f",{splits[n]}" if splits else "")
        for n in numbers
    ]
    return "\n".join([header, *lines, ""])


def numbers(split):
    (batch,) = split.batches(7)
    rows = batch["weight"] > 0
    found = batch["image"][rows, 0, 0, 0].tolist()
    return dict(zip(found, batch["label"][rows].tolist(), strict=True))


def test_labels_belong_to_their_images_in_any_working_folder(
    folder, tmp_path_factory, monkeypatch
):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    file = write(folder, table())
    data = load_images(options(file, num_validation=2))
    assert data.info.class_names == ("cat", "dog")
    assert data.info.origin == (
        f"the images of {file}, without test images: the validation images are the "
        "test images"
    )
    assert (len(data.train), len(data.validation)) == (4, 2)
    found = numbers(data.train) | numbers(data.validation)
    assert found == {1: 1, 2: 0, 3: 1, 4: 0, 5: 1, 6: 0}
    assert data.test is data.validation


@pytest.mark.parametrize("streamed", [False, True])
def test_splits_are_those_of_the_column(folder, monkeypatch, streamed):
    if streamed:
        monkeypatch.setattr("relattn.data.load.MEMORY_BYTES", 0)
    names = {1: "train", 2: "", 3: "val", 4: "test", 5: "valid", 6: "training"}
    data = load_data(options(write(folder, table(names))))
    assert data.info.streamed == streamed
    assert numbers(data.eval_splits["validation"]) == {3: 1, 5: 1}
    assert numbers(data.eval_splits["test"]) == {4: 0}
    assert data.info.num_train == 3
    with data.train_loader(3, seed=0) as loader:
        _, batch = next(loader)
    levels = sorted(batch["image"][:, 0, 0, 0].tolist())
    assert levels == [1, 2, 6]
    for load in (load_data,) if streamed else (load_data, load_images):
        with pytest.raises(ValueError, match="num_validation=1 .* of their own: set"):
            load(options(folder / "all.csv", num_validation=1))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loader_started_at_a_step_continues_exactly(folder, monkeypatch, streamed):
    if streamed:
        monkeypatch.setattr("relattn.data.load.MEMORY_BYTES", 0)
    data = load_data(options(write(folder, table()), num_validation=2))
    with data.train_loader(2, seed=3) as loader:
        whole = [next(loader)[1] for _ in range(5)]
    with data.train_loader(2, seed=3, start_step=3) as loader:
        step, batch = next(loader)
    assert step == 3
    for key, values in batch.items():
        np.testing.assert_array_equal(values, whole[3][key])


def test_numbers_are_classes_in_numerical_order(folder):
    labels = dict(zip(LABELS, ("10", "9", "2", "9", "10", "2"), strict=True))
    lines = (f"photos/{n}.png,{label}" for n, label in labels.items())
    data = load_images(options(write(folder, "\n".join(["path,label", *lines]))))
    assert data.info.class_names == ("2", "9", "10")
    assert numbers(data.train) == {1: 2, 2: 1, 3: 0, 4: 1, 5: 2, 6: 0}


def test_quotes_spaces_other_columns_and_a_byte_order_mark_are_read(folder):
    (folder / "photos" / "1.png").rename(folder / "photos" / 'a, "b".png')
    text = (
        "\ufeffwidth,Label,PATH\r\n\r\n"
        '5, dog ,"photos/a, ""b"".png"\r\n5, "cat", photos/2.png\r\n'
    )
    images = find_csv_images(write(folder, text))
    assert [image.path.name for image in images.train] == ['a, "b".png', "2.png"]
    assert [image.line for image in images.train] == [3, 4]
    assert images.class_names == ("cat", "dog")
    assert images.left_out == ["columns: width"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"all.csv is empty: write path,label in its first line$"),
        (
            "file,label\n",
            r"first line of .* no column 'path', only 'file,label': write",
        ),
        ("path;label\n", r"no column 'path', only 'path;label': .*, separated by comm"),
        ("path,label,label\n", "names the column 'label' more than once: rename"),
        (
            "path,label\nphotos/1.png,dog\nphotos/2.png\n",
            r"^line 3 of .*all.csv has 1 fields, expected 2 \('path,label'\): correct",
        ),
        ("path,label\nphotos/1.png,\n", r"^line 2 of .*all.csv has no label: add or"),
        (
            "path,label\nphotos/1.png,01\nphotos/2.png,1\nphotos/3.png,2\n",
            r"^the labels '01' and '1' of .*all.csv are the same number, but different",
        ),
        (
            "path,label\nphotos/1.png,1\nphotos/2.png,1.0\nphotos/3.png,cat\n",
            r"^the labels '1' and '1.0' of .*all.csv are the same number, but differ",
        ),
        ("path,label\n,dog\n", r"^line 2 of .*all.csv has no path: add or delete it$"),
        (
            "path,label\nphotos/1.png,dog\nphotos/../photos/1.png,cat\n",
            r"^line 3 of .* lists 'photos/../photos/1.png' again, after line 2: delete",
        ),
        (
            "path,label,Split\nphotos/1.png,dog,tests\n",
            r"^line 2 of .* has the split 'tests': write one of train, .*, testing$",
        ),
        ('path,label\nphotos/1.png,"dog\n', r"^line 2 of .* cannot be read as CSV \("),
        (b"path,label\nphotos/1.png,d\xf6g\n", r"all.csv is not UTF-8 text \(.*: save"),
        ("path,label\n", "lists no training images: add lines, or write train as"),
        (
            "path,label,split\nphotos/1.png,dog,test\n",
            "lists no training images: add lines, or write train as their split$",
        ),
        (
            "path,label\nphotos/1.png,dog\nphotos/3.png,dog\n",
            r"^all training images of .*all.csv are of one class, 'dog': add images",
        ),
        (
            "path,label,split\nphotos/1.png,dog,\nphotos/2.png,cat,\nphotos/4.png,cow,test",
            r"^the class 'cow' of .*4.png \(line 4\) has no training images: add some",
        ),
    ],
)
def test_each_problem_is_a_sentence_with_its_line_and_a_fix(folder, text, message):
    with pytest.raises(ValueError, match=message) as raised:
        load_data(options(write(folder, text)))
    assert len(str(raised.value).splitlines()) == 1


def test_missing_images_are_listed_with_their_lines(folder):
    os.mkfifo(folder / "photos" / "8.png")
    text = f"{table()}photos/8.png,dog\nphotos/9.png,cat\n"
    message = (
        r"^2 of the 8 images of .*all.csv are missing: \S*/photos/8.png \(line 8\), "
        r"\S*/photos/9.png \(line 9\): paths are relative to \S*; correct or delete"
    )
    file = write(folder, text)
    with pytest.raises(FileNotFoundError, match=message):
        load_data(options(file))
    with pytest.raises(FileNotFoundError, match=r"relative to \S*, with / in place of"):
        load_data(options(write(folder, "path,label\nphotos\\1.png,dog\n")))
    file = write(folder, text)
    with pytest.warns(UserWarning, match=r"left out missing images: .*8.png \(line 8"):
        data = load_data(options(file, skip_unreadable=True))
    assert data.info.num_train == 6


def test_images_that_cannot_be_read_are_named_with_their_lines(folder):
    for number in (2, 5):
        (folder / "photos" / f"{number}.png").write_bytes(b"no image")
    file = write(folder, table())
    message = r"^2 of the 6 images .*2.png \(line 3\) \(not .*5.png \(line 6\) \(not a"
    with pytest.raises(ValueError, match=message):
        load_data(options(file))
    with pytest.warns(UserWarning, match=r"unreadable images: .*2.png \(line 3\), "):
        data = load_data(options(file, skip_unreadable=True))
    assert numbers(data.train) == {1: 1, 3: 1, 4: 0, 6: 0}


def test_a_missing_table_and_a_folder_are_refused(folder):
    with pytest.raises(FileNotFoundError, match="no.csv is missing: set data.data_dir"):
        load_data(options(folder / "no.csv"))
    with pytest.raises(ValueError, match="is a folder: set data.data_dir to the CSV"):
        load_data(options(folder))
    with pytest.raises(ValueError, match="data_dir is empty: data.source='csv' needs "):
        load_data(options(""))


def test_images_of_another_size_are_streamed_with_their_labels(folder):
    Image.new("L", (9, 4), 6).save(folder / "photos" / "6.png")
    config = options(write(folder, table()), num_validation=1)
    data = load_data(config)
    assert data.info.streamed and data.info.num_train == 5
    assert data.info.origin.endswith("the validation images are the test images")
    with data.train_loader(5, seed=0) as loader:
        _, batch = next(loader)
    levels = batch["image"][:, 0, 0, 0].tolist()
    expected = {n: int(LABELS[n] == "dog") for n in levels}
    assert dict(zip(levels, batch["label"].tolist(), strict=True)) == expected
    with pytest.raises(ValueError, match="resize all images to one size, or read them"):
        load_images(config)


def test_classes_are_in_numerical_order_only_if_all_are_numbers():
    assert image_list.class_order(["2", "10", "2"]) == ("2", "10")
    assert image_list.class_order(["2", "10", "a"]) == ("10", "2", "a")
    # As pandas writes a column of numbers, of which one is missing.
    assert image_list.class_order(["2.0", "10.0", "-1.5"]) == ("-1.5", "2.0", "10.0")
    assert image_list.class_order(["1e1", "2"]) == ("1e1", "2")
