import asyncio
import contextlib
import dataclasses
import errno
import gc
import hashlib
import io
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn import training
from relattn.command import is_user_error
from relattn.data import TextInfo
from relattn.training import CheckpointError, TrainState
from relattn.training.checkpoint import (
    MANIFEST,
    CheckpointWriter,
    checkpoint_steps,
    quarantine,
    read_latest,
    read_meta,
    restore,
)
from relattn.training.errors import DamagedError
from relattn.training.metrics_log import MetricsLog, read_rows
from relattn.training.workdir import usable_workdir, write_json
from tests.helpers.interrupted import final_state, untimed, untimed_rows
from tests.helpers.unprivileged import public_folder, without_privileges

INFO = TextInfo("a text", "bytes", 256, 7, 200, "somewhere")
META = {"config": {}, "data": dataclasses.asdict(INFO), "history": [{}]}


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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, {7: 0.5})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of a folder with one checkpoint, to be changed."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_restore_returns_what_was_saved(folder):
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


def test_the_best_checkpoint_of_every_seed_is_kept(tmp_path):
    writer = CheckpointWriter(tmp_path, num_scores=3)
    scores = {1: [0.9, 0.1, 0.2], 2: [0.5, 0.8, 0.2], 3: [0.1, 0.2, 0.2]}
    scores |= {5: [0.5, None, 0.1], 7: [None] * 3}
    for step, values in scores.items():
        writer.save(step, make_state(step), {}, values)
    writer.close()
    assert checkpoint_steps(tmp_path) == [1, 2, 5, 7]
    writer = CheckpointWriter(tmp_path, num_scores=3)
    writer.save(8, make_state(8), {}, [0.1, 0.9, None])
    writer.close()
    assert checkpoint_steps(tmp_path) == [1, 7, 8]


def test_scores_may_be_negative(tmp_path):
    save(tmp_path, {1: -3.0, 2: -2.0, 3: None, 4: -2.5, 5: None})
    assert checkpoint_steps(tmp_path) == [2, 4, 5]


def sign(checkpoint):
    """Gives the manifest the checksums of changed scores."""
    sums = json.loads((checkpoint / MANIFEST).read_text())
    scores = (checkpoint / "metrics" / "metrics").read_bytes()
    sums["metrics/metrics"] = hashlib.sha256(scores).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(sums))


@pytest.mark.parametrize("scores", [[0.5, "x"], [0.5], [0.5, None]])
def test_the_scores_of_every_seed_are_checked(folder, scores):
    path = folder / "7" / "metrics" / "metrics"
    path.write_text(json.dumps({"scores": [0.5, 0.4], "step": 7}))
    sign(folder / "7")
    quarantine(folder, 7, num_scores=2)
    assert checkpoint_steps(folder) == [7]
    path.write_text(json.dumps({"scores": scores, "step": 7}))
    sign(folder / "7")
    quarantine(folder, 7, num_scores=2)
    assert checkpoint_steps(folder) == []


def test_half_removed_checkpoints_are_removed_later(folder):
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


def test_every_flipped_bit_is_found(folder):
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


def test_a_missing_file_is_reported(folder):
    (folder / "7" / "state" / "_METADATA").unlink()
    with pytest.raises(CheckpointError, match=r"state/_METADATA is missing"):
        read_meta(folder, 7)


def test_a_foreign_checkpoint_is_refused(folder):
    (folder / "8").mkdir()
    (folder / "8" / "weights.bin").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match=r"8/manifest.json is missing"):
        read_meta(folder, 8)


@pytest.mark.parametrize("text", ["", "{", "\xff", "5", "[[1, 2]]", "[" * 100000])
def test_an_invalid_manifest_is_refused(folder, text):
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


def test_manifest_paths_outside_the_checkpoint_are_refused(folder):
    manifest = folder / "7" / MANIFEST
    sums = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**sums, "../../secret": ""}))
    with pytest.raises(DamagedError, match="secret is missing from the checkpoint"):
        read_meta(folder, 7)


def forge(checkpoint, meta):
    """Replaces the metadata of a checkpoint and their SHA-256."""
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
        ({"history": [{"best_step": "../../x"}]}, "best_step is '../../x'"),
        ({"history": [{"best_step": True}]}, "best_step is True"),
        ({"history": [{"seed": "x"}]}, "'seed' is 'x'"),
        ({"history": [{"seconds": "x"}]}, "'seconds' is 'x'"),
        ({"history": [{"best": 5}]}, "best is 5"),
        ({"history": [{"best": {"loss": []}}]}, r"'loss' is \[\]"),
        ({"history": [{"best_step": 10**300}]}, "best_step is 1000"),
    ],
)
def test_metadata_of_another_type_is_refused(folder, change, problem):
    forge(folder / "7", {**read_meta(folder, 7), **change})
    with pytest.raises(DamagedError, match=rf"metadata is damaged \({problem}"):
        read_meta(folder, 7)


@pytest.mark.parametrize("name", ["config", "data", "history", "arrays"])
def test_missing_metadata_is_refused(folder, name):
    meta = read_meta(folder, 7)
    del meta[name]
    forge(folder / "7", meta)
    with pytest.raises(DamagedError, match=rf"metadata is damaged \({name} is missing"):
        read_meta(folder, 7)


def test_metadata_that_is_not_an_object_is_refused(folder):
    forge(folder / "7", [1])
    with pytest.raises(DamagedError, match=r"metadata is damaged \(it is \[1\]\)"):
        read_meta(folder, 7)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"config": {"model": 5}}, ".*"),
        ({"config": {"seed": "x"}}, "TypeError"),
        ({"config": {"model": {"name": "a", "num_layers": 10**9}}}, ".*from 1 to 1000"),
        ({"config": {"num_seeds": 0}}, "1 histories of 0 seeds"),
        ({"config": {"num_seeds": 10**9}}, "1 histories of 1000000000 seeds"),
        ({"history": []}, "0 histories of 1 seeds"),
        ({"history": [{"zz": 1}]}, "TypeError: .*'zz'"),
        ({"history": [{"best": {}, "best_step": 7}]}, "KeyError: 'loss'"),
        ({"data": {**META["data"], "kind": "x"}}, "unknown kind of data 'x'"),
        ({"data": {**META["data"], "z": "x"}}, "TypeError: .*'z'"),
        ({"data": {"name": "a text"}}, "TypeError: .*missing"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused(folder, change, problem):
    forge(folder / "7", {**read_meta(folder, 7), **change})
    with pytest.raises(
        CheckpointError,
        match=rf"/7 has metadata that this version .* cannot use \({problem}.*\): load",
    ) as raised:
        read_meta(folder, 7)
    assert len(str(raised.value).splitlines()) == 1


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


def test_empty_collections_may_be_absent(tmp_path):
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


def test_a_file_instead_of_the_folder_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        checkpoint_steps(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    "name", ["notes.txt", "140 (copy)", "\N{SUPERSCRIPT TWO}", "07"]
)
def test_other_entries_in_the_folder_are_refused(folder, name):
    (folder / name).mkdir()
    with pytest.raises(CheckpointError) as raised:
        checkpoint_steps(folder)
    assert str(raised.value) == (
        f"{folder / name} is not a checkpoint of relattn: move it out of {folder}"
    )


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_any_damage_falls_back_to_the_checkpoint_before(folder, damage):
    save(folder, {11: 0.3})
    paths = [p for p in (folder / "11").glob("*/**/*") if p.is_file()]
    manifest = folder / "11" / MANIFEST
    for path in [*paths, manifest]:
        # A bit of the manifest changes the name or the SHA-256 of another file.
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
def test_orbax_files_at_the_top_level_are_not_needed(folder, damage):
    others = [path for path in (folder / "7").iterdir() if path.is_file()]
    assert "_CHECKPOINT_METADATA" in [path.name for path in others]
    for path in others:
        if path.name != MANIFEST:
            damage(path)
    assert read_latest(folder)[0] == 7
    state = make_state(7)
    jax.tree.map(np.testing.assert_array_equal, restore(folder, 7, state), state)
    save(folder, {8: 0.4, 9: 0.3, 11: 0.2})
    assert checkpoint_steps(folder) == [7, 9, 11]


@pytest.mark.parametrize("text", ["5", "[" * 100000, '{"item_handlers": 5}'])
def test_checkpoint_times_that_orbax_cannot_read(folder, text):
    (folder / "7" / "_CHECKPOINT_METADATA").write_text(text)
    assert read_latest(folder)[0] == 7
    message = rf"cannot read a _CHECKPOINT_METADATA in {folder} \(.*\): remove that"
    with pytest.raises(CheckpointError, match=message):
        save(folder, {11: 0.3})
    (folder / "7" / "_CHECKPOINT_METADATA").unlink()
    save(folder, {11: 0.3})
    assert checkpoint_steps(folder) == [7, 11]


def test_all_damaged_checkpoints_are_reported(tmp_path):
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


def test_damaged_checkpoints_are_renamed_and_written_again(folder):
    for number in ("", "2"):
        save(folder, {11: 0.3, 13: 0.2})
        for step in (11, 13):
            flip(folder / str(step) / "meta" / "metadata")
        damaged = (folder / "11" / "meta" / "metadata").read_bytes()
        quarantine(folder, 7)
        renamed = folder / f"11.damaged{number}" / "meta" / "metadata"
        assert renamed.read_bytes() == damaged
        assert checkpoint_steps(folder) == [7]
    assert len(list(folder.glob("1?.damaged*"))) == 4
    save(folder, {11: 0.3})
    quarantine(folder, 11)
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
def test_an_earlier_checkpoint_with_damaged_scores_is_renamed(folder, damage):
    save(folder, {11: 0.3})
    damage(folder / "7" / "metrics" / "metrics")
    quarantine(folder, 11)
    save(folder, {13: 0.2, 17: 0.1})
    assert checkpoint_steps(folder) == [11, 13, 17]
    assert (folder / "7.damaged" / MANIFEST).exists()


def test_half_removed_checkpoints_are_not_renamed(folder):
    save(folder, {11: 0.6})
    (folder / "7" / MANIFEST).unlink()
    quarantine(folder, 11)
    (folder / "7" / "metrics" / "metrics").unlink()
    quarantine(folder, 11)
    assert checkpoint_steps(folder) == [7, 11]


@pytest.mark.parametrize("name", [MANIFEST, "meta/metadata", "metrics/metrics"])
def test_a_file_that_cannot_be_read_is_damage(folder, monkeypatch, name):
    save(folder, {11: 0.6})
    broken = folder / "11" / name

    class Broken(io.BytesIO):
        def readinto(self, *block):
            raise OSError(errno.EIO, "Input/output error")

        read = readinto

    plain_open = io.open

    def opened(path, *arguments, **options):
        if Path(path) == broken:
            return Broken()
        return plain_open(path, *arguments, **options)

    monkeypatch.setattr(io, "open", opened)
    message = rf"11(/{name})? cannot be read \(Input/output error\): .*/7 is used"
    with pytest.warns(UserWarning, match=message):
        assert read_latest(folder)[0] == 7
    quarantine(folder, 7)
    assert checkpoint_steps(folder) == [7]


def test_a_checkpoint_that_is_a_link_is_refused(folder, tmp_path):
    (folder / "7").rename(tmp_path / "elsewhere")
    (folder / "7").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="7 is a symbolic link: put the chec"):
        CheckpointWriter(folder)


def test_an_unwritable_folder_of_checkpoints_is_refused():
    with public_folder() as parent:
        folder = parent / "checkpoints"
        folder.mkdir(mode=0o555)
        with (
            without_privileges(),
            pytest.raises(OSError, match="folder of checkpoints .* is not writable"),
        ):
            CheckpointWriter(folder)


@contextlib.contextmanager
def files_of_at_most(size):
    """Makes every write beyond that size fail in this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Disables the compilation cache, whose writes would fail too.
    keep_from = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", keep_from)


@contextlib.contextmanager
def disk_of_a_megabyte(folder):
    """Mounts a small disk; yields False if mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    try:
        mounted = not subprocess.run(mount, capture_output=True).returncode
    except OSError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            # Lazily: after an error, TensorBoard's writer keeps its file open.
            subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def filled(folder):
    """Fills a disk, except for space for small files."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(filler, filler.stat().st_size - 20480)
    try:
        yield
    finally:
        filler.unlink()


def wait_for_a_checkpoint(workdir):
    """Waits, since it is written in the background."""
    while not checkpoint_steps(workdir / "checkpoints"):
        time.sleep(0.01)


@pytest.mark.usefixtures("tiny")
def test_a_checkpoint_write_error_is_reported(config, tmp_path, one_device, capfd):
    config.redraw_every = 0
    with config.unlocked():
        config.model.width = 101
    whole, limited, full = (tmp_path / name for name in ("whole", "limited", "full"))
    expected = training.train_and_evaluate(config, whole, devices=one_device)

    def check(workdir, context, reason):
        failing = contextlib.ExitStack()

        def on_step(done):
            if done == 7:
                wait_for_a_checkpoint(workdir)
                failing.enter_context(context)

        with (
            failing,
            pytest.raises(
                training.CheckpointError,
                match=rf"/10 cannot be written \({reason}\); the last good checkpoint "
                r"is .*/5: free some space, or make the directory writable, and rep",
            ) as error,
        ):
            training.train_and_evaluate(
                config, workdir, devices=one_device, on_step=on_step
            )
        assert is_user_error(error.value)
        assert checkpoint_steps(workdir / "checkpoints") == [5]
        assert training.load_run(workdir).step == 5
        actual = training.train_and_evaluate(config, workdir, devices=one_device)
        assert untimed(actual) == untimed(expected)
        assert untimed_rows(workdir) == untimed_rows(whole)
        states = final_state(workdir), final_state(whole)
        jax.tree.map(np.testing.assert_array_equal, *states)

    check(limited, files_of_at_most(9000), "File too large")
    with disk_of_a_megabyte(full) as mounted:
        if mounted:
            check(full, filled(full), "No space left on device")
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_errors_after_the_writer_closed_are_not_printed(tmp_path, caplog, monkeypatch):
    """After the first error of a write, its other files fail later."""
    raised = []

    def hook(unraisable):
        raised.append(str(unraisable.exc_value))

    monkeypatch.setattr(sys, "unraisablehook", hook)
    for _ in range(2):
        CheckpointWriter(tmp_path / "checkpoints").close()
    for text in "Event loop is closed", "another":
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert raised == ["another"]
    loop = asyncio.new_event_loop()
    for text in "Failed to write 9 bytes to file 3: Disk full [x]", "another":
        loop.create_future().set_exception(ValueError(text))
    gc.collect()
    loop.close()
    assert [str(record.exc_info[1]) for record in caplog.records] == ["another"]


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_metrics_write_error_is_reported(config, tmp_path, one_device):
    config.redraw_every = 0
    full = contextlib.ExitStack()

    def on_step(done):
        if done == 7:
            wait_for_a_checkpoint(tmp_path)
            full.enter_context(files_of_at_most(100))

    with (
        full,
        pytest.raises(
            training.WorkdirError,
            match=r"metrics.jsonl cannot be written \(File too large\); earlier",
        ) as error,
    ):
        training.train_and_evaluate(
            config, tmp_path, devices=one_device, on_step=on_step
        )
    assert is_user_error(error.value)
    assert checkpoint_steps(tmp_path / "checkpoints") == [5]
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    assert result["step"] == 15


# TensorBoard's writer has a thread, which the error ends.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_the_log_and_does_not_block_it(tmp_path):
    log = MetricsLog(tmp_path, start_step=0)
    row = {f"train_{number}": 0.5 for number in range(299)}

    def write_rows():
        for step in range(9):
            log.write(step, row)

    # A few rows of metrics.jsonl fit; what TensorBoard reads is larger.
    size = 3 * len(json.dumps(row))
    message = r"cannot be written \(File too large\)"
    with files_of_at_most(size):
        with pytest.raises(training.WorkdirError, match=message):
            write_rows()
        (tensorboard,) = log._loggers
        worker = tensorboard._writer.file_writer.event_writer._worker
        log.close()
        # Without this, its error may reach the next test.
        with contextlib.suppress(ValueError):
            worker.stop()
    assert read_rows(tmp_path / "metrics.jsonl")[0] == {"step": 0, **row}


def test_a_file_that_cannot_be_replaced_is_kept(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, {"step": 3})
    with (
        files_of_at_most(5),
        pytest.raises(
            training.WorkdirError, match=r"result.json cannot be written \(File too la"
        ),
    ):
        write_json(path, {"step": 5})
    assert path.read_text() == '{\n  "step": 3\n}\n'
    write_json(path, {"step": 5})
    assert path.read_text() == '{\n  "step": 5\n}\n'


@pytest.fixture
def public():
    with public_folder() as folder:
        yield folder


@pytest.mark.usefixtures("tiny")
def test_a_read_only_directory_is_not_changed(config, public, one_device, finished):
    workdir = shutil.copytree(finished[0], public / "run")
    for path in [workdir, *workdir.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    with without_privileges():
        with pytest.raises(
            training.WorkdirError,
            match=r"run is not writable \(Permission denied\): choose another",
        ):
            training.train_and_evaluate(config, workdir, devices=one_device)
        with pytest.raises(training.WorkdirError, match="not writable"):
            usable_workdir(workdir / "checkpoints" / "run")
        assert training.load_run(workdir, "latest").step == 15
    assert {p: p.stat().st_mtime_ns for p in workdir.rglob("*")} == before
    for path in [workdir, *workdir.rglob("*")]:
        path.chmod(0o755)


def test_an_empty_directory_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(training.WorkdirError, match="--workdir is empty .unset"):
        usable_workdir("")


def test_an_unknown_home_directory_is_refused():
    with pytest.raises(ValueError, match=r"^--workdir=~no.such.user/x begins with a h"):
        usable_workdir("~no.such.user/x")
