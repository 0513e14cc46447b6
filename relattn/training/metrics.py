"""Metrics of predictions: how each is counted and printed.

To add a metric, add its entry to `METRICS`; from outside relattn, call
`register_metric`. Evaluations, ``metrics.jsonl``, ``result.json``, the lines that
training prints and the report of a run follow from the entry.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from relattn import spec
from relattn.data import DataInfo
from relattn.messages import shorten

# Top-5 accuracy means little where five is half of the classes.
TOP5_CLASSES = 10
# The largest exponent whose exponential is a float.
LARGEST_EXPONENT = 709.0
# Values of an evaluation that are not metrics.
RESERVED = ("count", "seconds")
# Other columns ``train_...`` of the metrics.
_COLUMNS = ("grad_norm", "update_norm", "skipped")


def cross_entropy(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Computes the negative log-likelihood of the labels, in float32.

    loss = log sum_c exp(logits_c) - logits_label

    Args:
        logits: Shape ``[*batch, classes]``.
        labels: The class of each example, or the token after each token, shape
            ``[*batch]``.

    Returns:
        One loss for each label; NaN for a label that is not a class.

    Raises:
        ValueError: If there is not one integer for each row of logits.

    Example:
        >>> loss = cross_entropy(jnp.zeros((1, 4)), jnp.array([2]))
        >>> bool(jnp.allclose(loss, jnp.log(4.0)))
        True
    """
    if labels.shape != logits.shape[:-1] or labels.dtype.kind not in "biu":
        raise ValueError(
            f"the batch has labels of the shape {labels.shape} and dtype "
            f"{labels.dtype}, expected integers of the shape {logits.shape[:-1]}: "
            "yield the number of a class, or of a token, for each row of logits"
        )
    # As an index, -1 would be the last class, and other libraries pad with -100.
    labels = jnp.where(labels < 0, logits.shape[-1], labels)
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), labels
    )


def smoothed_cross_entropy(
    logits: Float[Array, "*batch classes"],
    labels: Int[Array, "*batch"],
    smoothing: float,
) -> Float[Array, "*batch"]:
    """Computes the cross-entropy with label smoothing.

    loss = (1 - smoothing) CE(label) + smoothing mean_c CE(c), with the cross-entropy CE

    Args:
        logits: Shape ``[*batch, classes]``.
        labels: The class of each example, or the token after each token, shape
            ``[*batch]``.
        smoothing: Fraction of each label that is spread over all classes, from 0 to 1.

    Returns:
        One loss for each label.

    Example:
        >>> loss = smoothed_cross_entropy(jnp.array([[0.0, 2.0]]), jnp.array([1]), 0.5)
        >>> bool(jnp.allclose(loss, jnp.log(1 + jnp.exp(2.0)) - 1.5))
        True

    Source:
        Szegedy et al., Rethinking the Inception Architecture for Computer Vision,
        section 7.
    """
    # optax.smooth_labels would need a probability for each class of each label.
    wide = logits.astype(jnp.float32)
    uniform = jax.nn.logsumexp(wide, axis=-1) - wide.mean(axis=-1)
    return (1 - smoothing) * cross_entropy(logits, labels) + smoothing * uniform


def is_correct(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Returns 1 for each label that has the largest logit, else 0; 0 if that is NaN."""
    # The largest of logits with a NaN is the first NaN.
    correct = (logits.argmax(-1) == labels) & ~jnp.isnan(logits.max(-1))
    return correct.astype(jnp.float32)


def is_in_top(
    logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"], k: int
) -> Float[Array, "*batch"]:
    """Returns 1 for each label among the k largest logits, else 0; 0 if it is NaN."""
    largest, best = jax.lax.top_k(logits, k)
    found = (best == labels[..., None]) & ~jnp.isnan(largest)
    return found.any(-1).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Metric:
    """A mean over labels, such as accuracy, or a function of one.

    metric = finish(mean over the labels of values(logits, labels))

    Attributes:
        values: Maps logits ``[*batch, classes]`` and labels ``[*batch]`` to a value for
            each label, ``[*batch]``; jit-able.
        finish: Maps the mean to the metric, such as the exponential for perplexity.
        higher_is_better: Whether larger values are better.
        title: The name in text; "" for the name in `METRICS`, with spaces.
        format: The format of a value in text, such as ``".1%"``.
        in_training: Whether updates count the metric too, each on its own batch. The
            loss of an update is always reported.
        applies: Returns whether runs on data of this description report the metric.
    """

    values: Callable[[Array, Array], Array]
    finish: Callable[[float], float] = float
    higher_is_better: bool = True
    title: str = ""
    format: str = ".4f"
    in_training: bool = False
    applies: Callable[[DataInfo], bool] = lambda info: True


METRICS: dict[str, Metric] = {
    "loss": Metric(cross_entropy, higher_is_better=False),
    "accuracy": Metric(is_correct, in_training=True),
    "top5_accuracy": Metric(
        functools.partial(is_in_top, k=5),
        title="top-5 accuracy",
        applies=lambda info: info.kind == "images" and info.num_classes > TOP5_CLASSES,
    ),
    "perplexity": Metric(
        cross_entropy,
        finish=lambda loss: math.exp(min(loss, LARGEST_EXPONENT)),
        higher_is_better=False,
        format=".4g",
        applies=lambda info: info.kind == "tokens",
    ),
}

# For each kind of data, the validation metric that selects the best checkpoint.
BEST_METRICS = {"images": "accuracy", "tokens": "loss", "points": "accuracy"}

# The entries above; users register others.
BUILT_IN = frozenset(METRICS)


def register_metric(name: str, metric: Metric) -> None:
    """Registers a user-defined metric, for training, evaluation and reports.

    Args:
        name: A Python identifier that names no metric of relattn. A second call with
            the same name replaces the first.
        metric: How the metric is counted and printed.

    Raises:
        ValueError: If relattn uses the name, it is not a Python identifier, or
            ``metric`` is not a `Metric` of functions and a format of numbers.

    Example:
        >>> def confidence(logits, labels):
        ...     return jax.nn.softmax(logits).max(-1)
        >>> register_metric("confidence", Metric(confidence, format=".1%"))
        >>> format_metrics({"confidence": 0.875})
        'confidence 87.5%'
        >>> del METRICS["confidence"]
    """
    if not isinstance(metric, Metric):
        raise ValueError(
            f"metric {shorten(name)} must be a Metric, such as Metric(function), got "
            f"{shorten(metric)}"
        )
    spec.check_new_name(name, (*BUILT_IN, *RESERVED, *_COLUMNS))
    for part in ("values", "finish", "applies"):
        if not callable(getattr(metric, part)):
            raise ValueError(
                f"metric {name!r} needs a function as {part}, got "
                f"{shorten(getattr(metric, part))}"
            )
    try:
        format(0.5, metric.format)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"metric {name!r} needs a format of numbers, such as '.1%', got "
            f"{shorten(metric.format)}"
        ) from error
    METRICS[name] = metric


def metrics_of(info: DataInfo, *, in_training: bool = False) -> tuple[str, ...]:
    """Returns the names of the metrics that runs on some data report.

    Args:
        info: The description of the data.
        in_training: Whether to return those that updates count, without the loss.

    Returns:
        Names in `METRICS`.
    """
    return tuple(
        name
        for name, metric in METRICS.items()
        if metric.applies(info) and (metric.in_training or not in_training)
    )


def count_metric(
    name: str, logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Computes the values of a metric, one for each label.

    Args:
        name: A name in `METRICS`.
        logits: Shape ``[*batch, classes]``.
        labels: Shape ``[*batch]``.

    Returns:
        The values, whose mean gives the metric.

    Raises:
        ValueError: If the metric does not return one value for each label.
    """
    values = METRICS[name].values(logits, labels)
    if jnp.shape(values) != labels.shape:
        raise ValueError(
            f"the metric {name!r} returned the shape {jnp.shape(values)} for labels of "
            f"the shape {labels.shape}: return one value for each label"
        )
    return values


def finish_metric(name: str, mean: float) -> float:
    """Computes a metric from the mean of its values.

    Args:
        name: A name in `METRICS`.
        mean: The mean over the labels.

    Returns:
        The metric; `Metric.finish` may be a function of JAX.

    Raises:
        ValueError: If ``finish`` does not return a number.
    """
    value = METRICS[name].finish(mean)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"finish of the metric {name!r} returned {shorten(value)}: return a number"
        ) from error


def _metric_in(key: str) -> str | None:
    """Finds the metric in a key of ``result.json`` or ``metrics.jsonl``, if it has one.

    Example:
        >>> _metric_in("validation_top5_accuracy"), _metric_in("learning_rate")
        ('top5_accuracy', None)
    """
    names = [name for name in METRICS if key == name or key.endswith(f"_{name}")]
    return max(names, key=len, default=None)


def title(key: str) -> str:
    """Returns the name, in text, of a metric or of a result.

    Example:
        >>> title("top5_accuracy"), title("test_top5_accuracy"), title("best_step")
        ('top-5 accuracy', 'test top-5 accuracy', 'best step')
    """
    name = _metric_in(key)
    if name is None or not METRICS[name].title:
        return key.replace("_", " ")
    return key.removesuffix(name).replace("_", " ") + METRICS[name].title


def format_value(key: str, value: Any) -> str:
    """Formats the value of a metric or of a result.

    Example:
        >>> format_value("test_accuracy", 0.5), format_value("seconds", 0.123456)
        ('0.5000', '0.1235')
        >>> format_value("test_accuracy", None)
        '–'
    """
    name = _metric_in(key)
    if value is None:
        return "–"
    if name is not None:
        return f"{value:{METRICS[name].format}}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Formats metrics as a line.

    Args:
        metrics: Values by name.

    Returns:
        The line.

    Example:
        >>> format_metrics({"top5_accuracy": 0.9, "loss": 1.2})
        'top-5 accuracy 0.9000, loss 1.2000'
    """
    return ", ".join(
        f"{title(name)} {format_value(name, value)}" for name, value in metrics.items()
    )
