"""Trains a model.

python train.py --config=configs/X.py[:argument] --workdir=DIR [--config.a.b=value]

The same command resumes a run that was interrupted. `relattn.cli.train` describes the
exit codes; after ``pip install``, the program is ``relattn train``.
"""

from relattn.cli import train as main

if __name__ == "__main__":
    main()
