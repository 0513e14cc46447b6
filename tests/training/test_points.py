"""A run on sets of points: it learns, does not see shifts, and is restored."""

import jax
import numpy as np
import pytest

from relattn import data as data_lib
from relattn import training
from relattn.evaluation.report import report
from relattn.models.pretrained import load_pretrained
from relattn.training.config_file import read_config


@pytest.mark.slow
def test_smoke_configuration_learns_digits_at_any_place(tmp_path):
    config = read_config("points:smoke", ["--config.progress=False"])
    data = data_lib.load_data(config.data)
    metrics = training.train_and_evaluate(config, tmp_path / "run", data=data)
    # One in ten by chance.
    assert metrics["test_accuracy"] > 0.5
    # Rounding may change the class of one test set, where two logits are almost equal.
    accuracies = [metrics["test_accuracy"], metrics["test_shifted_accuracy"]]
    np.testing.assert_allclose(*accuracies, rtol=0, atol=1.5e-3)

    run = training.load_run(tmp_path / "run")
    predict = training.make_predict_fn(run)
    plain, shifted = (
        np.asarray(predict(data.eval_splits[name].points[:50]))
        for name in ("test", "test_shifted")
    )
    np.testing.assert_allclose(shifted, plain, rtol=0, atol=1e-4 * abs(plain).max())

    run.save_pretrained(tmp_path / "saved", license="mit")
    loaded = load_pretrained(tmp_path / "saved")
    found = jax.jit(loaded.model.apply)(loaded.variables, data.test.points[:50])
    np.testing.assert_allclose(found, plain, rtol=0, atol=1e-5 * abs(plain).max())
    with pytest.raises(ValueError, match="trained on points, not on images"):
        run.predict(data.test.points)
    with pytest.raises(ValueError, match="trained on points, which a report cannot"):
        report(run)
