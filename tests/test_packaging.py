"""What an installation promises: no TensorFlow, whatever is imported."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_module_imports_tensorflow():
    code = """
import pkgutil, sys, relattn
for module in pkgutil.walk_packages(relattn.__path__, "relattn."):
    __import__(module.name)
heavy = {"tensorflow", "torch"} & set(sys.modules)
assert not heavy, heavy
"""
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
