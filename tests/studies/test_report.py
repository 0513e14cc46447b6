import csv
import dataclasses
import json

from studies.presets import PRESETS
from studies.report import (
    budget,
    plot_study,
    study_results,
    study_table,
    write_study_csv,
)
from tests.helpers.trained import TEXT, make_training

TABLE2 = PRESETS["translution_table2_cpu"]


def image_run(workdir, seed, static, dynamic, losses=(2.0, 1.0)):
    rows = [
        {"step": 10 * (i + 1), "validation_loss": loss} for i, loss in enumerate(losses)
    ]
    rows.insert(1, {"step": 15, "train_loss": 1.5})
    return make_training(
        workdir / f"run-{static}-{seed}",
        seed=seed,
        rows=rows,
        test_static_accuracy=static,
        test_dynamic_accuracy=dynamic,
    )


def test_table_has_means_and_published_values(tmp_path):
    finished = {
        ("self_attention", "static"): [
            image_run(tmp_path, 0, 0.80, 0.10),
            image_run(tmp_path, 1, 0.90, 0.20, losses=(3.0, 2.0, 1.0)),
        ],
        ("self_attention", "dynamic"): [image_run(tmp_path, 0, 0.5, 0.25)],
    }
    results = study_results(TABLE2, finished)
    assert results["seeds"] == [0, 1]
    text = study_table(TABLE2, results)
    lines = text.splitlines()
    assert lines[2] == (
        "| model | parameters | published | static → static | published "
        "| dynamic → dynamic | published | static → dynamic | published "
        "| dynamic → static | training, s |"
    )
    assert lines[4] == (
        "| self_attention | 2.71M | 2.7M | 85.0 ± 7.1 | 98.48 | 25.0 | 92.64 "
        "| 15.0 ± 7.1 | 18.18 | 50.0 | 7 |"
    )
    assert lines[6] == (
        "| translution | – | 116.2M | – | 98.6 | – | 97.35 | – | 36.4 | – | – |"
    )
    assert "Means ± standard deviations over the seeds 0, 1." in text
    took = "- 60 steps of 64 images (20 epochs of 200), somewhere; on 2 x abacus, jax"
    assert text.count(took) == 1
    curve = results["rows"][0]["runs"]["static"]["curve"]
    assert curve["step"] == [10, 20]
    assert curve["mean"] == [2.5, 1.5]
    assert curve["std"] == [0.5**0.5] * 2
    write_study_csv(TABLE2, results, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == [row.name for row in TABLE2.rows]
    assert float(rows[0]["static_dynamic_mean"]) == 15.0
    assert rows[0]["static_dynamic_published"] == "18.18"
    assert rows[2]["static_dynamic_mean"] == ""
    assert "seconds_published" not in rows[0]
    plot_study(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"


def test_equal_values_have_zero_deviation(tmp_path):
    runs = [image_run(tmp_path, seed, 0.123, 0.1) for seed in range(3)]
    results = study_results(TABLE2, {("self_attention", "static"): runs})
    assert results["rows"][0]["columns"]["static_static"]["std"] == 0.0


def test_table_without_published_values_and_with_failures(tmp_path):
    preset = PRESETS["translution_text"]
    rows = [{"step": 10, "validation_loss": 2.0}]
    losses = {"validation_loss": 2.0, "validation_perplexity": 7.389}
    done = make_training(
        tmp_path / "run", TEXT, rows=rows, **losses, validation_accuracy=0.5
    )
    failed = make_training(tmp_path / "other", TEXT, label="translution")
    failed.error = (
        "training translution failed; log ends with:\nno memory\n"
        "--------------------\nFor simplicity, JAX has removed its internal frames.\n"
    )
    results = study_results(preset, {("rope", ""): [done]}, [failed])
    text = study_table(preset, results)
    assert "| rope | 2.71M | 2.000 | 7.389 | 50.0 | 7 |" in text
    assert "| translution | – | – | – | – | – |" in text
    assert "published" not in text
    assert "One seed, 3. Each run:" in text
    assert "- 60 steps of 64 windows of 7 tokens, somewhere; on 2 x abacus" in text
    assert text.endswith("Runs that failed:\n\n- translution, seed 3: no memory\n")
    results = study_results(preset, {}, [failed])
    assert study_table(preset, results).count("–") == 5 * len(preset.rows)
    plot_study(results, tmp_path / "curves.png")


def test_losses_are_smoothed_and_notes_are_printed(tmp_path):
    preset = PRESETS["rpe_vit"].on("mnist").of(["favor"])
    values = [3.0, 1.0, 2.0]
    rows = [{"step": i, "validation_loss": v} for i, v in enumerate(values)]
    result = {"validation_accuracy": 0.75, "inference_seconds": 1.5}
    done = make_training(tmp_path / "run", rows=rows, **result)
    text = study_table(preset, study_results(preset, {("favor", "mnist"): [done]}))
    # Weights are powers of 0.6.
    loss = (3 * 0.36 + 1 * 0.6 + 2) / (0.36 + 0.6 + 1)
    assert f"| favor | 2.71M | {loss:.3f} | 0.11 | 75.00 | 96.94 | 87.50 |" in text
    assert "quoted from the text" in text
    assert "Inference is timed on 10,000 test images on the device below" in text
    assert "an A100 on Google Colab" in text and "on 2 x abacus" in text


def test_missing_metrics_are_dashes(tmp_path):
    # Top-5 accuracy is measured only with more than ten classes.
    preset = PRESETS["translution_table3"]
    row = preset.rows[0]
    (trained,) = row.runs
    results = study_results(
        preset, {(row.name, trained): [make_training(tmp_path / "run")]}
    )
    columns = results["rows"][0]["columns"]
    assert (columns["top1"]["mean"], columns["top5"]["mean"]) == (87.5, None)
    cells = study_table(preset, results).splitlines()[4].split(" | ")
    assert (cells[3], cells[5]) == ("87.50", "–")


def test_results_have_no_folders_of_this_machine(tmp_path):
    info = dataclasses.replace(TEXT, origin="the tokens in /home/me/my texts")
    training = make_training(tmp_path / "run", info, validation_loss=0.5)
    assert "texts; on" in budget(training)
    assert "/home" not in budget(training)
    record = json.loads((training.workdir / "run.json").read_text())
    record["config"]["data"]["data_dir"] = ["/home"]
    (training.workdir / "run.json").write_text(json.dumps(record))
    assert "/home" not in budget(training)


def test_names_are_drawn_as_they_are(tmp_path):
    curve = {"step": [1, 2], "mean": [0.1, 0.2], "std": [0.0, 0.0]}
    rows = [{"name": "$\\frac$", "runs": {"\ud800": {"curve": curve}}}]
    plot_study({"rows": rows, "curve": "$_$"}, tmp_path / "curves.svg")
    assert "frac" in (tmp_path / "curves.svg").read_text()
