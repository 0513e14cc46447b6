"""No input is executed: the package never unpickles, evaluates or extracts input."""

import ast
import hashlib
import io
import json
import pathlib
import pickle
import tarfile
import zipfile

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image
from tensorflow_datasets.core.download import extractor, resource

from relattn.data import load_data
from relattn.data.tfds import read_prepared
from relattn.data.tokenizers import load_tokenizer
from relattn.models.safetensors import read_safetensors
from relattn.training.checkpoint import MANIFEST, CheckpointWriter, read_meta
from tests.data.conftest import write_set as write_set  # noqa: PLC0414

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = [
    *ROOT.glob("*.py"),
    *ROOT.glob("configs/*.py"),
    *ROOT.glob("relattn/**/*.py"),
]
CODE = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal"}
CODE |= {"shelve", "yaml", "runpy", "code", "codeop", "imp"}
ARCHIVES = {"tarfile", "zipfile", "patoolib", "py7zr", "rarfile"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
CALLS |= {"shutil.unpack_archive"}
EXCEPTIONS = {
    # A configuration is a program that the user passes on the command line.
    ("relattn/training/config_file.py", "loader.exec_module"),
    # The modules of lazily imported names and of commands come from tables.
    ("relattn/__init__.py", "importlib.import_module of a variable"),
    ("relattn/cli.py", "importlib.import_module of a variable"),
    # The module of --import is a program too.
    ("relattn/command.py", "importlib.import_module of a variable"),
}


def dotted(node):
    """Returns the dotted name of a call, such as np.load; "" if it has none."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def dangers(source):
    """Yields the calls and imports that could execute input or write other files."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                if module.partition(".")[0] in CODE | ARCHIVES:
                    yield f"import {module}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        keywords = {word.arg: word.value for word in node.keywords}
        if name in CALLS or name.endswith((".extractall", ".extract", ".exec_module")):
            yield name
        constant = node.args and isinstance(node.args[0], ast.Constant)
        if name == "importlib.import_module" and not constant:
            yield f"{name} of a variable"
        if name in ("np.load", "numpy.load") and not (
            "allow_pickle" in keywords
            and getattr(keywords["allow_pickle"], "value", True) is False
        ):
            yield f"{name} without allow_pickle=False"
        if name == "torch.load" and not getattr(
            keywords.get("weights_only"), "value", False
        ):
            yield f"{name} without weights_only=True"
        if name != "np.load" and getattr(keywords.get("allow_pickle"), "value", False):
            yield f"{name} with pickles"
        if getattr(keywords.get("shell"), "value", False):
            yield f"{name} by a shell"


def test_package_has_no_dangerous_calls():
    found = {
        (path.relative_to(ROOT).as_posix(), danger)
        for path in SOURCES
        for danger in dangers(path.read_text("utf-8"))
    }
    assert len(SOURCES) > 100
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    "source",
    [
        "import pickle as p",
        "from joblib import load",
        "import yaml.cyaml",
        "import tarfile",
        "from zipfile import ZipFile",
        "shutil.unpack_archive(file)",
        "archive.extractall(folder)",
        "eval(text)",
        "__import__(name)",
        "importlib.import_module(name)",
        "loader.exec_module(module)",
        "np.load(file)",
        "np.load(file, allow_pickle=True)",
        "np.load(file, allow_pickle=trusted)",
        "open_memmap(file, allow_pickle=True)",
        "torch.load(file)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_dangerous_calls_are_detected(source):
    assert list(dangers(source))


def write_tar(names):
    """Writes an archive with these names and with links to outside files."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo(f"link{kind}")
            link.type, link.linkname = kind, "/etc/passwd"
            archive.addfile(link)
    file.seek(0)
    return file


def write_zip(names):
    """Writes an archive with these names."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return file


@pytest.mark.parametrize("write", [write_tar, write_zip])
def test_tfds_extracts_into_its_folder_only(write):
    """TFDS extracts archives in `relattn.data.prepare`, the only code that does."""
    names = ["../a", "b/../../c", "/d", "e/f"]
    method = resource.ExtractMethod[write.__name__.removeprefix("write_").upper()]
    members = extractor.iter_archive(write(names), method)
    assert [name for name, _ in members] == ["e/f"]


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.fixture
def payload(tmp_path):
    """Creates tmp_path/ran when unpickled."""
    return Payload(tmp_path / "ran")


@pytest.fixture(params=["pickle", "npy", "npz"])
def hostile(payload, request):
    """Returns a file that runs the payload if unpickled, directly or by NumPy."""
    array = np.array([payload, payload], dtype=object)
    file = io.BytesIO()
    if request.param == "pickle":
        pickle.dump(payload, file)
    elif request.param == "npy":
        np.save(file, array, allow_pickle=True)
    else:
        np.savez(file, array=array, allow_pickle=True)
    return file.getvalue() + bytes(len(file.getvalue()) % 2)


def read_image_folder(folder, hostile):
    for name in ("train/a/1.png", "train/a/2.png", "train/b/1.png", "test/a/1.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (5, 3)).save(folder / name)
    (folder / "train/a/2.png").write_bytes(hostile)
    load_data(ConfigDict({"name": "a", "source": "folder", "data_dir": str(folder)}))


def token_folder_reader(name):
    def read(folder, hostile):
        for part in ("train.bin", "val.bin"):
            (folder / part).write_bytes(bytes(100))
        (folder / name).write_bytes(hostile)
        keys = {"source": "text", "data_dir": str(folder), "context_length": 7}
        load_data(ConfigDict({**keys, "tokenizer": "bytes"}))

    return read


def read_checkpoint(folder, hostile):
    writer = CheckpointWriter(folder)
    writer.save(3, {"w": np.zeros(5, np.float32)}, {}, [0.5])
    writer.close()
    manifest = folder / "3" / MANIFEST
    sums = dict.fromkeys(
        json.loads(manifest.read_text()), hashlib.sha256(hostile).hexdigest()
    )
    for name in sums:
        (folder / "3" / name).write_bytes(hostile)
    manifest.write_text(json.dumps(sums))
    read_meta(folder, 3)


def read_model(folder, hostile):
    (folder / "model.safetensors").write_bytes(hostile)
    read_safetensors(folder / "model.safetensors")


def read_vocabulary(folder, hostile):
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).write_bytes(hostile)
    load_tokenizer("gpt2", str(folder))


@pytest.mark.parametrize(
    "read",
    [
        read_image_folder,
        token_folder_reader("train.bin"),
        token_folder_reader("meta.json"),
        read_checkpoint,
        read_model,
        read_vocabulary,
    ],
)
def test_payload_raises_and_does_not_run(read, tmp_path, payload, hostile):
    folder = tmp_path / "input"
    folder.mkdir()
    with pytest.raises((ValueError, OSError), match=str(folder)) as raised:
        read(folder, hostile)
    assert len(str(raised.value).splitlines()) == 1
    assert not payload.path.exists()


@pytest.mark.parametrize(
    "name", ["features.json", "dataset_info.json", "decoded-train-images.npy"]
)
def test_payload_in_prepared_set_raises_and_does_not_run(
    name, write_set, payload, hostile, monkeypatch
):
    monkeypatch.setattr("relattn.data.tfds.MAPPED_BYTES", 0)
    _, folder = write_set("mnist", train=3, test=2)
    read_prepared(folder)
    (folder / name).write_bytes(hostile)
    with pytest.raises(ValueError, match=f"{folder} cannot be read") as raised:
        read_prepared(folder)
    assert len(str(raised.value).splitlines()) == 1
    assert not payload.path.exists()


def test_payload_runs_when_unpickled(payload):
    pickle.loads(pickle.dumps(payload))
    assert payload.path.exists()
