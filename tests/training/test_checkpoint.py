import dataclasses
import hashlib
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn.data import TextInfo
from relattn.training import CheckpointError, TrainState
from relattn.training.checkpoint import (
    MANIFEST,
    CheckpointWriter,
    checkpoint_steps,
    read_meta,
    restore,
)
from relattn.training.errors import DamagedError

INFO = TextInfo("a text", "bytes", 256, 7, 200, "somewhere")
META = {"config": {}, "data": dataclasses.asdict(INFO), "history": {}}


def make_state(step, width=5):
    rng = np.random.default_rng(step)
    params = {
        "embedding": {"kernel": rng.normal(size=(3, width)).astype(np.float32)},
        "scale": jnp.asarray(rng.normal(), jnp.bfloat16),
    }
    state = TrainState(
        step=np.int32(step),
        params=params,
        opt_state=optax.chain(optax.clip(1.0), optax.adam(0.1)).init(params),
        random_features={},
        batch_stats={},
    )
    return jax.tree.map(np.array, state)


def save(folder, accuracies):
    writer = CheckpointWriter(folder)
    for step, accuracy in accuracies.items():
        writer.save(step, make_state(step), {**META, "note": [step]}, [accuracy])
    writer.close()


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "checkpoints", {7: 0.5})
    return tmp_path / "checkpoints"


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_restored_is_what_was_saved(folder):
    assert read_meta(folder, 7)["note"] == [7]
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_state(7)
    )
    restored = restore(folder, 7, template)
    jax.tree.map(np.testing.assert_array_equal, restored, make_state(7))
    assert isinstance(restored, TrainState)
    assert restored.params["scale"].dtype == jnp.bfloat16
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored))


def test_the_latest_two_and_the_earliest_best_are_kept(tmp_path):
    save(tmp_path, {1: 0.2, 2: 0.7, 3: None, 4: 0.7, 5: 0.6, 6: None})
    assert checkpoint_steps(tmp_path) == [2, 5, 6]
    save(tmp_path, {8: 0.1, 9: 0.3})
    assert checkpoint_steps(tmp_path) == [2, 8, 9]


def test_the_best_of_every_seed_is_kept(tmp_path):
    writer = CheckpointWriter(tmp_path, num_seeds=3)
    scores = {1: [0.9, 0.1, 0.2], 2: [0.5, 0.8, 0.2], 3: [0.1, 0.2, 0.2]}
    scores |= {5: [0.5, None, 0.1], 7: [None] * 3}
    for step, values in scores.items():
        writer.save(step, make_state(step), {}, values)
    writer.close()
    assert checkpoint_steps(tmp_path) == [1, 2, 5, 7]
    writer = CheckpointWriter(tmp_path, num_seeds=3)
    writer.save(8, make_state(8), {}, [0.1, 0.9, None])
    writer.close()
    assert checkpoint_steps(tmp_path) == [1, 7, 8]


def test_scores_may_be_negative(tmp_path):
    save(tmp_path, {1: -3.0, 2: -2.0, 3: None, 4: -2.5, 5: None})
    assert checkpoint_steps(tmp_path) == [2, 4, 5]


def test_checkpoints_of_before_there_was_text_keep_their_rank(folder):
    metrics = folder / "7" / "metrics" / "metrics"
    metrics.write_text(json.dumps({"validation_accuracy": 0.5, "step": 7}))
    save(folder, {8: 0.4, 9: 0.3, 11: 0.2})
    assert checkpoint_steps(folder) == [7, 9, 11]
    metrics.write_text(json.dumps({"score": 0.5, "step": 7}))
    save(folder, {12: 0.4})
    assert checkpoint_steps(folder) == [7, 11, 12]


def test_what_a_kill_left_of_a_removed_checkpoint_goes_at_last(folder):
    shutil.copytree(folder / "7", folder / "3")
    shutil.rmtree(folder / "3" / "metrics")
    save(folder, {9: 0.1, 11: 0.2, 13: 0.3})
    assert checkpoint_steps(folder) == [7, 11, 13]


def test_incomplete_folders_are_ignored(folder):
    unfinished = folder / "9.orbax-checkpoint-tmp"
    shutil.copytree(folder / "7", unfinished)
    assert checkpoint_steps(folder) == [7]
    save(folder, {9: 0.6})
    assert checkpoint_steps(folder) == [7, 9]
    assert read_meta(folder, 9)["note"] == [9]


def test_every_flipped_bit_is_found_and_the_file_named(folder):
    paths = [p for p in (folder / "7").glob("*/**/*") if p.is_file()]
    assert len(paths) > 5
    for path in paths:
        original = path.read_bytes()
        if not original:
            continue
        path.write_bytes(bytes([original[0] ^ 1]) + original[1:])
        before = contents(folder)
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
            read_meta(folder, 7)
        assert contents(folder) == before
        path.write_bytes(original)
    read_meta(folder, 7)


def test_a_missing_file_is_named(folder):
    (folder / "7" / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"state/_METADATA is missing"):
        read_meta(folder, 7)


def test_a_foreign_checkpoint_is_refused(folder):
    (folder / "8").mkdir()
    (folder / "8" / "weights.bin").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=r"8/manifest.json is missing"):
        read_meta(folder, 8)


@pytest.mark.parametrize("text", ["", "{", "\xff", "5", "[[1, 2]]", "[" * 100000])
def test_a_manifest_that_is_none(folder, text):
    (folder / "7" / MANIFEST).write_bytes(text.encode("latin1"))
    with pytest.raises(DamagedError, match=r"7/manifest.json is damaged"):
        read_meta(folder, 7)


@pytest.mark.parametrize("name", ["meta/metadata", "state/_METADATA"])
def test_every_file_must_be_in_the_manifest(folder, name):
    manifest = folder / "7" / MANIFEST
    sums = json.loads(manifest.read_text())
    del sums[name]
    manifest.write_text(json.dumps(sums))
    with pytest.raises(DamagedError, match=rf"/{name} is missing from .*manifest.json"):
        read_meta(folder, 7)


def test_the_manifest_does_not_lead_out_of_the_checkpoint(folder):
    manifest = folder / "7" / MANIFEST
    sums = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**sums, "../../secret": ""}))
    with pytest.raises(DamagedError, match="secret is missing from the checkpoint"):
        read_meta(folder, 7)


def forge(checkpoint, meta):
    """Rewrites what a checkpoint says, and its SHA-256."""
    path, manifest = checkpoint / "meta" / "metadata", checkpoint / MANIFEST
    path.write_text(json.dumps(meta))
    sums = json.loads(manifest.read_text())
    sums["meta/metadata"] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(sums))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (dict.fromkeys(["config"]), "config is None"),
        ({"config": 5}, "config is 5"),
        ({"data": [1]}, r"data is \[1\]"),
        ({"history": "x"}, "history is 'x'"),
        ({"history": [5]}, "history has 5"),
        ({"arrays": [1]}, r"arrays is \[1\]"),
        ({"arrays": {"w": 5}}, r"arrays has \{'w': 5\}"),
        ({"history": {"best_step": "../../x"}}, "best_step is '../../x'"),
        ({"history": {"best_step": True}}, "best_step is True"),
        ({"history": {"seconds": "x"}}, "'seconds' is 'x'"),
        ({"history": {"best": 5}}, "best is 5"),
        ({"history": {"best": {"loss": []}}}, r"'loss' is \[\]"),
        ({"history": {"best_step": 10**300}}, "best_step is 1000"),
    ],
)
def test_meta_of_another_type(folder, change, problem):
    forge(folder / "7", {**read_meta(folder, 7), **change})
    with pytest.raises(DamagedError, match=rf"metadata is damaged \({problem}"):
        read_meta(folder, 7)


@pytest.mark.parametrize("name", ["config", "data", "history", "arrays"])
def test_meta_that_lacks_something(folder, name):
    meta = read_meta(folder, 7)
    del meta[name]
    forge(folder / "7", meta)
    with pytest.raises(DamagedError, match=rf"metadata is damaged \({name} is missing"):
        read_meta(folder, 7)


def test_meta_that_is_no_object(folder):
    forge(folder / "7", [1])
    with pytest.raises(DamagedError, match=r"metadata is damaged \(it is \[1\]\)"):
        read_meta(folder, 7)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"config": {"model": 5}}, ".*"),
        ({"config": {"seed": "x"}}, "TypeError"),
        ({"config": {"num_seeds": 0}}, "1 seeds with num_seeds=0"),
        ({"config": {"num_seeds": 10**9}}, "1 seeds with num_seeds=1000000000"),
        ({"history": []}, "0 seeds with num_seeds=1"),
        ({"history": {"zz": 1}}, "TypeError: .*'zz'"),
        ({"history": {"best": {}, "best_step": 7}}, "KeyError: 'loss'"),
        ({"data": {**META["data"], "kind": "x"}}, "KeyError: 'x'"),
        ({"data": {**META["data"], "z": "x"}}, "TypeError: .*'z'"),
        ({"data": {"name": "a text"}}, "TypeError: .*missing"),
    ],
)
def test_meta_that_makes_no_sense(folder, change, problem):
    forge(folder / "7", {**read_meta(folder, 7), **change})
    with pytest.raises(
        CheckpointError,
        match=rf"/7 says what this version of relattn cannot use \({problem}.*\): load",
    ) as raised:
        read_meta(folder, 7)
    assert len(str(raised.value).splitlines()) == 1


def test_meta_of_earlier_versions(folder):
    meta = read_meta(folder, 7)
    images = {"name": "a", "class_names": ["b", "c"], "image_shape": [5, 3, 1]}
    images |= {"mean": [0.5], "std": [0.5], "num_train": 5, "origin": "somewhere"}
    history = {"best_accuracy": 0.5, "best_loss": 2.0, "best_step": 7}
    forge(folder / "7", {**meta, "data": images, "history": history})
    assert read_meta(folder, 7)["history"] == history


def test_another_model_is_refused_with_the_differing_paths(folder):
    template = make_state(7, width=11)
    with pytest.raises(
        CheckpointError,
        match=r"params/embedding/kernel: float32\[3,5\] there, float32\[3,11\] now",
    ):
        restore(folder, 7, template)
    smaller = template.replace(params={}, opt_state=())
    with pytest.raises(CheckpointError, match=r"float32\[3,5\] there, absent now"):
        restore(folder, 7, smaller)


def test_a_checkpoint_of_before_there_were_statistics(tmp_path):
    state = make_state(7)
    before = {name: value for name, value in vars(state).items() if value != {}}
    assert set(before) == {"step", "params", "opt_state"}
    writer = CheckpointWriter(tmp_path)
    writer.save(7, before, META, [0.5])
    writer.close()
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path, 7, state), state)
    template = state.replace(batch_stats={"norm": {"mean": np.zeros(3, np.float32)}})
    with pytest.raises(
        CheckpointError, match=r"batch_stats/norm/mean: absent there, float32\[3\] now"
    ):
        restore(tmp_path, 7, template)


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        checkpoint_steps(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    "name", ["notes.txt", "140 (copy)", "\N{SUPERSCRIPT TWO}", "07"]
)
def test_what_is_no_checkpoint_is_to_be_moved_away(folder, name):
    (folder / name).mkdir()
    with pytest.raises(CheckpointError) as raised:
        checkpoint_steps(folder)
    assert str(raised.value) == (
        f"{folder / name} is no checkpoint of relattn: move it out of {folder}"
    )
