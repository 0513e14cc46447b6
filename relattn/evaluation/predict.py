"""Predicts the classes of images or sets of points with a trained model, as CSV.

``relattn predict RUN a.jpg photos`` prints a row for each image: the file, its most
likely class, the label and the probability. ``relattn predict RUN a.npz`` prints a row
for each image or volume of the array ``images`` of the file, named ``a.npz[0]`` and so
on, or, for a run on points, for each set of its ``positions``, ``features`` and
``mask``. ``python -m relattn.evaluation.predict`` is the same program; ``--workdir=RUN
--input a.jpg photos`` names the run and the files as options. RUN may also be a saved
or converted model; if it has no class names, its classes are named by their numbers.
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from relattn import command
from relattn.data import read_point_sets
from relattn.data.base import ClassInfo, check_eval_batch
from relattn.data.folder import KINDS
from relattn.data.image_list import check_files
from relattn.data.user_images import UserImage, as_sequence, is_array_file
from relattn.files import expand, replace_file, usable_file
from relattn.messages import check_choice, printable
from relattn.models.pretrained import check_no_seed, class_names_of, load_pretrained
from relattn.training import Run, load_run
from relattn.training.draws import check_draws, make_average_fn
from relattn.training.predict import Predictions, pad_points, require_kind, warn_of_nan
from relattn.training.saved_run import is_saved_model

COLUMNS = ("file", "class", "label", "probability")
# Images that a saved model sees at once.
BATCH_SIZE = 64


def _image_files(given: str) -> list[Path]:
    """Returns the image files of a folder and its sub-folders, sorted; or a file.

    Hidden files and folders are left out.
    """
    if not given:
        raise ValueError("--input is empty (unset shell variable?): name an image")
    path = expand(given, "--input")
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"the image {path} is missing")
        return [path]
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in KINDS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise ValueError(
            f"the folder {path} holds no images ({', '.join(KINDS)}): name the files"
        )
    return files


def _to_csv(
    predictions: Predictions, names: Sequence[str], *, every: bool, top: int = 1
) -> str:
    """Returns a table in CSV, with a row for each example.

    It has the label and probability of the ``top`` most likely classes, and with
    ``every`` a column for the probability of each class.

    Example:
        >>> import numpy as np
        >>> probabilities = np.float32([[0.25, 0.75]])
        >>> found = Predictions(probabilities, ("cat", "dog"))
        >>> print(_to_csv(found, ["a.png"], every=False), end="")
        file,class,label,probability
        a.png,dog,1,0.750000
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    class_names = predictions.class_names
    _check_top(top, len(class_names))
    header = [*COLUMNS]
    for rank in range(2, top + 1):
        header += [f"{column} {rank}" for column in COLUMNS[1:]]
    header += [f"probability of {name}" for name in class_names] if every else []
    writer.writerow(header)
    # Of equal probabilities the first, as in `Predictions.labels`.
    order = np.argsort(-predictions.probabilities, axis=-1, kind="stable")[:, :top]
    for name, labels, values in zip(
        names, order, predictions.probabilities, strict=True
    ):
        row = [name]
        for label in labels:
            row += [class_names[label], label, f"{values[label]:.6f}"]
        writer.writerow(row + [f"{value:.6f}" for value in values] * every)
    return text.getvalue()


def _check_top(top: int, num_classes: int) -> None:
    """Raises ValueError if ``top`` is not from 1 to the number of classes."""
    if not 1 <= top <= num_classes:
        raise ValueError(f"--top={top} must be from 1 to {num_classes}, the classes")


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints or writes the predictions."""
    parser = command.Parser("python -m relattn.evaluation.predict", __doc__)
    add = parser.add_argument
    add(
        "paths",
        nargs="*",
        default=[],
        metavar="PATH",
        help="the run directory, and image files or folders of them, or .npz files of "
        "images, volumes or sets of points",
    )
    add("--workdir", help="the run directory, as an option")
    inputs = {"default": [], "nargs": "+", "action": "extend"}
    add("--input", **inputs, help="the files or folders, as an option; repeatable")
    add("--output", help="a file to write to; by default the table is printed")
    add(
        "--probabilities",
        action="store_true",
        help="add a column for the probability of every class",
    )
    add(
        "--top",
        type=int,
        default=1,
        help="number of most likely classes in each row; by default one",
    )
    add("--checkpoint", default="best", help="best or latest")
    add("--seed", type=int, help=command.SEED_HELP)
    add(
        "--image_size",
        type=int,
        help="side of the images in pixels, by default that of training; the model's "
        "position tables are resized",
    )
    add("--batch_size", type=int, help=command.BATCH_HELP)
    add("--draws", type=int, help=command.DRAWS_HELP)
    given = parser.parse_args(argv)
    output = None
    if given.output is not None:
        output = usable_file(given.output, "--output")
    workdir, inputs = _split_paths(given.workdir, [*given.paths, *given.input])
    files = [file for path in inputs for file in _image_files(path)]
    if is_saved_model(workdir):
        found, names = _predict_saved(workdir, files, given)
    else:
        run = load_run(
            workdir, given.checkpoint, image_size=given.image_size, seed=given.seed
        )
        if isinstance(run.data, ClassInfo):
            _check_top(given.top, run.data.num_classes)
        found, names = _predict(run, files, given.batch_size, given.draws)
    table = _to_csv(found, names, every=given.probabilities, top=given.top)
    if output is None:
        if sys.stdout.isatty():
            # A terminal obeys control characters, such as those of a file's name.
            table = "\n".join(map(printable, table.split("\n")))
        print(table, end="")
    else:
        replace_file(output, table)


def _predict_saved(
    folder: str, files: Sequence[Path], given: argparse.Namespace
) -> tuple[Predictions, Sequence[str]]:
    """Returns what `_predict` does, of a saved model."""
    check_choice("checkpoint", given.checkpoint, ("best", "latest"))
    check_no_seed(folder, given.seed)
    loaded = load_pretrained(folder, image_size=given.image_size)
    num_classes = loaded.config.get("num_classes", 0)
    if loaded.model.inputs not in ("images", "points") or not num_classes:
        raise ValueError(
            f"{folder} does not classify images: name a run or a model that does"
        )
    _check_top(given.top, num_classes)
    training = loaded.config.get("training", {})
    draws = training.get("eval_draws", 1) if given.draws is None else given.draws
    check_draws(draws, loaded.variables.get("random_features"))
    logits = functools.partial(jax.jit(loaded.model.apply), loaded.variables)
    if draws > 1:
        seed = training.get("seed", 0)
        logits = make_average_fn(loaded.model, loaded.variables, seed, draws)
    size = BATCH_SIZE if given.batch_size is None else given.batch_size
    check_eval_batch(size)
    if loaded.model.inputs == "points":
        sets = [loaded.preprocess(file) for file in files]
        names = _set_names(files, sets)
        sets = [pad_points(each, loaded.config["point_shape"]) for each in sets]
        batches = (x[i : i + size] for x in sets for i in range(0, len(x), size))
    else:
        # Without a shape, `preprocess` says what is missing.
        images, names = _read_images(files, loaded.config.get("image_shape", (1, 1, 1)))
        starts = range(0, len(images), size)
        batches = (loaded.preprocess(images[i : i + size]) for i in starts)
    found = [np.zeros((0, num_classes), np.float32)]
    for inputs in batches:
        found.append(np.asarray(jax.nn.softmax(logits(inputs).astype(np.float32))))
    class_names = class_names_of(loaded.config) or range(num_classes)
    probabilities = np.concatenate(found)
    warn_of_nan(probabilities)
    return Predictions(probabilities, tuple(map(str, class_names))), names


def _predict(
    run: Run, files: Sequence[Path], batch_size: int | None, draws: int | None
) -> tuple[Predictions, Sequence[str]]:
    """Returns the predictions for the examples in files, and their names."""
    predict = functools.partial(run.predict, batch_size=batch_size, draws=draws)
    if run.data.kind != "points":
        images, names = _read_images(files, require_kind(run, "images").image_shape)
        return predict(images), names
    # All are read before the first prediction. Each may have another number of points.
    sets = [read_point_sets(file, run.data) for file in files]
    probabilities = np.concatenate([predict(each).probabilities for each in sets])
    return Predictions(probabilities, run.data.class_names), _set_names(files, sets)


def _read_images(
    files: Sequence[Path], image_shape: Sequence[int]
) -> tuple[list[UserImage], list[str]]:
    """Returns image files and the images in files of arrays, and their names."""
    check_files([file for file in files if not is_array_file(file)])
    images: list[UserImage] = []
    names = []
    for file in files:
        found = as_sequence(file, image_shape)
        images.extend(found)
        if is_array_file(file):
            names += [f"{file}[{index}]" for index in range(len(found))]
        else:
            names.append(str(file))
    return images, names


def _set_names(files: Sequence[Path], sets: Sequence[Any]) -> list[str]:
    """Returns the name of each set of points in files."""
    return [
        f"{file}[{index}]"
        for file, points in zip(files, sets, strict=True)
        for index in range(len(points))
    ]


def _split_paths(workdir: str | None, paths: list[str]) -> tuple[str, list[str]]:
    """Returns the run and the images; the run is the first path if it has no option."""
    if workdir is None:
        if not paths:
            raise ValueError(
                "the run and the images are missing: pass them, as in relattn predict "
                "RUN a.jpg photos"
            )
        workdir, *paths = paths
    if not paths:
        raise ValueError(
            "the images are missing: pass files or folders after the run directory"
        )
    return workdir, paths


if __name__ == "__main__":
    main()
