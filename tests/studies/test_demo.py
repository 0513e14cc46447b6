import json
import re

import pytest

from relattn.training.config_file import read_config
from studies.demo import CONFIG, MODELS, demo_table, main, run_demo


def curve(mean):
    return {
        "shift_px": list(range(-4, 5)),
        "accuracy_mean": [mean + pixels / 50 for pixels in range(-4, 5)],
        "accuracy_std": [0.012] * 9,
        "num_images": [90] * 9,
    }


def test_demo_table_has_means_and_standard_deviations():
    results = {
        "a": {
            "seeds": [0],
            "test_accuracy": [0.8],
            "one_class": curve(0.5),
            "every_class": curve(0.3),
        },
        "b": {
            "seeds": [0, 1],
            "test_accuracy": [0.8, 0.9],
            "one_class": curve(0.5),
            "every_class": curve(0.3),
        },
    }
    lines = demo_table(results, "1 (Trouser)").splitlines()
    assert lines[0].startswith("| model | test images, unshifted | class 1 (Trouser), ")
    assert lines[2] == "| a | 80.0% | 42.0% | 58.0% | 24.0% | 36.0% |"
    assert lines[3].startswith("| b | 85.0% ± 7.1 | 42.0% ± 1.2 | 58.0% ± 1.2 |")


def test_the_demo_shows_absolute_relative_and_invariant_positions():
    found = {name: read_config(f"{CONFIG}:{name},quick").model for name in MODELS}
    absolute, relative, invariant = found.values()
    assert (absolute.position, relative.position) == ("learnable_sincos", "sincos_bias")
    assert invariant.anchor == "polyphase" and invariant.periodic


def test_invalid_variants_and_seeds_are_rejected(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'learnable_sincos'"):
        run_demo(tmp_path, variants=["learnable_sinco"])
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        run_demo(tmp_path, seeds=0)
    # Their curves would be one.
    with pytest.raises(
        ValueError, match="learnable_sincos and sincos_bias are one mod"
    ):
        run_demo(tmp_path, overrides=["--config.model.position=learned"])


@pytest.mark.slow
def test_the_log_of_the_failed_training_is_printed(tmp_path, capfd):
    with pytest.raises(ChildProcessError, match="not trained: learnable_sincos, seed"):
        run_demo(
            tmp_path, variants=["learnable_sincos"], overrides=["--config.model.pool=x"]
        )
    message = "learnable_sincos, seed 0 failed; .*train.log ends with:(.|\n)*pool"
    assert re.search(message, capfd.readouterr().out)


def test_a_variant_that_is_named_twice_is_trained_once(tmp_path, monkeypatch):
    asked = []

    def train(trainings, jobs):
        asked.extend(training.name for training in trainings)
        raise ChildProcessError

    monkeypatch.setattr("studies.demo.train", train)
    with pytest.raises(ChildProcessError):
        run_demo(tmp_path, variants=["none", "banded", "none"])
    assert asked == ["none, seed 0", "banded, seed 0"]


def test_demo_runs_only_in_the_root_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run the demo from the project's root"):
        run_demo(tmp_path)


TINY = [
    "--config.num_steps=2",
    "--config.schedule.warmup_steps=0",
    "--config.model.dim=8",
    "--config.model.num_heads=2",
    "--config.model.num_layers=1",
    "--config.model.mlp_dim=8",
]


@pytest.mark.slow
def test_demo_trains_and_compares(tmp_path, capfd):
    variants = ("constrained_sincos", "invariant")
    main([f"--output={tmp_path}", f"--variants={','.join(variants)}", *TINY])
    out = capfd.readouterr().out
    table = (tmp_path / "table.md").read_text()
    assert "| constrained_sincos | " in table and table in out
    assert "| invariant | " in table
    page = (tmp_path / "index.html").read_text()
    for name in ("constrained_sincos", "Relative positions on a torus (invariant)"):
        assert f'"name": "{name}"' in page
    assert (tmp_path / "shift.png").read_bytes()[1:4] == b"PNG"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["constrained_sincos"]["one_class"]["num_images"] == [90] * 9
    assert "constrained_sincos, seed 0: " in out
    steps = re.findall(r"^ *\d+ s: (.*)$", out, re.M)
    assert [step.split()[0] for step in steps] == [
        "trained",
        "shifted",
        "wrote",
        "wrote",
    ]
    address = (tmp_path / "index.html").as_uri()
    assert out.splitlines()[-1] == f"Move the images yourself: {address}"
