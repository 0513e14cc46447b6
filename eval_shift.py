"""Measures accuracy on shifted test images: figure 1 of Horn et al.

    python eval_shift.py --workdir=RUN [--workdir=RUN2 ...] --output=DIR

Writes shift.csv, shift.png and summary.md to DIR, and prints the summary. For the class
and the axis of the figure, all three include its curves. After ``pip install``, the
program is ``relattn eval-shift``, without these.
"""

import functools

from relattn.cli import eval_shift
from studies.figure1 import published_curve

main = functools.partial(eval_shift, find_published=published_curve)

if __name__ == "__main__":
    main()
