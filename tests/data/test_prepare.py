"""`python -m relattn.data.prepare`."""

import importlib.util
import pathlib
import socket
import sys
import urllib.request

import pytest
from ml_collections import ConfigDict

from relattn.data.load import load_images
from relattn.data.prepare import check_archives, main

ORIGINALS = pathlib.Path(__file__).parents[3] / "shared" / "data"
URLS = ["https://nowhere.invalid/a/one.gz", "https://nowhere.invalid/a/two.gz"]
IMAGENET_URLS = [
    "http://nowhere.invalid//Imagenet32_train_npz.zip",
    "http://nowhere.invalid//Imagenet64_val_npz.zip",
]
needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(address, timeout):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(urllib.request, "getproxies", dict)


def test_no_network(no_network):
    with pytest.raises(ConnectionError, match=r"^no connection to nowhere.invalid$"):
        check_archives("mnist", URLS, "")


def test_missing_archives_are_named(no_network, tmp_path):
    (tmp_path / "one.gz").touch()
    message = r"^two.gz not in .* and no connection to nowhere.invalid$"
    with pytest.raises(ConnectionError, match=message):
        check_archives("mnist", URLS, str(tmp_path))


def test_archives_at_hand_need_no_network(no_network, tmp_path):
    for name in ("one.gz", "two.gz", "Imagenet64_val_npz.zip"):
        (tmp_path / name).touch()
    check_archives("mnist", URLS, str(tmp_path))
    check_archives("imagenet_resized/64x64", IMAGENET_URLS, str(tmp_path))


def test_behind_a_proxy_the_download_is_tried(no_network, monkeypatch):
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "proxy:3128"})
    check_archives("mnist", URLS, "")


def test_without_tensorflow(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--name=cifar10", f"--data_dir={tmp_path}"])
    assert "cifar10 was not prepared: ImportError: no TensorFlow: `pip install" in (
        capsys.readouterr().err
    )


def test_unknown_name(capsys):
    with pytest.raises(SystemExit):
        main(["--name=minst"])
    assert "invalid choice: 'minst'" in capsys.readouterr().err


@needs_tensorflow
@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="the original archives are not here")
@pytest.mark.filterwarnings("ignore")
def test_both_sets_of_equal_file_names(tmp_path):
    for name in ("mnist", "fashion_mnist"):
        config = ConfigDict({"name": name, "source": "tfds", "num_validation": 5000})
        config.data_dir = str(tmp_path)
        config.manual_dir = str(ORIGINALS / name)
        data = load_images(config)
        sizes = (len(data.train), len(data.validation), len(data.test))
        assert sizes == (55000, 5000, 10000)
    assert "tensorflow" not in sys.modules
