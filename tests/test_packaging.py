"""The requirements, imports and extras of an installation."""

import email
import importlib.metadata
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
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


@pytest.mark.parametrize("extra", ["hf", "notebooks", "openwebtext", "prepare", "text"])
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


def copy_checkout(folder):
    """Copies the files of the checkout, since building writes to their folder."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def test_links_of_the_readme_have_full_addresses(metadata):
    text = metadata["long_description"]
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert len(targets) > 40
    assert [t for t in targets if not t.startswith("https://")] == []
    assert "](https://github.com/relattn/relattn#the-demo)" in text
    assert (
        "](https://github.com/relattn/relattn/raw/main/results/demo_page.png)" in text
    )
    assert "](https://github.com/relattn/relattn/blob/main/docs/results.md)" in text


@pytest.mark.slow
def test_distributions_are_ready_for_a_package_index(tmp_path):
    for name in ("build", "twine", "readme_renderer"):
        pytest.importorskip(name)
    source, output = copy_checkout(tmp_path / "source"), tmp_path / "dist"
    python = [sys.executable, "-W", "ignore", "-m"]
    build = [*python, "build", "--no-isolation", f"--outdir={output}", source]
    subprocess.run(build, check=True, capture_output=True)
    kinds = sorted(file.suffix for file in output.iterdir())
    assert kinds == [".gz", ".whl"]
    check = [*python, "twine", "check", "--strict", *output.iterdir()]
    checked = subprocess.run(check, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    (wheel,) = output.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    tracked = {
        file.relative_to(source).as_posix()
        for file in (source / "relattn").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert tracked <= {*files}
    assert "relattn/configs/performer.py" in files
    (info,) = (text for name, text in files.items() if name.endswith("/METADATA"))
    description = email.message_from_bytes(info).get_payload()
    html = importlib.import_module("readme_renderer.markdown").render(description)
    links = re.findall(r"(?:href|src)=\"([^\"]*)\"", html)
    assert len(links) > 40
    # The renderer itself gives headings anchors with this prefix.
    known = ("https://", "#user-content-")
    assert [link for link in links if not link.startswith(known)] == []
    for heading in ("Which should I use?", "Licence"):
        assert re.search(rf"<h2.*>.*{re.escape(heading)}.*</h2>", html), heading
    assert html.count("<table>") == description.count("\n| ---")


@pytest.mark.slow
def test_an_installed_wheel_trains_and_evaluates_a_configuration(tmp_path):
    """Installs the wheel outside the checkout, with the packages that are here."""

    def run(*command, **options):
        subprocess.run(command, cwd=tmp_path, check=True, **options)

    source = copy_checkout(tmp_path / "source")
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
