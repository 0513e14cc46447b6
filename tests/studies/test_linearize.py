"""The study that turns softmax attention into linear attention."""

import dataclasses
import json
import types
from hashlib import blake2b

import numpy as np
import pytest
from ml_collections import ConfigDict

import relattn
from relattn.data import PointInfo
from relattn.models import pretrained
from relattn.training import linearize, train_and_evaluate
from relattn.training.config_file import read_config
from relattn.training.task import INPUT_DTYPES
from studies.linearize import (
    METRIC,
    Linearization,
    Settings,
    linearize_table,
    run_linearize,
)

TINY = [
    "--config.model.attention=softmax",
    "--config.model.dim=24",
    "--config.model.num_layers=2",
    "--config.num_steps=3",
    "--config.progress=False",
]
SETTINGS = Settings(imitate_steps=4, tune_steps=3, batch_size=100)


def test_table_has_a_column_for_each_stage_and_a_dash_where_there_is_none():
    def stage(accuracy, seconds):
        return {"accuracy": accuracy, "seconds": seconds}

    results = {
        "metric": "accuracy",
        "data": "digits",
        "softmax": {"accuracy": 0.915},
        "attentions": {
            "favor": {"swapped": stage(0.2, 1.2), "lora": stage(0.8, 62.0)},
            "hedgehog": {
                "swapped": stage(0.3, 1.0),
                "imitated": stage(0.9, 31.0),
                "lora": stage(0.91, 61.0),
            },
        },
    }
    header, _, *rows = linearize_table(results).splitlines()
    assert header == (
        "| test accuracy on digits; softmax: 91.50% | swapped | feature maps trained | "
        "then low-rank changes |"
    )
    assert rows == [
        "| `favor` | 20.00% (1 s) | – | 80.00% (62 s) |",
        "| `hedgehog` | 30.00% (1 s) | 90.00% (31 s) | 91.00% (61 s) |",
    ]
    swapped = {"favor": {"swapped": {"perplexity": 208.0, "seconds": 1237.0}}}
    results |= {"metric": "perplexity", "softmax": {"perplexity": 7.0}}
    table = linearize_table(results | {"attentions": swapped})
    assert "softmax: 7.000 |" in table and "| 208.0 (1,237 s) |" in table


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tune_steps", 0, "--tune_steps must be at least 1, got 0"),
        ("batch_size", -1, "--batch_size must be at least 0, got -1"),
        ("lora_rate", 0.0, "--lora_rate must be positive, got 0.0"),
        ("full_rate", float("nan"), "--full_rate must be positive, got nan"),
    ],
)
def test_invalid_settings_raise(name, value, message):
    with pytest.raises(ValueError, match=message):
        Settings(**{name: value})


def test_every_attention_is_checked_before_anything_is_trained(tmp_path, monkeypatch):
    """Also of a run on sets of points."""

    def evaluate(data):
        raise AssertionError("the run was evaluated")

    sizes = {"dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8}
    run = types.SimpleNamespace(
        model=relattn.models.PointTransformer(3, 2, **sizes),
        config=ConfigDict({"model": {"attention": "softmax"}, "data": {}}),
        data=PointInfo("spreads", ("a", "b", "c"), (5, 2, 1), 37, "here"),
        step=3,
        variables={},
        evaluate=evaluate,
        pretrained_config=lambda: {"training": {}},
    )
    monkeypatch.setattr("studies.linearize.load_run", lambda workdir: run)

    def linearized(*attentions):
        output, data = tmp_path / "out", object()
        run_linearize(
            "run", output, attentions=attentions, settings=SETTINGS, data=data
        )

    with pytest.raises(ValueError, match="unknown attention 'hedgehogs': did you mean"):
        linearized("favor", "hedgehogs")
    with pytest.raises(AssertionError, match="the run was evaluated"):
        linearized("favor", "hedgehog")
    made = {"settings": dataclasses.asdict(SETTINGS) | {"rank": 2}}
    source = {"step": 3, "config": {}, "weights": blake2b(digest_size=16).hexdigest()}
    made |= {"source": source, "attentions": {}}
    (tmp_path / "out" / "results.json").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"other settings \(rank: 2 there, 8 now\): "):
        linearized("favor")
    assert METRIC.keys() == INPUT_DTYPES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rpe_vit", "translution_gpt"])
def test_study_swaps_imitates_and_fine_tunes(tmp_path, name, monkeypatch):
    metric = {"rpe_vit": "accuracy", "translution_gpt": "perplexity"}[name]
    workdir, output = tmp_path / "run", tmp_path / "out"
    train_and_evaluate(read_config(f"configs/{name}.py:smoke", TINY), workdir)
    run = relattn.load_run(workdir)

    def linearized(*attentions, **options):
        return run_linearize(
            workdir, output, settings=SETTINGS, attentions=attentions, **options
        )

    linearized("favor", tuning=["lora"])
    linearized("hedgehog")
    text = linearized("favor", tuning=["full"])
    assert (output / "table.md").read_text("utf-8") == text
    results = json.loads((output / "results.json").read_text("utf-8"))
    assert results["softmax"][metric] == pytest.approx(run.evaluate()[metric])
    rows = results["attentions"]
    assert list(rows["favor"]) == ["swapped", "lora", "full"]
    assert list(rows["hedgehog"]) == ["swapped", "imitated", "lora", "full"]
    imitated = rows["hedgehog"]["imitated"]
    assert np.mean(imitated["last_divergences"]) < np.mean(
        imitated["first_divergences"]
    )
    # A stage's model is that which was evaluated, and keeps the projections or not.
    stages = {
        stage: relattn.load_pretrained(output / "hedgehog" / stage)
        for stage in rows["hedgehog"]
    }
    assert all(each.model.attention == "hedgehog" for each in stages.values())
    kernels = {
        stage: np.asarray(
            each.variables["params"]["blocks_0"]["attention"]["q"]["kernel"]
        )
        for stage, each in stages.items()
    }
    trained = run.variables["params"]["blocks_0"]["attention"]["q"]["kernel"]
    np.testing.assert_array_equal(kernels["swapped"], trained)
    np.testing.assert_array_equal(kernels["imitated"], trained)
    ranks = [
        np.linalg.matrix_rank(kernels[stage][0] - trained[0], tol=1e-5)
        for stage in ("lora", "full")
    ]
    assert 0 < ranks[0] <= 8 and ranks[1] > 0

    def forbidden(*args, **options):
        raise AssertionError("a complete stage was computed again")

    monkeypatch.setattr(linearize, "imitate_softmax", forbidden)
    monkeypatch.setattr(linearize, "swap_attention", forbidden)
    assert linearized("hedgehog", tuning=[]) == text


def test_stages_of_another_run_are_not_reused(tmp_path, monkeypatch):
    """The results, which name the run, may be missing."""

    def linearization(step, weights=(1.0,)):
        run = types.SimpleNamespace(
            step=step,
            variables={"params": np.float32(weights)},
            pretrained_config=lambda: {"training": {}},
        )
        return Linearization(run, None, "relu", Settings(), tmp_path)

    file = tmp_path / "swapped" / "result.json"
    file.parent.mkdir()
    settings = dataclasses.asdict(Settings())
    weights = blake2b(np.float32([1.0]).tobytes(), digest_size=16).hexdigest()
    source = {"step": 1, "config": {}, "weights": weights}
    made = {"settings": settings, "source": source}
    file.write_text(json.dumps({**made, "result": {"accuracy": 0.5}}))
    loaded = types.SimpleNamespace(variables="found")
    monkeypatch.setattr(pretrained, "load_pretrained", lambda folder: loaded)

    def compute():
        raise NotImplementedError

    found = linearization(1).complete("swapped", compute)
    assert found == ("found", {"accuracy": 0.5})
    # With the same configuration, the data or `init_from` may have other contents.
    for other in (linearization(1, weights=(2.0,)), linearization(2)):
        file.write_text(json.dumps({**made, "result": {"accuracy": 0.5}}))
        with pytest.raises(NotImplementedError):
            other.complete("swapped", compute)


@pytest.mark.slow
def test_run_with_another_attention_raises(tmp_path):
    options = ["--config.model.attention=relu", *TINY[1:]]
    train_and_evaluate(read_config("configs/rpe_vit.py:smoke", options), tmp_path / "a")
    with pytest.raises(ValueError, match="was trained with attention 'relu': name a"):
        run_linearize(tmp_path / "a", tmp_path / "out")


@pytest.mark.slow
def test_results_of_another_run_raise(tmp_path):
    config = read_config("configs/rpe_vit.py:smoke", TINY)
    train_and_evaluate(config, tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text(
        '{"source": {"step": 1}, "settings": {}, "attentions": {}}'
    )
    with pytest.raises(ValueError, match="results of another run .*: choose another"):
        run_linearize(tmp_path / "run", tmp_path / "out")
