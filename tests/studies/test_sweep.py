"""A sweep over values of the configuration."""

import json

import pytest

from studies.sweep import run_sweep, split_grid, sweep_table
from tests.helpers.trained import CONFIG

RATE = "--config.optimizer.learning_rate=1e-3,1e-2,1e30"
TINY = ["--config.num_steps=4", "--config.eval_every_steps=2", "--config.model.dim=8"]
TINY += ["--config.schedule.warmup_steps=0", "--config.data.num_validation=50"]


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "no key has several values: pass some, as in --config.opt"),
        (["--config.seed=3"], "no key has several values"),
        (["--config.seed=3,4,3"], "--config.seed has a value twice: 3,4,3"),
        (["--config.seed=3,4", "--config.seed=5"], "--config.seed is given twice"),
        (["--config.seed=3,x"], "--config.seed needs an integer, got 'x'"),
        (["--config.batch_size=3,0"], "config.batch_size must be at least 1, got 0"),
    ],
)
def test_a_sweep_that_cannot_run(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run_sweep(CONFIG, tmp_path, overrides=options)


def test_each_combination_is_a_run_with_its_options(tmp_path, monkeypatch):
    started = []

    def train(trainings, jobs, *, keep_going):
        started.extend(trainings)
        for training in trainings:
            training.error = "log ends with\nno reason"

    monkeypatch.setattr("studies.sweep.train", train)
    attentions = ["favor(eps=0.1, num_features=4)", "softmax"]
    options = [f"--config.model.attention={','.join(attentions)}", "--config.seed=5,6"]
    text, failed = run_sweep(
        "configs/performer.py:smoke",
        tmp_path,
        overrides=[*options, "--noconfig.progress", "--config.init_from="],
    )
    assert failed == started
    found = [
        (training.overrides[2], training.overrides[3], training.seed)
        for training in started
    ]
    assert found == [
        (f"--config.model.attention={attention}", f"--config.seed={seed}", seed)
        for attention in attentions
        for seed in (5, 6)
    ]
    assert started[0].overrides[:2] == ["--noconfig.progress", "--config.init_from="]
    assert len({training.workdir for training in started}) == 4
    assert text.count("failed: no reason") == 4
    saved = json.loads((tmp_path / "results.json").read_text("utf-8"))
    # A value before the others does not rename their folders.
    other = tmp_path / "other"
    (other / "0-seed=6").mkdir(parents=True)
    run_sweep("configs/performer.py:smoke", other, overrides=["--config.seed=5,6,7"])
    names = [training.workdir.name for training in started[4:]]
    assert names == ["0-seed=5", "0-seed=6", "2-seed=7"]
    assert saved["runs"][3]["values"] == {"model.attention": "softmax", "seed": "6"}
    # Other values of the same keys are added; other keys would replace the table.
    run_sweep("configs/performer.py:smoke", other, overrides=["--config.seed=7,8"])
    saved = json.loads((other / "results.json").read_text("utf-8"))
    assert [run["values"]["seed"] for run in saved["runs"]] == ["5", "6", "7", "8"]
    for options in (
        ["--config.model.dim=8,16"],
        ["--config.seed=7,8", "--config.batch_size=8"],
    ):
        with pytest.raises(
            ValueError, match=r"of another sweep \(.* there, .*: choose"
        ):
            run_sweep("configs/performer.py:smoke", other, overrides=options)


def test_the_table_has_the_best_run_first():
    def run(value, *accuracies):
        results = [
            {"validation_accuracy": a, "test_accuracy": a / 2, "best_step": 7}
            | {"seconds": 3.2}
            for a in accuracies
        ]
        return {"values": {"model.dim": value}, "results": results}

    nan = float("nan")
    runs = [run("8", 0.5, 0.6), run("16", nan, 0.9), run("32", 0.8, 0.8)]
    failed = {"values": {"model.dim": "64"}, "error": "out of memory"}
    results = {"keys": ["model.dim"], "runs": [failed, *runs]}
    header, _, *rows = sweep_table(results, "images").splitlines()
    assert header.startswith("| `model.dim` | validation accuracy | test accuracy |")
    assert [row.split("`")[1] for row in rows] == ["32", "8", "16", "64"]
    assert rows[1] == "| `8` | 0.5500 ± 0.0707 | 0.2750 ± 0.0354 | 7 | 3.2 |"
    assert "failed: out of memory" in rows[3]
    losses = [
        {"values": {"seed": str(loss)}, "results": [
            {"validation_loss": loss, "test_loss": loss, "best_step": 1, "seconds": 1}
        ]}
        for loss in (2.0, 1.0)
    ]  # fmt: skip
    _, _, *rows = sweep_table({"keys": ["seed"], "runs": losses}, "tokens").splitlines()
    assert rows[0].startswith("| `1.0` | 1.0")


def test_options_of_one_value_hold_for_all_runs():
    grid, fixed = split_grid(
        [RATE, "--config.init_skip='head, cls'", "--config.a=(1,2)"]
    )
    assert grid == {"optimizer.learning_rate": ["1e-3", "1e-2", "1e30"]}
    assert fixed == ["--config.init_skip=head, cls", "--config.a=(1,2)"]


@pytest.mark.slow
def test_a_sweep_trains_and_continues(tmp_path, monkeypatch, capfd):
    options = ["--config.optimizer.learning_rate=1e-3,1e30", *TINY]
    text, failed = run_sweep(CONFIG, tmp_path, jobs=2, overrides=options)
    assert [training.label for training in failed] == ["optimizer.learning_rate=1e30"]
    _, _, *rows = text.splitlines()
    assert len(rows) == 2 and "failed: error: the " in rows[1]
    assert (tmp_path / "table.md").read_text("utf-8") == text
    capfd.readouterr()

    def train(trainings, jobs, *, keep_going):
        for training in trainings:
            training.error = "not again"

    monkeypatch.setattr("studies.sweep.train", train)
    again, _ = run_sweep(CONFIG, tmp_path, overrides=options)
    assert "1 of 2 runs to train" in capfd.readouterr().out
    assert again.splitlines()[:3] == text.splitlines()[:3]
