"""Runs the command ``relattn`` as ``python -m relattn``."""

from relattn.cli import main

if __name__ == "__main__":
    main()
