"""Files that are not as they were when they were written are noticed."""

import hashlib
import json

import pytest

from relattn.data import manifest
from relattn.data.manifest import MANIFEST, find_damage, sha256, write_manifest


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


def test_the_digest_is_that_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 7)
    content = bytes(range(23))
    (tmp_path / "a").write_bytes(content)
    assert sha256(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_unchanged_files(folder):
    (folder / "test.bin").write_bytes(b"added later")
    assert find_damage(folder) == ""


def test_a_folder_without_a_manifest(folder):
    (folder / MANIFEST).unlink()
    flip(folder / "a.bin", 3)
    assert find_damage(folder) == ""


@pytest.mark.parametrize(("name", "position"), [("a.bin", 250), ("b.txt", 0)])
def test_a_flipped_bit(folder, name, position):
    flip(folder / name, position)
    assert find_damage(folder) == (
        f"{folder / name} is damaged (its SHA-256 is not that of manifest.json)"
    )


def test_a_missing_file(folder):
    (folder / "b.txt").unlink()
    message = f"{folder} has no file 'b.txt', which manifest.json lists"
    assert find_damage(folder) == message


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "", "sub/a"])
def test_nothing_outside_of_the_folder_is_read(folder, monkeypatch, name):
    (folder.parent / "a").touch()
    (folder / MANIFEST).write_text(json.dumps({name: "0"}))
    monkeypatch.setattr(manifest, "sha256", None)
    assert (
        find_damage(folder) == f"{folder} has no file {name!r}, which {MANIFEST} lists"
    )


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "7", "caf\xe9"])
def test_a_manifest_that_is_none(folder, text):
    (folder / MANIFEST).write_text(text, "latin-1")
    assert find_damage(folder).startswith(f"{folder / MANIFEST} is damaged")
