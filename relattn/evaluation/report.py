"""Writes a trained run's report: one HTML page that needs no other file.

``relattn report --workdir=RUN`` writes ``RUN/report.html``. It has the results, the
curves and the configuration; for classes the confusion matrix and the accuracy of each;
for images the most confident errors and attention maps; for text a sample.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from relattn import command
from relattn.data import DataSource, load_data
from relattn.data.base import ClassInfo
from relattn.evaluation.attention_maps import make_maps_fn
from relattn.evaluation.figures import plain
from relattn.files import expand, usable_file
from relattn.messages import printable, shorten
from relattn.offsets import is_whole
from relattn.training import Run, load_run, make_predict_fn
from relattn.training.config import flatten
from relattn.training.given_data import check_source, data_config, require_data
from relattn.training.metrics import METRICS, format_value, title
from relattn.training.metrics_log import read_rows
from relattn.training.predict import warn_of_nan
from relattn.training.resume import check_fits
from relattn.training.workdir import read_result, write_text

# A larger confusion matrix is shown as a list of the most frequent confusions.
MAX_MATRIX = 30
MAX_CONFUSIONS = 20
NUM_ERRORS = 12
NUM_MAPS = 4
REPORT_CALL = "relattn.evaluation.report.report(run, data=...), which returns the page"

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886; }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; }
.scroll { overflow-x: auto; max-height: 32rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 0.2rem 0.8rem; border-bottom: 1px solid #8884; text-align: left; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: 1rem;
  border: 1px solid #8886; border-radius: 6px; }
"""


def report(
    run: Run, *, num_images: int | None = None, data: DataSource | None = None
) -> str:
    """Makes the report of a run.

    Args:
        run: A trained run.
        num_images: Number of test examples to use, from the first; None for all.
        data: Its data set; None to load that of training, unless it was given in
            memory.

    Returns:
        An HTML page without links to other files.

    Raises:
        ValueError: If ``num_images`` is less than 1 or the run is on text, or the data
            cannot be loaded.
        CheckpointError: If the data have other classes than those of training.

    Warns:
        UserWarning: If probabilities are NaN.
    """
    if not isinstance(run, Run):
        raise ValueError(
            f"run must be a run, such as load_run('runs/a'), got {type(run).__name__}"
        )
    if num_images is not None and (not is_whole(num_images) or num_images < 1):
        raise ValueError(
            f"num_images={shorten(num_images)} must be an integer of at least 1"
        )
    check_source(data)
    has_classes = isinstance(run.data, ClassInfo)
    if not has_classes and (num_images is not None or data is not None):
        raise ValueError(
            f"num_images and data do not apply to {run.workdir}, a run on text: leave "
            "them out"
        )
    # Without the folders of this machine.
    shared = run.pretrained_config()
    heading = printable(f"Run {run.workdir.name} on {run.data.name}")
    rows = read_rows(run.workdir / "metrics.jsonl")
    rows = [row for row in rows if row.get("seed", run.config.seed) == run.config.seed]
    parts = [
        f"<h1>{html.escape(heading)}</h1>",
        f"<p>The {run.checkpoint} checkpoint, step {run.step:,}. Data: "
        f"{html.escape(printable(shared['data']['origin']))}.</p>",
        "<h2>Results</h2>",
        _table(("result", "value"), _results(run).items()),
        "<h2>Curves</h2>",
        _curves(rows),
    ]
    parts += (
        _class_parts(run, num_images, data)
        if has_classes
        else [
            "<h2>A sample</h2>",
            f"<pre>{html.escape(_sample(run))}</pre>",
        ]
    )
    parts += [
        "<h2>Configuration</h2>",
        _table(("key", "value"), flatten(shared["training"]).items()),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(heading)}</title>\n<style>{STYLE}</style>\n</head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def confusion_matrix(
    labels: Int[np.ndarray, " n"], predicted: Int[np.ndarray, " n"], num_classes: int
) -> Int[np.ndarray, "{num_classes} {num_classes}"]:
    """Counts the images of each class by the class that was predicted.

    Args:
        labels: The true classes.
        predicted: The predicted classes.
        num_classes: Number of classes.

    Returns:
        Counts: a row for each true class, a column for each predicted one.

    Example:
        >>> confusion_matrix(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
        [[1, 0], [1, 1]]
    """
    counts = np.zeros((num_classes, num_classes), int)
    np.add.at(counts, (labels, predicted), 1)
    return counts


def _results(run: Run) -> dict[str, Any]:
    """Returns the results of the run's checkpoint in ``result.json``, as text."""
    result = read_result(run.workdir, run.config.seed, run.step)
    if run.resized or not result:
        what = "this size" if run.resized else "this checkpoint"
        return {"state": f"result.json has none of {what}"}
    return {title(key): format_value(key, value) for key, value in result.items()}


def _curves(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = {key for row in rows for key in row}
    metrics = {
        name: metric
        for name, metric in METRICS.items()
        if not columns.isdisjoint({f"train_{name}", f"validation_{name}"})
    }
    if not metrics:
        return "<p>None: the run has no rows of metrics.</p>"
    figure = Figure(figsize=(5 * len(metrics), 3.5), layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for ax, (name, metric) in zip(axes, metrics.items(), strict=True):
        for split in ("train", "validation"):
            key = f"{split}_{name}"
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                ax.plot(*zip(*points, strict=True), ".-", label=split)
        better = "higher" if metric.higher_is_better else "lower"
        ax.set(xlabel="step", ylabel=plain(f"{title(name)} ({better} is better)"))
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    titles = ", ".join(map(title, metrics))
    return _image(figure, f"By step, in training and validation: {titles}")


def _sample(run: Run) -> str:
    try:
        return str(run.generate("\n"))
    except (ImportError, OSError, ValueError) as error:
        # The tokenizer is missing, or a line break is not one of its tokens.
        return f"None: {error}."


def _class_parts(
    run: Run, num_images: int | None, data: DataSource | None
) -> list[str]:
    """Returns the sections of a run with classes; volumes and points are not drawn."""
    inputs, labels, probabilities = _predict_test(run, num_images, data)
    warn_of_nan(probabilities)
    # On one line, with the bytes of folders' names that are not UTF-8.
    names = [printable(name) for name in run.data.labels]
    predicted = probabilities.argmax(axis=-1)
    # The largest of NaN would be the first class.
    defined = ~np.asarray(np.isnan(probabilities).any(axis=-1))
    counts = confusion_matrix(labels[defined], predicted[defined], len(names))
    totals, right = np.bincount(labels, minlength=len(names)), counts.diagonal()
    rows = [
        (name, f"{100 * hits / max(total, 1):.1f}%" if total else "–", f"{total:,}")
        for name, hits, total in zip(names, right, totals, strict=True)
    ]
    drawn = run.data.kind == "images" and inputs.ndim == 4
    what = "images" if drawn else "examples"
    parts = [
        "<h2>Confusion matrix</h2>",
        f"<p>{len(labels):,} test {what}, {100 * right.sum() / len(labels):.2f}% "
        "of them classified correctly.</p>",
        _confusions(counts, names),
        "<h2>Accuracy of each class</h2>",
        _table(("class", "accuracy", what), rows),
    ]
    if not drawn:
        return parts
    wrong = np.flatnonzero(defined & (predicted != labels))
    # The most confident errors first.
    wrong = wrong[np.argsort(-probabilities[wrong].max(axis=-1), kind="stable")]
    errors = wrong[:NUM_ERRORS]
    captions = [
        f"{names[labels[i]]} predicted as\n{names[predicted[i]]} "
        f"({probabilities[i, predicted[i]]:.0%})"
        for i in errors
    ]
    shown = [(predicted[i], defined[i]) for i in range(min(NUM_MAPS, len(labels)))]
    return [
        *parts,
        "<h2>The most confident errors</h2>",
        _gallery([inputs[i] for i in errors], captions, "Errors")
        if len(errors)
        else "<p>There are none.</p>",
        "<h2>Attention maps</h2>",
        _maps(
            run,
            inputs[:NUM_MAPS],
            [names[i] if known else "NaN" for i, known in shown],
        ),
    ]


def _predict_test(
    run: Run, num_images: int | None, data: DataSource | None
) -> tuple[np.ndarray, np.ndarray, Float[np.ndarray, "n classes"]]:
    """Returns test examples, their labels and their probabilities."""
    data = _load_data(run) if data is None else data
    check_fits(run.data, data.info, run.workdir)
    split, batch_size = data.eval_splits["test"], run.config.eval_batch_size
    if not len(split):
        raise ValueError("the test split is empty: a report needs test examples")
    wanted = min(num_images or len(split), len(split))
    predict = make_predict_fn(run)
    key = "points" if run.data.kind == "points" else "image"
    inputs, labels, found = [], [], []
    for batch in split.batches(batch_size):
        left = wanted - sum(map(len, labels))
        if left <= 0:
            break
        real = np.flatnonzero(batch["weight"])[:left]
        inputs.append(batch[key][real])
        labels.append(batch["label"][real])
        logits = predict(run.preprocess(batch))
        found.append(np.asarray(jax.nn.softmax(logits))[real])
    return np.concatenate(inputs), np.concatenate(labels), np.concatenate(found)


def _load_data(run: Run, data_dir: str | None = None) -> DataSource:
    """Loads the data set of training, which may have moved."""
    require_data(run.given, run.data, run.workdir, REPORT_CALL)
    return load_data(data_config(run.config, data_dir, run.workdir))


def _confusions(counts: np.ndarray, names: Sequence[str]) -> str:
    """Shows the matrix, or the most frequent confusions of many classes."""
    if len(names) > MAX_MATRIX:
        wrong = counts * (1 - np.eye(len(names), dtype=int))
        order = np.argsort(-wrong, axis=None, kind="stable")[:MAX_CONFUSIONS]
        pairs = np.stack(np.unravel_index(order, wrong.shape), axis=1)
        rows = [(names[i], names[j], wrong[i, j]) for i, j in pairs if wrong[i, j]]
        return _table(("class", "predicted as", "images"), rows)
    size = 2.5 + 0.45 * len(names)
    figure = Figure(figsize=(size, size), layout="constrained")
    ax = figure.subplots()
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    ax.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    for (i, j), count in np.ndenumerate(counts):
        if count:
            color = "white" if fractions[i, j] > 0.5 else "black"
            ax.text(j, i, f"{count}", ha="center", va="center", color=color, size=8)
    drawn = [plain(name) for name in names]
    ax.set_xticks(range(len(names)), drawn, rotation=90)
    ax.set_yticks(range(len(names)), drawn)
    ax.set(xlabel="predicted class", ylabel="true class")
    return _image(figure, "Number of test images by true and predicted class")


def _gallery(images: Sequence[np.ndarray], captions: Sequence[str], alt: str) -> str:
    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(2.4 * columns, 2.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes:
        ax.axis("off")
    for ax, image, caption in zip(axes, images, captions, strict=False):
        _show(ax, image)
        ax.set_title(plain(caption), size=9)
    return _image(figure, f"{alt}: {'; '.join(captions)}")


def _maps(run: Run, images: np.ndarray, predicted: Sequence[str]) -> str:
    """Shows images above the weights of their patches in the last layer."""
    make_maps = make_maps_fn(run)
    if make_maps is None:
        return "<p>None: the model has no attention.</p>"
    has_cls = run.model.has_class_token
    queries = "the CLS token" if has_cls else "all tokens, on average"
    inputs = run.preprocess({"image": images})
    read, starts = map(np.asarray, make_maps(inputs))
    patch = [
        side // size
        for side, size in zip(inputs.shape[1:3], read.shape[1:], strict=True)
    ]
    figure = Figure(figsize=(2.4 * len(images), 4), layout="constrained")
    axes = figure.subplots(2, len(images), squeeze=False)
    for column, image in enumerate(images):
        # The weight of each pixel's patch.
        weight = np.roll(np.kron(read[column], np.ones(patch)), starts[column], (0, 1))
        for ax in axes[:, column]:
            ax.axis("off")
        _show(axes[0, column], image)
        axes[0, column].set_title(plain(predicted[column]), size=9)
        shown = axes[1, column].imshow(weight, cmap="viridis")
        figure.colorbar(shown, ax=axes[1, column], shrink=0.7)
    text = f"Attention weights of {queries} in the last layer, averaged over the heads"
    return f"<p>{text}.</p>" + _image(figure, text)


def _show(ax: Any, image: np.ndarray) -> None:
    channels = image.shape[-1]
    # Of other channels the first three; of two, the last twice, as on the page.
    shown = image[..., 0 if channels == 1 else np.minimum(range(3), channels - 1)]
    ax.imshow(shown, cmap="gray")


def _table(header: Sequence[str], rows: Any) -> str:
    def cells(values: Sequence[Any], tag: str) -> str:
        shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in values)
        escaped = (html.escape(printable(value)) for value in shown)
        return "".join(f"<{tag}>{value}</{tag}>" for value in escaped)

    lines = [f"<tr>{cells(row, 'td')}</tr>" for row in rows]
    head = f"<tr>{cells(header, 'th')}</tr>"
    return f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'


def _image(figure: Figure, alt: str) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    data = base64.b64encode(file.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report."""
    parser = command.Parser("python -m relattn.evaluation.report", __doc__)
    add = parser.add_argument
    add("--workdir", required=True, help="the run directory")
    add("--output", help="the page; by default WORKDIR/report.html")
    add("--checkpoint", default="best", help="best or latest")
    add("--seed", type=int, help=command.SEED_HELP)
    add("--num_images", type=int, help="number of test examples; by default all")
    add("--data_dir", help="folder of the data set, if it has moved")
    given = parser.parse_args(argv)
    output = expand(given.workdir, "--workdir") / "report.html"
    if given.output is not None:
        output = usable_file(given.output, "--output")
    run = load_run(given.workdir, given.checkpoint, seed=given.seed)
    data = None if given.data_dir is None else _load_data(run, given.data_dir)
    text = report(run, num_images=given.num_images, data=data)
    write_text(output, text)
    print(printable(f"Written to {output}"))


if __name__ == "__main__":
    main()
