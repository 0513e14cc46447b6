"""What an installation promises: no TensorFlow, and a light import of kernels."""

import importlib.metadata
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize(
    "extra, of_jax", [("cuda", "cuda13"), ("cuda12", "cuda12"), ("tpu", "tpu")]
)
def test_an_accelerator_is_an_extra_that_jax_has(extra, of_jax, monkeypatch):
    found = {}
    # New environments have no setuptools.
    fake = SimpleNamespace(setup=found.update, find_packages=lambda include: include)
    monkeypatch.setitem(sys.modules, "setuptools", fake)
    runpy.run_path(str(ROOT / "setup.py"))
    assert found["extras_require"][extra] == [f"jax[{of_jax}]>=0.10"]
    assert of_jax in importlib.metadata.metadata("jax").get_all("Provides-Extra")
    assert f"pip install -e '.[{extra}]'" in (ROOT / "README.md").read_text("utf-8")
