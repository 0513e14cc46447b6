import json
import sys

import numpy as np
import pytest

from benchmarks.soak import (
    CRITERION,
    LIMITS,
    OPTIONS,
    fit_slope,
    last_step,
    main,
    run_soak,
    summarize,
)
from studies.launcher import Training

CONFIG = "configs/performer.py:smoke"
SIZE = ["dim=8", "num_heads=2", "num_layers=1", "mlp_dim=8", "patch_size=16"]
TINY = [f"--config.model.{size}" for size in SIZE]


def test_fit_slope_recovers_a_line_in_white_noise():
    rng = np.random.default_rng(3)
    times = np.arange(720) * 10.0
    noise = rng.normal(scale=2.0, size=720)
    samples = [
        {"seconds": time, "resident_mb": 300 + 7.5 * time / 3600 + wobble}
        for time, wobble in zip(times, noise, strict=True)
    ]
    slope, error = fit_slope(samples, "resident_mb", 0.1)
    kept = times[72:] / 3600
    assert error == pytest.approx(2.0 / np.sqrt(kept.size * kept.var()), rel=0.1)
    assert slope == pytest.approx(7.5, abs=4 * error)
    assert slope == pytest.approx(
        np.polyfit(kept, [sample["resident_mb"] for sample in samples[72:]], 1)[0],
        abs=1e-5,
    )


def test_standard_error_accounts_for_autocorrelation():
    rng = np.random.default_rng(5)
    slopes, errors = [], []
    for _ in range(300):
        values = np.zeros(400)
        for i, noise in enumerate(rng.normal(size=399)):
            values[i + 1] = 0.8 * values[i] + noise
        samples = [{"seconds": 10 * i, "threads": v} for i, v in enumerate(values)]
        slope, error = fit_slope(samples, "threads", 0.1)
        slopes.append(slope)
        errors.append(error)
    # The standard deviation of 300 slopes has a relative standard error of 4%.
    assert np.median(errors) == pytest.approx(np.std(slopes), rel=0.15)


@pytest.mark.parametrize(
    "slope, scale, verdict",
    [(0, 1, "flat"), (8, 1, "flat"), (15, 1, "growing"), (15, 300, "undecided")],
)
def test_verdict_compares_slope_and_error_to_the_limit(slope, scale, verdict):
    wobble = np.tile([1, -1, -1, 1], 50) * scale
    samples = [
        {"seconds": 36 * i, "resident_mb": slope * i / 100 + wobble[i]}
        for i in range(200)
    ]
    summary = summarize(samples, "resident_mb")
    assert summary["verdict"] == verdict
    assert summary["first"] == samples[0]["resident_mb"]
    assert summary["max"] == max(sample["resident_mb"] for sample in samples)


def test_last_step_skips_incomplete_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) is None
    path.write_text('{"step": 3')
    assert last_step(path) is None
    path.write_text('{"step": 3}\n' * 9000 + '{"step": 4}\n{"st')
    assert last_step(path) == 4


@pytest.mark.slow
def test_soak_samples_a_training_and_ends_it(tmp_path):
    training = Training("soak", CONFIG, tmp_path / "run", overrides=[*OPTIONS, *TINY])
    output = tmp_path / "results" / "soak.json"
    result = run_soak(training, output, hours=1 / 3600, interval=0.1)
    assert training.process.returncode not in (None, 0)
    assert result == json.loads(output.read_text())
    assert result["steps"] > 0 and result["criterion"] == CRITERION
    assert result["machine"]["platform"] == "cpu" and result["machine"]["cores"] > 0
    assert set(result["quantities"]) == set(LIMITS)
    for name, row in result["quantities"].items():
        assert 0 < row["first"] <= row["max"], name
    times = [sample["seconds"] for sample in result["samples"]]
    assert times == sorted(times) and times[0] == 0 and times[-1] >= 1
    assert output.with_suffix(".png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(ValueError, match="is not empty: a soak starts a new run"):
        run_soak(training, output, hours=1.0)


def test_training_that_ends_early_is_an_error(tmp_path, monkeypatch, capsys):
    training = Training("soak", CONFIG, tmp_path / "run")
    for name in ("hours", "interval"):
        with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
            run_soak(training, tmp_path / "a.json", **{"hours": 1.0, name: 0.0})
    monkeypatch.setattr(training, "say_result", lambda: None)
    monkeypatch.setattr(sys, "executable", "true")
    with pytest.raises(
        ChildProcessError, match="ended before the time was up: give it a"
    ):
        run_soak(training, tmp_path / "a.json", hours=1.0, interval=0.01)
    with pytest.raises(SystemExit, match="2"):
        main([f"--config={CONFIG}", f"--workdir={tmp_path}/c", "--config.sede=1"])
    assert "there is no --config.sede" in capsys.readouterr().err
    training = Training("soak", CONFIG, tmp_path / "new")
    with pytest.raises(OSError, match="is a folder: name a file in it"):
        run_soak(training, tmp_path, hours=1.0)
    # Hours later the figure would replace the numbers.
    with pytest.raises(ValueError, match="by the figure: name the JSON file"):
        run_soak(training, tmp_path / "a.png", hours=1.0, interval=0.01)
