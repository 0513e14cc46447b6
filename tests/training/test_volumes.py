"""A run on volumes: it learns, is restored, and predicts arrays of volumes."""

import numpy as np
import pytest

from relattn import data as data_lib
from relattn import training
from relattn.evaluation.report import report
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.training.config_file import read_config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the data, the folder and the metrics of the smoke configuration."""
    config = read_config("volumes_vit:smoke", ["--config.progress=False"])
    folder = tmp_path_factory.mktemp("volumes")
    data = data_lib.load_data(config.data)
    metrics = training.train_and_evaluate(config, folder, data=data)
    return data, folder, metrics


@pytest.mark.slow
def test_smoke_configuration_learns_the_direction_of_motion(finished):
    # One in eight by chance.
    assert finished[2]["test_accuracy"] > 0.5


@pytest.mark.slow
def test_a_run_is_restored_and_predicts_volumes(finished, tmp_path):
    data, folder, metrics = finished
    run = training.load_run(folder)
    found = run.predict(data.test.images)
    assert found.class_names[:2] == ("right", "down right")
    accuracy = (found.labels == data.test.labels).mean()
    np.testing.assert_allclose(accuracy, metrics["test_accuracy"], atol=0.003)
    file = tmp_path / "volumes.npz"
    np.savez(file, images=data.test.images[:3, ..., 0])
    first = run.predict(str(file)).probabilities
    np.testing.assert_allclose(first, found.probabilities[:3], atol=1e-5)
    message = r"image 0 must be an array of uint8 of shape \[8, 28, 28, 1\]"
    with pytest.raises(ValueError, match=message):
        run.predict(data.test.images[:3, :, :14])
    page = report(run, data=data)
    assert f"1,000 test examples, {100 * accuracy:.2f}% of them" in page
    assert "<td>down right</td>" in page and "confident errors" not in page
    with pytest.raises(ValueError, match="volumes: only runs on images can be shifted"):
        open_shift_runs([folder])
