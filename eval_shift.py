"""How accuracy holds when the test images are shifted: figure 1 of Horn et al.

    python eval_shift.py --workdir=RUN [--workdir=RUN2 ...] --output=DIR

Writes shift.csv, shift.png and summary.md to DIR, and prints the summary. With
the class and the axis of the figure, all three have its published curves too.
"""

import sys

from absl import app, flags, logging

from relattn.evaluation.compare import shift_report
from relattn.training.errors import USER_ERRORS, is_user_error

WORKDIR = flags.DEFINE_multi_string("workdir", [], "Folder of a run; repeatable.")
OUTPUT = flags.DEFINE_string("output", None, "Folder to write to.", required=True)
MAX_SHIFT = flags.DEFINE_integer("max_shift", 8, "Largest shift in pixels.")
AXIS = flags.DEFINE_string("axis", "x", "x (right) or y (down).")
CLASSES = flags.DEFINE_string(
    "classes",
    "1",
    "A class, by number or name: its test images that can move max_shift pixels both "
    "ways. Or all: the images of every class, at the shifts they allow.",
)
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best or latest.")
IMAGE_SIZE = flags.DEFINE_integer(
    "image_size",
    None,
    "Size of the images in pixels, if not the one of training: the models' tables of "
    "positions are resized.",
)
NUM_IMAGES = flags.DEFINE_integer(
    "num_images", None, "Number of test images, the first that there are, if not all."
)
DATA_DIR = flags.DEFINE_string("data_dir", None, "The data set, if it has moved.")


def refuse(problem):
    """Ends with one sentence and the exit code 2."""
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(2)


def main(argv):
    """Evaluates the runs that the flags name."""
    if argv[1:]:
        refuse(f"unexpected argument {argv[1]!r}: options are --name=value")
    if not flags.FLAGS["verbosity"].present:
        # Orbax tells of every file it touches.
        logging.set_verbosity(logging.WARNING)
    try:
        summary = shift_report(
            WORKDIR.value,
            OUTPUT.value,
            max_shift=MAX_SHIFT.value,
            axis=AXIS.value,
            classes=CLASSES.value,
            checkpoint=CHECKPOINT.value,
            image_size=IMAGE_SIZE.value,
            data_dir=DATA_DIR.value,
            num_images=NUM_IMAGES.value,
        )
    except USER_ERRORS as error:
        if not is_user_error(error):
            raise
        refuse(error)
    print(summary)
    print(f"Written to {OUTPUT.value}: shift.csv, shift.png, summary.md")


if __name__ == "__main__":
    app.run(main)
