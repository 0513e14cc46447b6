import json
import shutil
import sys

import pytest

from relattn.models import SIZES, build_model
from relattn.training import WorkdirError, check_config
from relattn.training.config_file import read_config
from studies import __main__
from studies.figure1 import published_curve
from studies.presets import PRESETS, Column, Preset, Row
from studies.published import read_published, translution_entries
from studies.report import UNITS
from tests.helpers.trained import make_training

GPT = "configs/translution_gpt.py:self_attention,cpu"
TINY = [
    "--config.num_steps=2",
    "--config.eval_every_steps=1",
    "--config.eval_batch_size=4096",
    "--config.schedule.warmup_steps=0",
    "--config.model.dim=8",
    "--config.model.num_heads=2",
    "--config.model.num_layers=1",
    "--config.model.mlp_dim=8",
    "--config.data.context_length=5",
]


@pytest.mark.quick("rpe_vit", "rpe_vit_cpu", "performer_table1")
@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_valid_configurations_and_published_values(name):
    preset = PRESETS[name]
    names = [row.name for row in preset.rows]
    assert len(set(names)) == len(names)
    for row in preset.rows:
        for trained, config in row.runs.items():
            check_config(read_config(config))
            assert "/" not in row.name + trained
        for column in preset.columns:
            assert column.unit in UNITS
            if row.published and column.published:
                out_of_memory = row.published.get("params") == "out of memory"
                assert row.published[column.published] or out_of_memory


def test_cpu_presets_are_within_their_budget():
    for name, runs, steps in (
        ("translution_table2_cpu", 5, {200, 1000}),
        ("translution_text", 15, {1000}),
        ("performer_table1_cpu", 2 * len(PRESETS["performer_table1"].rows), {200}),
    ):
        configs = [c for row in PRESETS[name].rows for c in row.runs.values()]
        assert len(configs) == runs
        assert {read_config(config).num_steps for config in configs} == steps
    long = PRESETS["translution_long_text"].on("4096").rows[0].runs["4096"]
    data = read_config(long).data
    assert (data.name, data.tokenizer, data.context_length) == (
        ("kernel_docs", "bytes", 4096)
    )
    full = read_config(PRESETS["translution_table2"].rows[0].runs["static"])
    cut = read_config(PRESETS["translution_table2_cpu"].rows[0].runs["static"])
    assert cut.model == full.model
    assert cut.data.source == "embedded"
    build_model(cut.model.to_dict(), num_classes=10, image_shape=(84, 84, 1))


def test_translution_presets_have_all_published_rows():
    tables = [2, 3, 4, 5, 7, 8, 10, 11]
    rows = [row for n in tables for row in PRESETS[f"translution_table{n}"].rows]
    assert len(rows) == len(list(translution_entries()))
    models = {row.name: read_config([*row.runs.values()][0]).model for row in rows}
    attention = "lor_translution(rank=2, base=False)"
    assert models["lor_translution_rank_2_base_False"].attention == attention
    assert models["translution_absolute"].attention == "translution(absolute=True)"
    assert models["lor_translution_position_learned"].position == "learned"
    assert (models["b32_translution"].dim, models["b32_translution"].patch_size) == (
        (SIZES["B"]["dim"], 32)
    )
    b512 = PRESETS["translution_table7"].of(["b512_lor_translution"]).rows[0]
    assert b512.published["perplexity"] == "39.92"
    assert read_config(b512.runs[""]).data.context_length == 512
    published = PRESETS["translution_table11"].rows[1].published
    assert (published["relenc_dim"], published["with_base_qkv"]) == ("2", "0")


@pytest.mark.slow
def test_study_continues_after_a_failure_and_trains_missing_runs(
    tmp_path, monkeypatch, capfd
):
    # The second run has no data.
    rows = [
        Row("works", {"": GPT}, {"loss": "1.5"}),
        Row("fails", {"": GPT.replace("cpu", "openwebtext")}),
    ]
    columns = [Column("loss", "loss", "validation_loss", published="loss")]
    monkeypatch.setitem(PRESETS, "tiny", Preset("Tiny", rows, columns))
    text, failed = __main__.run_study("tiny", tmp_path, jobs=2, overrides=TINY)
    assert [training.name for training in failed] == ["fails, seed 0"]
    assert "relattn prepare-text --openwebtext" in failed[0].error
    said = capfd.readouterr().out
    assert said.startswith("tiny: 2 of 2 runs to train")
    assert "works, seed 0: step 1 of 2, validation loss 5." in said
    assert "works, seed 0: a validation loss of 5." in said
    assert (tmp_path / "table.md").read_text() == text
    assert "| fails | – | – |" in text
    assert "- fails, seed 0: error: data.data_dir is empty: " in text
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["preset"], results["curve"]) == ("tiny", "validation_loss")
    assert results["rows"][0]["columns"]["loss"]["published"] == "1.5"
    run = results["rows"][0]["runs"][""]
    assert run["curve"]["step"] == [1, 2]
    assert run["curve"]["mean"][1] == run["results"][0]["validation_loss"]
    assert (tmp_path / "table.csv").read_text().startswith("model,loss_mean,loss_std,")
    assert (tmp_path / "curves.png").exists()
    # Every training fails from here on.
    monkeypatch.setattr(sys, "executable", "false")
    again, failed = __main__.run_study("tiny", tmp_path, overrides=TINY)
    assert [training.name for training in failed] == ["fails, seed 0"]
    assert "tiny: 1 of 2 runs to train" in capfd.readouterr().out
    assert again.splitlines()[:5] == text.splitlines()[:5]
    # Other options of a finished run are refused, and its table is kept.
    with pytest.raises(WorkdirError, match="another configuration"):
        __main__.run_study("tiny", tmp_path, overrides=[*TINY[1:]])
    assert (tmp_path / "table.md").read_text() == again


def test_rpe_vit_preset_has_nine_models_on_two_data_sets():
    preset = PRESETS["rpe_vit"]
    assert preset.datasets == ["mnist", "cifar10"]
    assert len(preset.rows) == 9
    row = preset.rows[-1]
    assert row.name == "relu_string_gate"
    assert row.runs["cifar10"] == "configs/rpe_vit.py:cifar10,relu,string_gate"
    assert row.published["cifar10_test_acc"] == "78.16"
    assert row.published["cifar10_loss"] == "<1.00"
    assert preset.rows[0].published["cifar10_loss"] == "1.01 (not smoothed)"
    quoted = [row.published["mnist_loss"] for row in preset.rows]
    assert quoted[:5] == ["0.062", "0.11", "0.078", "0.092", "0.066"]
    assert read_config(row.runs["mnist"]).seed == 42
    part = preset.on("mnist")
    assert part.datasets == ["mnist"] and len(part.rows) == 9
    assert {column.trained for column in part.columns} == {"", "mnist"}
    models = [read_config(row.runs["mnist"]).model for row in part.rows]
    cut = [read_config(r.runs["mnist"]).model for r in PRESETS["rpe_vit_cpu"].rows]
    assert [m.to_dict() for m in models] == [m.to_dict() for m in cut]
    named = {(m.attention, m.position.removeprefix("learned + ")) for m in models}
    table = {(r["attention"], r["position"]) for r in read_published("rpe_vit_tables")}
    assert {(a, p.replace("learned", "none")) for a, p in named} == table


def test_performer_presets_have_the_order_of_table_1():
    full, cut = PRESETS["performer_table1"], PRESETS["performer_table1_cpu"]
    published = [row["model"] for row in read_published("performer_table1")]
    models = [row.published["model"] for row in full.rows]
    assert models == published
    assert full.datasets == ["mnist", "fashion_mnist", "cifar10"]
    alexnet = "configs/baselines.py:cifar10,alexnet,published"
    assert full.rows[0].runs["cifar10"] == alexnet
    figure = PRESETS["performer_figure1"]
    for row in (*full.rows, *figure.rows, *PRESETS["performer_clip"].rows):
        assert all("published" in config for config in row.runs.values())
    assert cut.datasets == ["mnist", "fashion_mnist"]
    assert cut.shifts == {"classes": "all", "num_images": 300}
    assert [row.name for row in cut.rows] == [row.name for row in full.rows]
    for row in cut.rows:
        for dataset, config in row.runs.items():
            data = read_config(config).data
            assert (data.name, data.source) == (dataset, "embedded")


def test_clip_preset_has_published_batches_and_accuracies():
    preset = PRESETS["performer_clip"]
    found = {}
    for row in preset.rows:
        config = read_config(row.runs["fashion_mnist"])
        found[config.model.attention[7:13]] = (
            config.batch_size,
            row.published["mnist_acc"],
            row.published["fashion_mnist_acc"],
        )
    assert found == {
        "clip=2": (22, "88.99", "83.02"),
        "clip=4": (11, "92.46", "86.66"),
        "clip=6": (6, "94.70", "84.28"),
    }


def test_strategy_1_has_the_intervals_and_scales_of_the_authors():
    redraws, scales = PRESETS["performer_redraw"], PRESETS["performer_scales"]
    configs = [read_config(row.runs["mnist"]) for row in redraws.rows]
    assert [config.redraw_every for config in configs] == [1, 100, 1000]
    assert {row.published["params"] for row in redraws.rows} == {"4.74M"}
    configs = [read_config(row.runs["fashion_mnist"]) for row in scales.rows]
    positions = [f"constrained_sincos(num_scales={n})" for n in (4, 16)]
    assert [config.model.position for config in configs] == positions
    assert {config.redraw_every for config in configs} == {1000}
    assert {config.optimizer.learning_rate for config in configs} == {5e-5}
    assert redraws.shifts == scales.shifts == {}


def test_seeds_train_in_one_process(tmp_path, monkeypatch, capfd):
    columns = [
        Column("accuracy", "accuracy", "test_accuracy", unit="percent", digits=2),
        Column("inference", "inference", "inference_seconds", unit="seconds"),
    ]
    config = "configs/rpe_vit.py:smoke,softmax,none"
    rows = [
        Row("vit", {"": config}),
        Row("relu", {"": config.replace("softmax", "relu")}),
    ]
    monkeypatch.setitem(PRESETS, "tiny", Preset("Tiny", rows, columns))
    asked = []

    def train(trainings, jobs, *, keep_going):
        asked.extend(training.name for training in trainings)
        for training in trainings:
            runs = [
                {
                    "seed": s,
                    "test_accuracy": 0.5 + (s - 42) / 8,
                    "inference_seconds": 1.0,
                }
                | {"step": 100, "epochs": 0.7}
                for s in training.seeds
            ]
            rows = [
                {"step": step, "seed": s, "validation_loss": step / (s - 41)}
                for step in (50, 100)
                for s in training.seeds
            ]
            make_training(
                training.workdir,
                config=training.config,
                overrides=training.overrides,
                seed=training.seed,
                num_seeds=training.num_seeds,
                rows=rows,
                runs=runs,
            )
            training.say_result()

    monkeypatch.setattr(__main__, "train", train)
    text, _ = __main__.run_study("tiny", tmp_path, models=["vit"], seeds=2)
    said = capfd.readouterr().out
    assert "tiny: 1 of 1 runs to train" in said
    # The first seed is that of the configuration.
    assert "vit, seeds 42 to 43: 50.0%, 62.5% of the test images, 7 s" in said
    assert "over the seeds 42, 43." in text and ", 2 seeds together" in text
    assert "| 56.25 ± 8.84 | 1 |" in text
    results = json.loads((tmp_path / "results.json").read_text())
    run = results["rows"][0]["runs"][""]
    assert run["seeds"] == [42, 43]
    assert [result["test_accuracy"] for result in run["results"]] == [0.5, 0.625]
    assert run["curve"]["step"] == [50, 100]
    assert run["curve"]["mean"] == [37.5, 75.0]
    __main__.run_study("tiny", tmp_path, models=["vit"], seeds=2)
    assert asked == ["vit, seeds 42 to 43"]
    __main__.run_study("tiny", tmp_path, models=["vit"], seeds=3, together=2)
    assert asked[1:] == ["vit, seed 44"]
    assert "2 of 2" not in capfd.readouterr().out
    # The tables have what earlier commands trained with the same options.
    text, _ = __main__.run_study("tiny", tmp_path, models=["relu"], seeds=2)
    assert "\n| vit | 56.25 ± 8.84 | 1 |\n| relu | 56.25" in text
    assert asked[2:] == ["relu, seeds 42 to 43"]
    capfd.readouterr()
    shutil.rmtree(tmp_path / "relu-42-43")
    options = {"models": ["relu"], "overrides": ["--config.batch_size=7"]}
    text, _ = __main__.run_study("tiny", tmp_path, seeds=2, **options)
    assert "| relu | 56.25" in text and "| vit |" not in text
    left_out = f"left out of the tables: --workdir {tmp_path / 'vit-42-43'} holds a run"
    assert capfd.readouterr().out.startswith(left_out)
    text, _ = __main__.run_study("tiny", tmp_path, models=["relu"])
    assert "| relu |" in text and "| vit |" not in text
    left_out = "left out of the tables: vit, without complete runs of these seeds on"
    assert capfd.readouterr().out.startswith(left_out)


def test_shifts_are_evaluated_for_all_runs(tmp_path, monkeypatch):
    preset = PRESETS["performer_figure1"]
    assert preset.shifts == {} and preset.datasets == ["mnist", "fashion_mnist"]
    monkeypatch.setattr(__main__, "train", lambda trainings, jobs, keep_going: None)
    monkeypatch.setattr(__main__, "study_results", lambda *_: {})
    monkeypatch.setattr(__main__, "study_table", lambda *_: "table\n")
    for name in ("write_study_csv", "plot_study"):
        monkeypatch.setattr(__main__, name, lambda *_: None)
    asked = []

    def shift_report(workdirs, output, **options):
        asked.append(([folder.name for folder in workdirs], output.name, options))
        # The results are safe before the long evaluation.
        assert (output.parent / "table.md").read_text() == "table\n"
        return f"summary of {output.name}"

    monkeypatch.setattr(__main__, "shift_report", shift_report)
    monkeypatch.setattr(__main__, "open_shift_runs", lambda workdirs: workdirs)
    text, _ = __main__.run_study("performer_figure1", tmp_path, seeds=2)
    names = ["none", "learnable_sincos", "constrained_sincos", "banded", "invariant"]
    folders = [f"{name}-{data}-0-1" for name in names for data in preset.datasets]
    assert asked == [(folders, "shift", {"find_published": published_curve})]
    assert text == "table\n\nsummary of shift"
    assert (tmp_path / "table.md").read_text() == text


def test_invalid_arguments_are_rejected(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="preset 'translution_txt': did you mean"):
        __main__.run_study("translution_txt", tmp_path)
    with pytest.raises(ValueError, match="seeds must be at least 1, got 0"):
        __main__.run_study("translution_text", tmp_path, seeds=0)
    with pytest.raises(
        ValueError, match=r"together must be from 0 \(all\) to 2, got 3"
    ):
        __main__.run_study("translution_text", tmp_path, seeds=2, together=3)
    with pytest.raises(ValueError, match="dataset 'cifar': did you mean 'cifar10'"):
        __main__.run_study("rpe_vit", tmp_path, dataset="cifar")
    with pytest.raises(ValueError, match="have one run each: leave --dataset out"):
        __main__.run_study("translution_text", tmp_path, dataset="bytes")
    with pytest.raises(ValueError, match="model 'rop': did you mean 'rope'"):
        __main__.run_study("translution_text", tmp_path, models=["translution", "rop"])
    with pytest.raises(ValueError, match=r"num_step: did you mean 'num_steps'"):
        __main__.run_study(
            "translution_text", tmp_path, overrides=["--config.num_step=1"]
        )
    (tmp_path / "file").touch()
    with pytest.raises(WorkdirError, match="--output .*/file is a file: name a d"):
        __main__.run_study("translution_text", tmp_path / "file")
    (tmp_path / "results.json").write_text('{"preset": "rpe_vit"}')
    message = "results.json is of another study than translution_text: choose another"
    with pytest.raises(ValueError, match=message):
        __main__.run_study("translution_text", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="run the study from the project's root"):
        __main__.run_study("translution_text", tmp_path)


def test_command_fails_if_a_run_failed(tmp_path, monkeypatch, capsys):
    failed = [make_training(tmp_path, label="a")]
    asked = []

    def run_study(preset, output, **options):
        asked.append((preset, output, options))
        return "the table", failed

    monkeypatch.setattr(__main__, "run_study", run_study)
    argv = ["--preset=x", "--output=y", "--seeds=2", "--config.num_steps=3"]
    argv.append("--models=vit,gpt")
    with pytest.raises(SystemExit, match="2"):
        __main__.main(argv)
    out, err = capsys.readouterr()
    assert "the table" in out and err == "error: not trained: a, seed 3\n"
    options = {"dataset": "", "models": ["vit", "gpt"], "seeds": 2, "together": 0}
    options |= {"jobs": 1, "overrides": ["--config.num_steps=3"]}
    assert asked == [("x", "y", options)]
    failed.clear()
    __main__.main(argv)
    assert "the table" in capsys.readouterr().out
