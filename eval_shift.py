"""Measures accuracy on shifted test images: figure 1 of Horn et al.

    python eval_shift.py --workdir=RUN [--workdir=RUN2 ...] --output=DIR

Writes shift.csv, shift.png and summary.md to DIR, and prints the summary. For the class
and the axis of the published figure, all three include its curves.
"""

from collections.abc import Sequence

from relattn import command
from relattn.evaluation.compare import shift_report


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the options and evaluates the runs.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python eval_shift.py", __doc__)
    add = parser.add_argument
    add("--workdir", action="append", default=[], help="folder of a run; repeatable")
    add("--output", required=True, help="folder to write to")
    add("--max_shift", type=int, default=8, help="largest shift in pixels")
    add("--axis", default="x", help="x (right) or y (down)")
    add(
        "--classes",
        default="1",
        help="a class, by number or name, to use its test images that can move "
        "max_shift pixels both ways; or all: every image at the shifts that it allows",
    )
    add("--checkpoint", default="best", help="best or latest")
    add(
        "--image_size",
        type=int,
        help="size of the images in pixels, if not that of training; the models' "
        "position tables are resized",
    )
    add(
        "--num_images",
        type=int,
        help="number of test images to use, from the first; by default all",
    )
    add(
        "--border",
        default="zeros",
        help="what moves into an image: zeros; wrap (what leaves it on the other "
        "side); or, for photographs, crop (the rest of a larger image). With wrap and "
        "crop, all images allow all shifts",
    )
    add("--data_dir", help="folder of the data set, if it has moved")
    given = parser.parse_args(argv)
    summary = shift_report(
        given.workdir,
        given.output,
        max_shift=given.max_shift,
        axis=given.axis,
        classes=given.classes,
        checkpoint=given.checkpoint,
        image_size=given.image_size,
        data_dir=given.data_dir,
        num_images=given.num_images,
        border=given.border,
    )
    print(summary)
    print(f"Written to {given.output}: shift.csv, shift.png, summary.md")


if __name__ == "__main__":
    main()
