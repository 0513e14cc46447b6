import csv

from tensorboardX.proto.event_pb2 import Event

from relattn.training.metrics import MetricsLog, read_rows


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


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
    rows = read_csv(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["2", "4", "5", "6"]
    assert [row["validation_loss"] for row in rows] == ["", "", "8.0", ""]


def test_a_run_that_starts_anew_starts_empty(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(3, {"train_loss": 1.0})
    log.close()
    MetricsLog(tmp_path, 0).close()
    assert read_rows(tmp_path / "metrics.jsonl") == []
    assert not (tmp_path / "metrics.csv").exists()


def test_tensorboard_events(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(3, {"train_loss": 0.5, "learning_rate": 0.25})
    log.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    found, data = {}, path.read_bytes()
    while data:
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        for value in event.summary.value:
            found[value.tag] = event.step, value.simple_value
    assert found == {"train/loss": (3, 0.5), "learning_rate": (3, 0.25)}
