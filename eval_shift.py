"""Measures accuracy on shifted test images: figure 1 of Horn et al.

    python eval_shift.py --workdir=RUN [--workdir=RUN2 ...] --output=DIR

Writes shift.csv, shift.png and summary.md to DIR, and prints the summary. After
``pip install``, the program is ``relattn eval-shift``.
"""

from relattn.cli import eval_shift as main

if __name__ == "__main__":
    main()
