"""What an installation promises: no TensorFlow, and a light import of kernels."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(code):
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_kernels_and_models_need_nothing_of_training():
    run("""
import sys, relattn
heavy = {"grain", "orbax", "tensorflow_datasets", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
assert set(relattn.__all__) <= set(dir(relattn))
from relattn import *
assert load_run is relattn.training.load_run and relattn.data.load_images
try:
    relattn.train_and_evaluat
except AttributeError as error:
    assert "relattn" in str(error)
else:
    raise AssertionError
""")


def test_no_module_imports_tensorflow():
    run("""
import pkgutil, sys, relattn
for module in pkgutil.walk_packages(relattn.__path__, "relattn."):
    __import__(module.name)
heavy = {"tensorflow", "torch"} & set(sys.modules)
assert not heavy, heavy
""")
