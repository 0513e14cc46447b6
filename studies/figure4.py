"""Draws static and dynamic digits, as figure 4 of Translution.

``python -m studies.figure4 --output=digits.png`` draws test images of the MNIST subset
that ships with the package, in the centre of a canvas of 84x84 pixels (static) and
anywhere on it (dynamic).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from relattn import command, data
from relattn.evaluation.figures import save_figure
from relattn.files import usable_file


def figure() -> Figure:
    """Draws the first image of each class, static above dynamic.

    Returns:
        The figure.
    """
    options = data.image_options("mnist", 84, placement="dynamic")
    splits = data.load_images(options).eval_splits
    result = Figure(figsize=(10, 2.2), layout="constrained")
    panels = result.subplots(2, 10)
    for row, name in zip(panels, ("static", "dynamic"), strict=True):
        split = splits[f"test_{name}"]
        [batch] = split.batches(len(split))
        for digit, panel in enumerate(row):
            first = int(np.argmax(batch["label"] == digit))
            panel.imshow(batch["image"][first, :, :, 0], cmap="gray")
            panel.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)
    return result


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Draws the digits."""
    parser = command.Parser("python -m studies.figure4", __doc__)
    parser.add_argument("--output", required=True, help="the image file to write")
    path = usable_file(parser.parse_args(argv).output, "--output")
    save_figure(figure(), path)
    print(f"Written to {path}")


if __name__ == "__main__":
    main()
