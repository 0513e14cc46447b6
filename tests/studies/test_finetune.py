"""The study that changes the attention of a trained model."""

import pytest

from studies.finetune import ATTENTIONS, finetune_table, run_finetune

TINY = [
    "--config.data.source=embedded",
    "--config.data.num_validation=50",
    "--config.batch_size=1000",
    "--config.model.dim=8",
    "--config.model.num_layers=1",
]


def test_table_has_a_row_for_each_attention():
    results = {
        "start": {"epochs": 2.0, "test_accuracy": 0.5},
        "trained": {"softmax": {"test_accuracy": 0.51}, "relu": {"test_accuracy": 0.4}},
        "random": {"softmax": {"test_accuracy": 0.3}, "relu": {"test_accuracy": 0.2}},
    }
    header, _, *rows = finetune_table(results).splitlines()
    assert "after 2 epochs of softmax (50.0%)" in header
    assert rows == ["| `softmax` | 51.0% | 30.0% |", "| `relu` | 40.0% | 20.0% |"]


@pytest.mark.slow
def test_study_trains_from_a_model_and_from_random_parameters(tmp_path):
    text = run_finetune("", tmp_path, epochs=1, overrides=TINY)
    assert (tmp_path / "table.md").read_text("utf-8") == text
    assert text.count("\n") == 2 + len(ATTENTIONS)
    log = (tmp_path / "trained-favor" / "train.log").read_text("utf-8")
    assert "Error" not in log
