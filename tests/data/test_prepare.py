"""`relattn prepare`: archives, checksums, TensorFlow."""

import importlib.util
import io
import json
import pathlib
import socket
import sys
import tarfile
import urllib.request

import pytest
import tensorflow_datasets as tfds
from ml_collections import ConfigDict

from relattn.data.load import load_data, load_images
from relattn.data.prepare import check_archives, main
from relattn.manifest import find_damage
from tests.data.conftest import encode_photograph

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


def test_unreachable_host_raises(no_network):
    with pytest.raises(ConnectionError, match=r"^no connection to nowhere.invalid$"):
        check_archives("mnist", URLS, "")


def test_missing_archives_are_named_in_the_error(no_network, tmp_path):
    (tmp_path / "one.gz").touch()
    message = r"^two.gz not in .* and no connection to nowhere.invalid$"
    with pytest.raises(ConnectionError, match=message):
        check_archives("mnist", URLS, str(tmp_path))


def test_local_archives_need_no_network(no_network, tmp_path):
    for name in ("one.gz", "two.gz", "Imagenet64_val_npz.zip"):
        (tmp_path / name).touch()
    check_archives("mnist", URLS, str(tmp_path))
    check_archives("imagenet_resized/64x64", IMAGENET_URLS, str(tmp_path))


def test_download_is_tried_behind_a_proxy(no_network, monkeypatch):
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "proxy:3128"})
    check_archives("mnist", URLS, "")


def test_missing_tensorflow_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        main(["--name=cifar10", f"--data_dir={tmp_path}"])
    assert "cifar10 was not prepared: TensorFlow is not installed: `" in (
        capsys.readouterr().err
    )


def test_prepare_writes_checksums(write_set, monkeypatch, tmp_path):
    prepared = write_set("cifar10", train=11, test=5)[1]

    class Builder:
        url_infos, data_path = (), str(prepared)

        def download_and_prepare(self, **keys):
            pass

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(tfds, "builder", lambda *names, **keys: Builder())
    main(["--name=cifar10", f"--data_dir={tmp_path / 'elsewhere'}"])
    sums = json.loads((prepared / "manifest.json").read_text())
    assert list(sums) == ["dataset_info.json", "features.json", "label.labels.txt"]
    assert find_damage(prepared) == ""


def test_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit):
        main(["--name=minst"])
    assert "invalid choice: 'minst'" in capsys.readouterr().err


@pytest.mark.slow
@needs_tensorflow
@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="needs ../shared/data")
@pytest.mark.filterwarnings("ignore")
def test_sets_with_equal_archive_names_are_prepared(tmp_path):
    for name in ("mnist", "fashion_mnist"):
        config = ConfigDict({"name": name, "source": "tfds", "num_validation": 5000})
        config.data_dir = str(tmp_path)
        config.manual_dir = str(ORIGINALS / name)
        data = load_images(config)
        sizes = (len(data.train), len(data.validation), len(data.test))
        assert sizes == (55000, 5000, 10000)
    assert "tensorflow" not in sys.modules


def tar(files):
    """Returns a tar archive in memory with the given files."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as writer:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content.getvalue())
            content.seek(0)
            writer.addfile(info, content)
    return archive


@pytest.mark.slow
@needs_tensorflow
@pytest.mark.filterwarnings("ignore")
def test_imagenet_is_prepared_from_its_archives(tmp_path):
    train = {
        f"{synset}.tar": tar(
            {f"{synset}_{i}.JPEG": encode_photograph(7, i) for i in range(5)}
        )
        for synset in ("n01440764", "n01443537")
    }
    test = {
        f"ILSVRC2012_val_{i:08d}.JPEG": encode_photograph(3, i) for i in range(1, 4)
    }
    for name, files in (("train", train), ("val", test)):
        archive = tmp_path / f"ILSVRC2012_img_{name}.tar"
        archive.write_bytes(tar(files).getvalue())
    config = ConfigDict({"name": "imagenet2012", "source": "tfds", "num_validation": 3})
    config.data_dir = str(tmp_path / "sets")
    config.manual_dir = str(tmp_path)
    data = load_data(config)
    assert data.info.class_names[:2] == ("n01440764", "n01443537")
    assert data.info.num_classes == 1000
    assert [len(data.train), *map(len, data.eval_splits.values())] == [7, 3, 3]
    with data.train_loader(7, seed=0) as loader:
        _, batch = next(loader)
    assert batch["image"].shape == (7, 224, 224, 3) and set(batch["label"]) <= {0, 1}
    assert "tensorflow" not in sys.modules
