"""Full sets: read where prepared, prepared where possible, explained where not."""

import dataclasses
import importlib.util
import pathlib

import pytest
from ml_collections import ConfigDict

from relattn.data import full
from relattn.data.catalogue import SETS
from relattn.data.full import DatasetNotPreparedError, prepare_command
from relattn.data.load import load_images


def tfds_config(name, data_dir, **keys):
    return ConfigDict(
        keys | {"name": name, "source": "tfds", "data_dir": str(data_dir)}
    )


def without_digest(monkeypatch, name):
    entry = dataclasses.replace(SETS[name], digest="")
    monkeypatch.setitem(SETS, name, entry)


@pytest.mark.parametrize(
    "name, test_split, first_class",
    [
        ("mnist", "test", "0"),
        ("fashion_mnist", "test", "T-shirt/top"),
        ("cifar10", "test", "cat"),
        ("imagenet_resized/64x64", "validation", "cat"),
    ],
)
def test_prepared_sets_are_read(write_set, monkeypatch, name, test_split, first_class):
    without_digest(monkeypatch, name)
    data_dir, folder = write_set(name, **{"train": 11, test_split: 5})
    data = load_images(tfds_config(name, data_dir, num_validation=3))
    assert (len(data.train), len(data.validation), len(data.test)) == (8, 3, 5)
    assert data.class_names[0] == first_class
    assert data.origin == f"{name} 3.0.1, prepared by TFDS in {folder}"


def test_images_of_another_set_are_noticed(write_set):
    data_dir, _ = write_set("fashion_mnist", train=11, test=5)
    message = "fashion_mnist.3.0.1 are not those of Fashion-MNIST; two sets"
    with pytest.raises(ValueError, match=message):
        load_images(tfds_config("fashion_mnist", data_dir))


def test_not_prepared_and_no_tensorflow(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetNotPreparedError) as info:
        load_images(tfds_config("imagenet_resized/64x64", tmp_path))
    message = str(info.value)
    assert f"imagenet_resized/64x64 is not prepared in {tmp_path}" in message
    assert "TensorFlow, needed for that only, is not installed" in message
    assert "pip install 'relattn[prepare]'" in message
    command = (
        "python -m relattn.data.prepare --name=imagenet_resized/64x64 "
        f"--data_dir={tmp_path}"
    )
    assert f"`{command}`" in message
    assert "--config.data.manual_dir=DIR" in message


@pytest.fixture
def pretend_tensorflow(tmp_path, monkeypatch):
    """Replaces the preparation by a program, where TensorFlow seems to be there."""

    def replace(program):
        script = tmp_path / "prepare.py"
        script.write_text(program)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(
            full, "prepare_command", lambda *names: [str(script), *names]
        )

    return replace


def test_not_prepared_and_no_network(tmp_path, pretend_tensorflow, capsys):
    pretend_tensorflow(
        "import sys\n"
        "print('downloading', file=sys.stderr)\n"
        "sys.exit('cifar10 was not prepared: no connection to host')\n"
    )
    with pytest.raises(
        DatasetNotPreparedError, match=r"\(no connection to host\)\. Prepare it once"
    ):
        load_images(tfds_config("cifar10", tmp_path))
    assert "downloading" in capsys.readouterr().err


def test_prepared_in_a_process_of_its_own(
    write_set, monkeypatch, pretend_tensorflow, tmp_path
):
    without_digest(monkeypatch, "mnist")
    _, folder = write_set("mnist", train=11, test=5)
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    pretend_tensorflow(
        "import os, pathlib, sys\n"
        "import relattn.data.prepared\n"
        "assert sys.argv[1:] == ['mnist', sys.argv[2], 'archives']\n"
        f"os.rename({str(hidden)!r}, {str(folder)!r})\n"
    )
    data = load_images(tfds_config("mnist", tmp_path, manual_dir="archives"))
    assert len(data.train) == 11


def test_the_command_is_the_one_of_the_message():
    command = prepare_command("mnist", "a b", "archives")
    expected = ["-m", "relattn.data.prepare"]
    expected += ["--name=mnist", "--data_dir=a b", "--manual_dir=archives"]
    assert command == expected
    text = str(full.not_prepared("mnist", "a b", "why"))
    assert "`python -m relattn.data.prepare --name=mnist '--data_dir=a b'`" in text
    assert pathlib.Path(full.__file__).with_name("prepare.py").is_file()
