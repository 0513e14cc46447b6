"""A metric is one entry of the table."""

import json
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest

from relattn import training
from relattn.evaluation import report as report_lib
from relattn.training.metrics import (
    METRICS,
    Metric,
    count_metric,
    finish_metric,
    register_metric,
    smoothed_cross_entropy,
)
from relattn.training.metrics_log import read_rows
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import quick_jit
from tests.training.conftest import make_data


def is_second(logits, labels):
    """Returns 1 for labels with the second largest logit."""
    return (jnp.argsort(logits, -1)[..., -2] == labels).astype(jnp.float32)


@pytest.fixture
def second(registries):
    metric = Metric(
        is_second,
        finish=lambda mean: 100 * mean,
        title="second place",
        format=".1f",
        in_training=True,
    )
    register_metric("second", metric)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny", "second")
def test_a_registered_metric_is_counted_and_printed(
    config, tmp_path, one_device, capsys
):
    config.update(num_epochs=1, progress=True)
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    run = training.load_run(tmp_path)
    split = make_data().validation
    predicted = run.predict(split.images, progress=False).probabilities
    place = np.argsort(predicted, axis=-1)[:, -2]
    expected = 100 * np.mean(place == split.labels)
    assert 0 < expected < 100
    row = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert row["validation_second"] == pytest.approx(expected)
    assert 0 < row["train_second"] <= 100
    assert result["validation_second"] == row["validation_second"]
    assert run.evaluate(split)["second"] == pytest.approx(expected)
    said = capsys.readouterr().out
    assert f"second place {row['train_second']:.1f}; validation" in said
    assert f"second place {expected:.1f};" in said
    page = report_lib.report(run, data=make_data())
    assert f"<td>validation second place</td><td>{expected:.1f}</td>" in page
    assert "second place" in page.partition('<img alt="By step')[2].partition('"')[0]


@pytest.mark.parametrize("name", ["accuracy", "count", "grad_norm", "top 2"])
def test_a_metric_has_a_new_name(name):
    with pytest.raises(ValueError, match=f"'{name}' cannot be registered: choose"):
        register_metric(name, Metric(is_second))


def test_what_is_no_metric_is_refused():
    message = r"'second' must be a Metric, such as Metric\(function\), got <function"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        register_metric("second", is_second)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"values": 5}, "'second' needs a function as values, got 5"),
        ({"finish": None}, "'second' needs a function as finish, got None"),
        (
            {"format": "percent"},
            "'second' needs a format of numbers, such as '.1%', got",
        ),
    ],
)
def test_a_metric_has_functions_and_a_format(options, message):
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        register_metric("second", Metric(**{"values": is_second, **options}))


def test_a_metric_may_be_finished_by_jax(monkeypatch):
    finish = Mock(side_effect=[jnp.float32(0.5), "half"])
    monkeypatch.setitem(METRICS, "mine", Metric(is_second, finish=finish))
    assert json.dumps(finish_metric("mine", 0.25)) == "0.5"
    with pytest.raises(ValueError, match="of the metric 'mine' returned 'half': ret"):
        finish_metric("mine", 0.25)


def test_a_metric_has_a_value_for_each_label(monkeypatch):
    monkeypatch.setitem(METRICS, "mean", Metric(lambda logits, labels: logits.mean()))
    with pytest.raises(ValueError, match=r"'mean' returned the shape \(\) for"):
        count_metric("mean", jnp.zeros((5, 3)), jnp.zeros(5, int))


def test_no_label_is_found_in_logits_of_nan():
    """Neither the first class, which argmax returns, nor the largest of the others."""
    logits = np.zeros((4, 7), np.float32)
    logits[1:, 2] = 1
    logits[2], logits[3, 0] = np.nan, np.nan
    labels = np.array([0, 2, 0, 0])
    for name in ("accuracy", "top5_accuracy"):
        found = quick_jit(METRICS[name].values)(logits, labels)
        assert found.tolist() == [1, 1, 0, 0]


def test_the_loss_of_a_label_that_is_no_class_is_nan():
    """In place of that of a class, counted from the last one."""
    logits, labels = np.zeros((5, 7), np.float32), np.array([-1, 6, 7, -100, 0])
    for loss in (METRICS["loss"].values, lambda *x: smoothed_cross_entropy(*x, 0.1)):
        found = quick_jit(loss)(logits, labels)
        assert np.isnan(found).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize(
    "labels", [np.zeros((3, 1), int), np.zeros(3), np.zeros(2, int)]
)
def test_labels_that_are_not_one_integer_for_each_row_raise(labels):
    message = r"expected integers of the shape \(3,\): yield the number of a class, or"
    for loss in (METRICS["loss"].values, lambda *x: smoothed_cross_entropy(*x, 0.1)):
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            loss(jnp.zeros((3, 5)), jnp.asarray(labels))
