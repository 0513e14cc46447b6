import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn.training import CheckpointError, TrainState
from relattn.training.checkpoint import (
    MANIFEST,
    CheckpointWriter,
    checkpoint_steps,
    read_meta,
    restore,
)


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
        writer.save(step, make_state(step), {"note": [step]}, [accuracy])
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
    (folder / "7" / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match=r"7/manifest.json is damaged"):
        read_meta(folder, 7)


def test_a_manifest_that_lies_does_not_help(folder):
    meta = folder / "7" / "meta" / "metadata"
    meta.write_text("{")
    (folder / "7" / MANIFEST).write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=r"7 cannot be read"):
        read_meta(folder, 7)


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
    writer.save(7, before, {}, [0.5])
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
