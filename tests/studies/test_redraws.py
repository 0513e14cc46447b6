"""Consistency against the interval of redraws."""

import dataclasses
import json
import types

import numpy as np
import pytest

from relattn.training.config_file import read_config
from studies import redraws
from studies.presets import PRESETS, Redraws
from studies.redraws import (
    findings,
    interval_name,
    point,
    predictions_of,
    read_predictions,
    redraw_report,
    write_predictions,
)
from tests.helpers.shift_results import ONE, result
from tests.helpers.trained import make_training

STUDY = Redraws(
    intervals={"once": 0, "often": 20, "rare": 1000},
    exact=("softmax", "bias"),
    draws=(1, 4),
    shifts={"max_shift": 1},
    expected="More.",
)


def predictions(kept, draws=1, seed=0):
    """All images are right unmoved; moved right, the first ``kept`` of four stay so."""
    labels = (0, 1, 1, 1)
    moved = np.where(np.arange(4) < kept, labels, 7)
    return dataclasses.replace(
        result(ONE, seed=seed, labels=labels),
        predicted=np.stack([labels, labels, moved]),
        random_predicted=moved[None],
        draws=draws,
    )


def test_points_average_over_shifts_and_seeds():
    seeds = [predictions(4), predictions(2, seed=1)]
    found = point("once", "constant", 1, None, seeds)
    assert found.accuracy == (1.0, 0.0)
    # Half of the shifted images of each seed are moved left, where all stay.
    expected = np.mean([1.0, 0.75]), np.std([1.0, 0.75], ddof=1)
    assert found.consistency == found.shifted == pytest.approx(expected)
    one = point("once", "constant", 1, 1, seeds[1:])
    assert (one.images, one.consistency) == ("1", (pytest.approx(2 / 3), None))


def test_predictions_are_read_only_for_the_same_run(tmp_path):
    path, written = tmp_path / "shift-0-1.npz", predictions(3, draws=4)
    assert read_predictions(path, "a") is None
    write_predictions(path, "a", written)
    found = read_predictions(path, "a")
    for name, value in vars(written).items():
        np.testing.assert_array_equal(getattr(found, name), value)
    assert found.shifts == written.shifts
    assert read_predictions(path, "b") is None
    path.write_bytes(path.read_bytes()[:-40])
    assert read_predictions(path, "a") is None


def test_the_gap_to_the_exact_form_is_what_redraws_close():
    kept = {"once": 0, "often": 3, "rare": 2, "softmax": 4}
    points = [
        point(row, "constant", 1, None, [predictions(n)]) for row, n in kept.items()
    ]
    (text,) = findings(STUDY, points)
    assert text.startswith("Found with the constant learning rate and 1 draw: ")
    assert "50.0% (drawn once), 87.5% (every 20 steps), 75.0% (every 1,000" in text
    assert "exact forms have 100.0% (softmax)." in text
    assert "Redraws every 20 steps close 75% of the gap to softmax." in text
    assert "Redraws every 1,000 steps close 50% of the gap to softmax." in text
    same = [point(row, "constant", 1, None, [predictions(4)]) for row in kept]
    (text,) = findings(STUDY, same)
    assert text.endswith("One draw is no less consistent than softmax.")
    # Without the exact form there is no gap.
    (text,) = findings(STUDY, points[:-1])
    assert "gap" not in text and "exact" not in text
    assert findings(STUDY, points[-1:]) == []


def test_the_report_evaluates_new_runs_only(tmp_path, monkeypatch):
    study = dataclasses.replace(PRESETS["performer_pixels16"], redraws=STUDY)
    names = ["once", "often", "softmax"]
    finished = {
        (name, "constant"): [make_training(tmp_path / name, best_step=60)]
        for name in names
    }
    asked = []

    class Opened:
        def __init__(self, workdir):
            self.name = workdir.name
            self.saved = self.task = self.single = self.abstract_state = self

        @property
        def random_features(self):
            return {} if self.name == "softmax" else {"projection": 1}

    def compare(runs, *, draws, **options):
        asked.append((runs[0].name, draws, options))
        name = runs[0].name
        found = predictions(4 - names.index(name), draws=draws)
        found = dataclasses.replace(found, recipe=name)
        return types.SimpleNamespace(results=(found,))

    monkeypatch.setattr(redraws, "open_shift_runs", lambda dirs: [*map(Opened, dirs)])
    monkeypatch.setattr(redraws, "compare", compare)
    text = redraw_report(study, finished, tmp_path)
    options = {"max_shift": 1}
    expected = [("once", 1), ("once", 4), ("often", 1), ("often", 4), ("softmax", 1)]
    assert asked == [(*each, options) for each in expected]
    assert "Expected: More." in text and "and 4 draws: Consistency is 100" in text
    assert "| softmax | constant | 1 | 100.0 | " in text
    for name in ("redraws.png", "shift_constant.png"):
        assert (tmp_path / name).read_bytes()[1:4] == b"PNG"
    values = json.loads((tmp_path / "redraws.json").read_text())["points"]
    assert len(values) == 2 * len(expected)
    assert values[0]["consistency"] == [1.0, None]
    assert "mean of 4 draws" in (tmp_path / "shift.csv").read_text()
    asked.clear()
    assert redraw_report(study, finished, tmp_path) == text
    assert asked == []
    # Another best step is another model.
    (training,) = finished["once", "constant"]
    training = make_training(training.workdir, best_step=40)
    assert len(predictions_of([training], 1, options)) == 1
    assert asked == [("once", 1, options)]


def test_an_interval_has_a_name():
    names = ["drawn once", "every step", "every 100 steps"]
    assert [interval_name(interval) for interval in (0, 1, 100)] == names


def test_runs_on_pixels_end_after_their_draw_was_trained():
    preset = PRESETS["performer_pixels16"]
    assert preset.datasets == ["constant", "cosine"]
    study = preset.redraws
    rows = {row.name: row.runs for row in preset.rows}
    assert {*study.intervals, *study.exact} < {*rows}
    for name, runs in rows.items():
        for schedule, path in runs.items():
            config = read_config(path)
            assert config.schedule.name == schedule
            assert config.data.num_validation == 5000 and config.model.patch_size == 1
            assert config.redraw_every == study.intervals.get(name, 0)
            # The parameters after the last step count.
            assert config.eval_every_steps == config.num_steps
            if config.redraw_every > 1:
                assert (config.num_steps + 10) % config.redraw_every == 0
    models = {name: read_config(runs["constant"]).model for name, runs in rows.items()}
    drawn = [models[name].to_dict() for name in study.intervals]
    assert all(model == drawn[0] for model in drawn)
    assert models["softmax"].position == models["drawn_once"].position


def test_a_torus_changes_only_the_model_and_the_shifts():
    plane, torus = PRESETS["performer_pixels16"], PRESETS["performer_torus16"]
    rows = {row.name: row.runs for row in plane.rows}
    assert torus.datasets == ["constant"]
    names = {row.name for row in torus.rows}
    assert {*torus.redraws.intervals, *torus.redraws.exact} < names
    for row in torus.rows:
        config = read_config(row.runs["constant"]).to_dict()
        assert config["model"]["periodic"]
        config["model"]["periodic"] = False
        assert config == read_config(rows[row.name]["constant"]).to_dict()
    assert torus.redraws.shifts == {**plane.redraws.shifts, "boundary": "circular"}
