"""Folders to write to are checked, and files are replaced whole."""

import errno
import os

import pytest

from relattn.files import (
    check_folder,
    hide_all_folders,
    hide_folders,
    naming,
    open_new,
    replace_file,
    usable_file,
    usable_folder,
)
from tests.helpers.sentences import assert_refused


@pytest.mark.parametrize("check", [check_folder, usable_folder])
@pytest.mark.parametrize(
    "name",
    ["", "gs://bucket/a", "file", "file/a", "file/a/b", "~no.such.user/a"],
)
def test_paths_that_are_no_folders_are_refused(check, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert_refused(lambda: check(name, "--output"), "--output", name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("check", [check_folder, usable_folder])
@pytest.mark.parametrize("name", ["link", "link/a"])
def test_links_to_missing_folders_are_named(check, name, tmp_path, monkeypatch):
    """As where a disk is not mounted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    assert_refused(lambda: check(name, "--output"), "link is a link to a missing")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


@pytest.mark.parametrize("name", ["", "folder", ".", "file/a", "~no.such.user/a"])
def test_paths_that_are_no_files_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    assert_refused(lambda: usable_file(name, "--output"), "--output")


@pytest.mark.parametrize("check", [check_folder, usable_folder, usable_file])
def test_deleted_folder_is_named(check, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert_refused(lambda: check("a", "--output"), "the current folder was deleted")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert_refused(lambda: usable_file(tmp_path / "pipe", "--output"), "or a pipe")


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "s3://bucket/a"])
@pytest.mark.parametrize("check", [check_folder, usable_folder, usable_file])
def test_names_that_no_file_can_have_are_refused(check, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(lambda: check(name, "--output"), "--output")
    assert not list(tmp_path.iterdir())


def test_folders_are_created_to_write_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert check_folder("a/b", "--output") == tmp_path / "a/b"
    assert not (tmp_path / "a").exists()
    assert usable_folder("a/b", "--output") == tmp_path / "a/b"
    assert usable_file("c/d.txt", "--output") == tmp_path / "c/d.txt"
    assert sorted(map(str, tmp_path.rglob("*"))) == [
        f"{tmp_path}/{name}" for name in ("a", "a/b", "c")
    ]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("the images in /home/me/flowers", "the images in flowers"),
        ("the images in /data", "the images in data"),
        ("/a/b.txt, /a/c.txt", "b.txt, c.txt"),
        ("'/home/me/a' (\"~/b/c\")", "'a' (\"c\")"),
        ("~me/runs/first", "first"),
        ("C:\\Users\\me\\flowers", "flowers"),
        ("https://a.org/b/c and/or ../x/y", "https://a.org/b/c and/or ../x/y"),
        ("MNIST (CC BY-SA 3.0), 1/2 of it", "MNIST (CC BY-SA 3.0), 1/2 of it"),
        ("", ""),
        ("in file:///home/me/a", "in a"),
    ],
)
def test_folders_are_hidden(text, expected):
    assert hide_folders(text) == expected


@pytest.mark.parametrize(
    "value, expected",
    [
        ("/home/me/my flowers/", "my flowers"),
        ("~me/a", "a"),
        ("C:\\Users\\me\\a", "a"),
        (["file:/home/me/a", 3], ["a", 3]),
        ({"path": {"to": "see /home/me/a"}}, {"path": {"to": "see a"}}),
        ("T-shirt/top, favor(num_features=4)", "T-shirt/top, favor(num_features=4)"),
    ],
)
def test_all_folders_of_a_configuration_are_hidden(value, expected):
    assert hide_all_folders(value) == expected


@pytest.mark.parametrize("folder", ["/home/me/my flowers", "~/my flowers"])
def test_folder_with_spaces_is_hidden(folder, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for named in (folder, "/home/me/my flowers"):
        assert hide_folders(f"images in {named}", folder) == "images in my flowers"


@pytest.mark.parametrize("place", ["a.txt", "a.txt.tmp"])
@pytest.mark.parametrize("target", ["other.txt", "nowhere"])
def test_links_are_not_followed(place, target, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("other")
    (tmp_path / place).symlink_to(tmp_path / target)
    replace_file(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert not (tmp_path / "a.txt").is_symlink()
    assert other.read_text() == "other"
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", "other.txt"}


def test_hard_links_keep_their_contents(tmp_path):
    (tmp_path / "other").write_text("other")
    os.link(tmp_path / "other", tmp_path / "a.txt")
    replace_file(tmp_path / "a.txt", b"new")
    assert (tmp_path / "other").read_text() == "other"


def test_file_is_as_readable_as_others(tmp_path):
    (tmp_path / "other").touch()
    replace_file(tmp_path / "a", "größe \udcff")
    assert (tmp_path / "a").read_bytes() == "größe \\udcff".encode()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("step", ["fsync", "replace", "open"])
def test_old_file_survives_a_full_disk(step, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space left on device: .*a.txt'"):
        replace_file(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("name", ["folder", "no/such/folder/a"])
def test_file_that_cannot_be_written_is_named(name, tmp_path):
    (tmp_path / "folder").mkdir()
    assert_refused(lambda: replace_file(tmp_path / name, "new"), str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_errors_of_reading_name_the_file():
    with pytest.raises(OSError, match="Input/output error: 'a.txt'"), naming("a.txt"):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="b.txt"), naming("a.txt"):
        raise OSError(errno.EIO, "Input/output error", "b.txt")
    with pytest.raises(OSError, match="^a sentence$"), naming("a.txt"):
        raise OSError("a sentence")


def test_a_new_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / "other").write_text("other")
    (tmp_path / "a").symlink_to(tmp_path / "other")
    with open_new(tmp_path / "a", "w") as file:
        file.write("new")
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "other").read_text() == "other"
