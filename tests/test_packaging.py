"""The requirements, imports and extras of an installation."""

import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from relattn import extras

ROOT = Path(__file__).parents[1]
LOWER_BOUNDS = ROOT / ".github" / "lower-bounds.txt"
# Import name -> name in setup.py, where they differ.
DISTRIBUTIONS = {
    "absl": "absl-py",
    "ml_collections": "ml-collections",
    "orbax": "orbax-checkpoint",
    "PIL": "pillow",
    "tensorflow_datasets": "tensorflow-datasets",
}


def run(code):
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.fixture
def metadata(monkeypatch):
    """Returns the arguments of setup()."""
    found = {}
    # New environments have no setuptools.
    fake = SimpleNamespace(setup=found.update, find_packages=lambda include: include)
    monkeypatch.setitem(sys.modules, "setuptools", fake)
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def names(requirements):
    return {re.split("[<>=]", requirement)[0] for requirement in requirements}


def test_library_needs_only_its_requirements():
    run("""
import runpy, sys
from importlib.machinery import PathFinder
from relattn.extras import TRAIN

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = {*TRAIN, "chex", "beartype", "tensorstore"}
        if name.partition(".")[0] not in hidden:
            return PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
for name in {name for name in sys.modules if name.partition(".")[0] == "relattn"}:
    del sys.modules[name]
runpy.run_path("tests/helpers/library.py")
""")


def test_import_of_relattn_leaves_the_trainer_out():
    run("""
import sys, relattn
from relattn.extras import TRAIN
loaded = set(TRAIN) & set(sys.modules)
assert loaded <= {"absl", "optax", "orbax"}, loaded
assert relattn.load_run is relattn.training.load_run and relattn.data.load_images
assert {"load_run", "train_and_evaluate"} <= set(dir(relattn))
assert all(hasattr(relattn, name) for name in dir(relattn))
try:
    relattn.train_and_evaluat
except AttributeError as error:
    assert "relattn" in str(error)
else:
    raise AssertionError
""")


@pytest.mark.slow
def test_no_module_imports_tensorflow():
    run("""
import pkgutil, sys, relattn
for module in pkgutil.walk_packages(relattn.__path__, "relattn."):
    __import__(module.name)
heavy = {"tensorflow", "torch"} & set(sys.modules)
assert not heavy, heavy
""")


def test_library_requires_five_packages(metadata):
    required = {"flax", "jax", "jaxtyping", "numpy", "safetensors"}
    assert names(metadata["install_requires"]) == required


def test_train_extra_lists_what_the_trainer_checks(metadata):
    needed = {DISTRIBUTIONS.get(name, name) for name in extras.TRAIN}
    assert names(metadata["extras_require"]["train"]) == needed


@pytest.mark.parametrize("extra", ["notebooks", "openwebtext", "prepare", "text"])
def test_extras_include_the_trainer(extra, metadata):
    found = metadata["extras_require"]
    assert set(found["train"]) < set(found[extra])
    assert set(found["train"]) < set(found["test"])


def test_lower_bounds_are_the_pinned_versions(metadata):
    requirements = [*metadata["install_requires"], *metadata["extras_require"]["train"]]
    lines = LOWER_BOUNDS.read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    for requirement in requirements:
        name, bound = requirement.split(">=")
        assert f"{pins[name]}.0".startswith(f"{bound}."), requirement


@pytest.mark.parametrize(
    "extra, extra_of_jax", [("cuda", "cuda13"), ("cuda12", "cuda12"), ("tpu", "tpu")]
)
def test_accelerator_extras_exist_in_jax(extra, extra_of_jax, metadata):
    assert metadata["extras_require"][extra] == [f"jax[{extra_of_jax}]>=0.10"]
    assert extra_of_jax in importlib.metadata.metadata("jax").get_all("Provides-Extra")
    assert f"pip install -e '.[{extra}]'" in (ROOT / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_an_installed_wheel_trains_and_evaluates_a_configuration(tmp_path):
    """Installs the wheel outside the checkout, with the packages that are here."""

    def run(*command, **options):
        subprocess.run(command, cwd=tmp_path, check=True, **options)

    # A copy, since building writes to the folder.
    source = tmp_path / "source"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    run(*pip, "--target=installed", source)
    program = [sys.executable, "installed/bin/relattn"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    options = ["--config.num_steps=2", "--config.schedule.warmup_steps=0"]
    train = ["train", "--config=demo:banded", "--workdir=run", *options]
    run(*program, *train, env=environment)
    shift = ["eval-shift", "--workdir=run", "--output=shift", "--max_shift=1"]
    run(*program, *shift, env=environment)
    assert (tmp_path / "shift" / "shift.png").exists()
    found = subprocess.run(
        [sys.executable, "-c", "import relattn; print(relattn.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(str(tmp_path))
