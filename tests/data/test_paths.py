"""Home directories, unreadable files and checksums."""

import hashlib
import json
import pathlib

import pytest
from ml_collections import ConfigDict

from relattn import manifest
from relattn.command import is_user_error
from relattn.data import load_data, load_tokenizer
from relattn.files import expand
from relattn.manifest import MANIFEST, find_damage, sha256, write_manifest
from tests.helpers.unprivileged import public_folder, without_privileges

NOBODY = "~no.such.user/x"


def test_home_directory_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/a/home")
    assert expand("~/x", "data_dir") == pathlib.Path("/a/home/x")
    assert expand("x/~", "data_dir") == pathlib.Path("x/~")


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "a", "source": "folder"},
        {"name": "mnist", "source": "tfds"},
        {"source": "text", "context_length": 3},
    ],
)
def test_unknown_home_directory_raises(keys):
    with pytest.raises(ValueError, match=f"data_dir={NOBODY} begins with a home dir"):
        load_data(ConfigDict({**keys, "data_dir": NOBODY}))


@pytest.mark.parametrize("inside", [True, False])
def test_unreadable_data_raise(inside):
    keys = {"source": "text", "context_length": 3}
    with public_folder() as folder:
        data = folder / "data"
        data.mkdir()
        (data / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 256}')
        (data / "train.bin").write_bytes(bytes(100))
        closed = data / "train.bin" if inside else data
        closed.chmod(0)
        problem = r"data/\w+\.\w+ cannot be read \(Permission denied\): make it"
        with without_privileges(), pytest.raises(OSError, match=problem) as error:
            load_data(ConfigDict({**keys, "data_dir": str(data)}))
        assert is_user_error(error.value)


def test_vocabulary_in_unknown_home_directory_raises():
    pytest.importorskip("tiktoken")
    with pytest.raises(ValueError, match=f"bpe_dir={NOBODY} begins with a home dir"):
        load_tokenizer("gpt2", NOBODY)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(251)))
    (tmp_path / "b.txt").write_text("cat\ndog\n")
    write_manifest(tmp_path, ["a.bin", "b.txt"])
    return tmp_path


def flip(path, position, bit=0):
    """Flips a bit of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_sha256_covers_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 7)
    content = bytes(range(23))
    (tmp_path / "a").write_bytes(content)
    assert sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_unchanged_files_are_not_damaged(folder):
    (folder / "test.bin").write_bytes(b"added later")
    assert find_damage(folder) == ""


def test_folder_without_manifest_is_not_checked(folder):
    (folder / MANIFEST).unlink()
    flip(folder / "a.bin", 3)
    assert find_damage(folder) == ""


@pytest.mark.parametrize(("name", "position"), [("a.bin", 250), ("b.txt", 0)])
def test_flipped_bit_is_found(folder, name, position):
    flip(folder / name, position)
    assert find_damage(folder) == (
        f"{folder / name} is damaged (its SHA-256 is not that of manifest.json)"
    )


def test_missing_file_is_found(folder):
    (folder / "b.txt").unlink()
    message = f"{folder} has no file 'b.txt', which manifest.json lists"
    assert find_damage(folder) == message


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "", "sub/a"])
def test_files_outside_the_folder_are_not_read(folder, monkeypatch, name):
    (folder.parent / "a").touch()
    (folder / MANIFEST).write_text(json.dumps({name: "0"}))
    monkeypatch.setattr(manifest, "sha256", None)
    assert (
        find_damage(folder) == f"{folder} has no file {name!r}, which {MANIFEST} lists"
    )


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "7", "caf\xe9"])
def test_invalid_manifest_is_damaged(folder, text):
    (folder / MANIFEST).write_text(text, "latin-1")
    assert find_damage(folder).startswith(f"{folder / MANIFEST} is damaged")
