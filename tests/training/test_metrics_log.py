import contextlib
import json
import os
import sys
import types
import warnings

import pytest
from tensorboardX.proto.event_pb2 import Event

from relattn.training import check_config, default_config, train_and_evaluate
from relattn.training.metrics_log import MetricsLog, read_rows
from relattn.training.workdir import write_text


def test_rows_beyond_the_resumed_step_are_dropped(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (2, 4, 5):
        log.write(step, {"train_loss": step / 2})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "train_l')
    log = MetricsLog(tmp_path, 4)
    log.write(5, {"train_loss": 7.0, "validation_loss": 8.0})
    log.write(6, {"train_loss": 9.0})
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 2, "train_loss": 1.0},
        {"step": 4, "train_loss": 2.0},
        {"step": 5, "train_loss": 7.0, "validation_loss": 8.0},
        {"step": 6, "train_loss": 9.0},
    ]


UNREADABLE = [b"5", b"{}", b'{"step": "2"}', b'{"step": 2, "a": []}', b"\xff", b""]
UNREADABLE += [b'["step": 2}', b"[" * 100000]
UNREADABLE += [
    b'{"step": 2, "a": true}',
    b'{"step": -1}',
    b'{"step": 1%s}' % (b"0" * 30),
]


@pytest.mark.parametrize("line", UNREADABLE, ids=lambda line: repr(line[:22]))
def test_an_unreadable_line_is_left_out(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    content = b'%s\n{"step": 3}\n%s\n{"step": 5}\n' % (line, line)
    path.write_bytes(content)
    message = r"metrics.jsonl is damaged: rows that .* are left out \(line 1, 3\)"
    with pytest.warns(UserWarning, match=message):
        assert read_rows(path) == [{"step": 3}, {"step": 5}]
    assert path.read_bytes() == content
    for aside in ("metrics.jsonl.damaged", "metrics.jsonl.damaged2"):
        path.write_bytes(content)
        with pytest.warns(UserWarning, match=rf"{message}; .* kept as .*/{aside}$"):
            MetricsLog(tmp_path, 3).close()
        assert (tmp_path / aside).read_bytes() == content
        assert read_rows(path) == [{"step": 3}]


@pytest.mark.parametrize(
    ("steps", "gap"),
    [
        ([2, 4, 5, 7], None),
        ([2, 4, 5], (5, 7)),
        ([2, 5, 7], (2, 5)),
        ([4, 5, 7], (0, 4)),
        ([], (0, 7)),
    ],
)
def test_missing_rows_are_noticed(tmp_path, steps, gap):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in steps))
    expected = contextlib.nullcontext()
    if gap:
        message = f"no rows between the steps {gap[0]} and {gap[1]}, "
        expected = pytest.warns(UserWarning, match=message)
    with expected:
        MetricsLog(tmp_path, 7, log_every_steps=2).close()
    assert [row["step"] for row in read_rows(path)] == steps


@pytest.mark.parametrize(
    ("steps", "gap"),
    [([2, 4, 6], ""), ([2, 4], "4 and 6"), ([2, 6], "2 and 6"), ([], "0 and 6")],
)
def test_missing_rows_of_a_seed_are_noticed(tmp_path, steps, gap):
    # Seed 4 has stopped early.
    rows = {3: steps, 4: [2, 4]}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            f'{{"step": {step}, "seed": {seed}}}\n'
            for seed, steps in rows.items()
            for step in steps
        )
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        MetricsLog(tmp_path, 6, 2, ends={3: 6, 4: 4}).close()
    expected = [f"no rows of seed 3 between the steps {gap}, which"] if gap else []
    assert len(warned) == len(expected)
    assert all(text in str(warned[0].message) for text in expected)


@pytest.mark.parametrize("line", [b"", b'{"step": 7, "tr', b"\xff"])
def test_a_last_line_cut_short_gives_no_warning(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 3}\n' + line)
    assert read_rows(path) == [{"step": 3}]
    MetricsLog(tmp_path, 7).close()
    assert sorted(file.name for file in tmp_path.glob("metrics.jsonl*")) == [path.name]


def test_a_file_is_synced_before_it_replaces_another(tmp_path, monkeypatch):
    path, synced = tmp_path / "result.json", []
    path.write_text("old")

    def fsync(file):
        synced.append((os.fstat(file).st_size, path.read_text()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_text(path, "newer")
    assert synced == [(5, "old")]
    assert path.read_text() == "newer"


def test_a_new_run_starts_with_empty_metrics(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(3, {"train_loss": 1.0})
    log.close()
    MetricsLog(tmp_path, 0).close()
    assert read_rows(tmp_path / "metrics.jsonl") == []


def read_events(path):
    data = path.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_events(tmp_path):
    log = MetricsLog(tmp_path, 7)
    log.write(8, {"seed": 3, "train_loss": 0.5, "learning_rate": 0.25})
    log.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    events = list(read_events(path))
    found = {
        value.tag: (event.step, value.simple_value)
        for event in events
        for value in event.summary.value
    }
    assert found == {"train/loss/seed_3": (8, 0.5), "learning_rate/seed_3": (8, 0.25)}
    # TensorBoard hides what earlier files have of this step and later ones.
    (start,) = [event.step for event in events if event.session_log.status]
    assert start == 8


class Module(types.ModuleType):
    """Stands in for wandb: records its calls."""

    def __init__(self):
        super().__init__("wandb")
        self.calls = []

    def init(self, **options):
        self.calls.append(("init", options))
        return self

    def log(self, values, *, step):
        self.calls.append(("log", step, values))

    def finish(self):
        self.calls.append("finish")


@pytest.fixture
def wandb(monkeypatch):
    module = Module()
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_rows_go_to_wandb_offline(tmp_path, wandb, monkeypatch):
    config = {"optimizer": {"b1": 0.9}}
    log = MetricsLog(tmp_path, 0, loggers="wandb", config=config)
    log.write(3, {"train_loss": 0.5, "learning_rate": 0.25})
    log.write(4, {"seed": 7, "validation_loss": 1.5})
    log.close()
    (_, options), *logged = wandb.calls
    assert logged == [
        ("log", 3, {"train/loss": 0.5, "learning_rate": 0.25}),
        ("log", 4, {"validation/loss/seed_7": 1.5}),
        "finish",
    ]
    assert options["mode"] == "offline" and options["dir"] == str(tmp_path)
    assert options["config"] == config and options["resume"] == "allow"
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 2
    assert not list(tmp_path.glob("events*"))
    monkeypatch.setenv("WANDB_MODE", "online")
    ids = []
    for time in ("2026-01-01", "2026-01-01", "2026-02-01"):
        (tmp_path / "run.json").write_text(json.dumps({"starts": [{"time": time}]}))
        MetricsLog(tmp_path, 0, loggers="wandb").close()
        assert wandb.calls[-2][1]["mode"] == "online"
        ids.append(wandb.calls[-2][1]["id"])
    assert ids[0] == ids[1] != ids[2]


def test_no_logger_and_both(tmp_path, wandb):
    MetricsLog(tmp_path / "", 0, loggers="").close()
    assert not list(tmp_path.glob("events*")) and not wandb.calls
    MetricsLog(tmp_path, 0, loggers="tensorboard, wandb").close()
    assert list(tmp_path.glob("events*")) and wandb.calls


def test_a_logger_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = default_config()
    config.loggers = "tensorboard,wandb"
    with pytest.raises(ValueError, match=r"not installed: pip install 'relattn\[wandb"):
        train_and_evaluate(config, tmp_path)
    check_config(config)


@pytest.mark.slow
def test_wandb_itself_writes_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs pip install 'relattn[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log = MetricsLog(tmp_path, 0, loggers="wandb", config={"seed": 3})
    log.write(3, {"train_loss": 0.5})
    log.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
