"""Predicts the classes of image files with a trained model, as CSV.

``python -m relattn.evaluation.predict --workdir=RUN --input a.jpg photos`` prints a row
for each image: the file, its most likely class, the label and the probability.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from relattn import command
from relattn.data.folder import KINDS
from relattn.files import expand, replace_file, usable_file
from relattn.messages import printable
from relattn.training import load_run
from relattn.training.predict import Predictions

COLUMNS = ("file", "class", "label", "probability")


def image_files(given: str) -> list[Path]:
    """Returns the image files of a folder and its sub-folders, sorted; or a file.

    Args:
        given: A folder, whose hidden files and folders are left out, or a file.

    Returns:
        The files.

    Raises:
        FileNotFoundError: If the path is missing.
        ValueError: If it is empty, or the folder holds no image.
    """
    if not given:
        raise ValueError("--input is empty (unset shell variable?): name an image")
    path = expand(given, "--input")
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"The image {path} is missing")
        return [path]
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.suffix.lower() in KINDS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]
    if not files:
        raise ValueError(f"The folder {path} holds no images ({', '.join(KINDS)})")
    return files


def to_csv(predictions: Predictions, files: Sequence[Path], *, every: bool) -> str:
    """Returns a table with a row for each image.

    Args:
        predictions: The class probabilities of the images.
        files: The image files.
        every: Whether to add a column for the probability of every class.

    Returns:
        The table in CSV, with a header.

    Example:
        >>> import numpy as np
        >>> probabilities = np.float32([[0.25, 0.75]])
        >>> found = Predictions(probabilities, ("cat", "dog"))
        >>> print(to_csv(found, [Path("a.png")], every=False), end="")
        file,class,label,probability
        a.png,dog,1,0.750000
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = predictions.class_names if every else ()
    writer.writerow([*COLUMNS, *(f"probability of {name}" for name in names)])
    rows = zip(
        files,
        predictions.classes,
        predictions.labels,
        predictions.probabilities,
        strict=True,
    )
    for file, name, label, values in rows:
        shown = [values[label], *values] if every else [values[label]]
        writer.writerow([file, name, label, *(f"{value:.6f}" for value in shown)])
    return text.getvalue()


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints or writes the predictions.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python -m relattn.evaluation.predict", __doc__)
    add = parser.add_argument
    add("--workdir", required=True, help="the run directory")
    inputs = {"required": True, "nargs": "+", "action": "extend"}
    add("--input", **inputs, help="image files, or folders of them; repeatable")
    add("--output", help="a file to write to; by default the table is printed")
    add(
        "--probabilities",
        action="store_true",
        help="add a column for the probability of every class",
    )
    add("--checkpoint", default="best", help="best or latest")
    add(
        "--image_size",
        type=int,
        help="side of the images in pixels, by default that of training; the model's "
        "position tables are resized",
    )
    add("--batch_size", type=int, default=256, help="images in a batch")
    add("--draws", type=int, help=command.DRAWS_HELP)
    given = parser.parse_args(argv)
    output = None
    if given.output is not None:
        output = usable_file(given.output, "--output")
    files = [file for path in given.input for file in image_files(path)]
    run = load_run(given.workdir, given.checkpoint, image_size=given.image_size)
    found = run.predict(files, batch_size=given.batch_size, draws=given.draws)
    table = to_csv(found, files, every=given.probabilities)
    if output is None:
        if sys.stdout.isatty():
            # A terminal obeys control characters, such as those of a file's name.
            table = "\n".join(map(printable, table.split("\n")))
        print(table, end="")
    else:
        replace_file(output, table)


if __name__ == "__main__":
    main()
