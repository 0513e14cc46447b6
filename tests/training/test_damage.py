"""Damage to checkpoints: the one before is used, and nothing is deleted.

What is verified are the files in ``state``, ``meta`` and ``metrics``, and the manifest.
Those beside them may be missing.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from relattn.training import CheckpointError
from relattn.training.checkpoint import MANIFEST, checkpoint_steps, restore
from relattn.training.damage import read_latest, set_damaged_aside
from tests.training.test_checkpoint import contents, make_state, save


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "checkpoints", {7: 0.5})
    return tmp_path / "checkpoints"


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_whatever_is_damaged_the_checkpoint_before_it_is_used(folder, damage):
    save(folder, {11: 0.3})
    paths = [p for p in (folder / "11").glob("*/**/*") if p.is_file()]
    manifest = folder / "11" / MANIFEST
    for path in [*paths, manifest]:
        # A bit of the manifest is one of the name or the sum of another file.
        named = r"\S+" if path == manifest else path.name
        original = path.read_bytes()
        if not original:
            continue
        damage(path)
        before = contents(folder)
        with pytest.warns(UserWarning, match=f"{named} is .*/7 is used instead"):
            step, meta = read_latest(folder)
        assert (step, meta["note"]) == (7, [7])
        assert contents(folder) == before
        path.write_bytes(original)
    assert read_latest(folder)[0] == 11


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip, empty, Path.unlink])
def test_files_beside_the_items_are_not_needed(folder, damage):
    beside = [path for path in (folder / "7").iterdir() if path.is_file()]
    assert "_CHECKPOINT_METADATA" in [path.name for path in beside]
    for path in beside:
        if path.name != MANIFEST:
            damage(path)
    assert read_latest(folder)[0] == 7
    state = make_state(7)
    jax.tree.map(np.testing.assert_array_equal, restore(folder, 7, state), state)
    save(folder, {8: 0.4, 9: 0.3, 11: 0.2})
    assert checkpoint_steps(folder) == [7, 9, 11]


@pytest.mark.parametrize("text", ["5", "[" * 100000, '{"item_handlers": 5}'])
def test_times_that_orbax_cannot_read(folder, text):
    (folder / "7" / "_CHECKPOINT_METADATA").write_text(text)
    assert read_latest(folder)[0] == 7
    message = rf"cannot read a _CHECKPOINT_METADATA in {folder} \(.*\): remove it"
    with pytest.raises(CheckpointError, match=message):
        save(folder, {11: 0.3})
    (folder / "7" / "_CHECKPOINT_METADATA").unlink()
    save(folder, {11: 0.3})
    assert checkpoint_steps(folder) == [7, 11]


def test_several_damaged_checkpoints_are_named_and_the_latest_if_all_are(tmp_path):
    save(tmp_path, {5: 0.5, 7: 0.4, 11: 0.3})
    for step in (7, 11):
        flip(tmp_path / str(step) / "meta" / "metadata")
    with pytest.warns(UserWarning, match="5 is used instead") as warned:
        assert read_latest(tmp_path)[0] == 5
    assert ["/11/" in str(w.message) for w in warned] == [True, False]
    truncate(tmp_path / "5" / MANIFEST)
    before = contents(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"11/meta/metadata is damaged .*; nothing was changed: restore the file",
    ):
        read_latest(tmp_path)
    assert contents(tmp_path) == before


def test_damaged_checkpoints_are_set_aside_and_written_anew(folder):
    for number in ("", "2"):
        save(folder, {11: 0.3, 13: 0.2})
        for step in (11, 13):
            flip(folder / str(step) / "meta" / "metadata")
        damaged = (folder / "11" / "meta" / "metadata").read_bytes()
        set_damaged_aside(folder, 7)
        aside = folder / f"11.damaged{number}" / "meta" / "metadata"
        assert aside.read_bytes() == damaged
        assert checkpoint_steps(folder) == [7]
    assert len(list(folder.glob("1?.damaged*"))) == 4
    save(folder, {11: 0.3})
    set_damaged_aside(folder, 11)
    assert read_latest(folder)[0] == 11


def write(text):
    return lambda path: path.write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip,
        write("[" * 100000),
        write("5"),
        write(json.dumps({"scores": "x"})),
    ],
)
def test_an_earlier_checkpoint_with_damaged_scores_is_set_aside(folder, damage):
    save(folder, {11: 0.3})
    damage(folder / "7" / "metrics" / "metrics")
    set_damaged_aside(folder, 11)
    save(folder, {13: 0.2, 17: 0.1})
    assert checkpoint_steps(folder) == [11, 13, 17]
    assert (folder / "7.damaged" / MANIFEST).exists()


def test_what_a_kill_left_of_a_removed_checkpoint_is_not_set_aside(folder):
    save(folder, {11: 0.6})
    (folder / "7" / MANIFEST).unlink()
    set_damaged_aside(folder, 11)
    (folder / "7" / "metrics" / "metrics").unlink()
    set_damaged_aside(folder, 11)
    assert checkpoint_steps(folder) == [7, 11]
