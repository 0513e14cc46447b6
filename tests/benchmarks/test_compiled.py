"""Compiling for a TPU or GPU that is not there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compiled
from relattn.training.config_file import read_config

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
MEASURED = {
    target: json.loads((RESULTS / f"compiled_{target}.json").read_text("utf-8"))
    for target in compiled.TARGETS
}
# Tests of other files simulate devices and compile with few optimisations.
NOT_OF_USERS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
# What a row may at most be, as a multiple of the committed one, and beyond it.
BOUNDS = {
    "seconds": (3, 30),
    "code_mb": (2, 1),
    "temporary_mb": (1.5, 4),
    "instructions": (1.5, 20),
    "moved_mb": (1.5, 4),
}


def test_rows_that_are_there_are_compiled_only_by_name():
    missing = ["linear@4096", "vit_a12_translution"]
    done = [name for name in compiled.ROWS if name not in missing]
    assert compiled.choose_rows("", done) == missing
    assert compiled.choose_rows("softmax@4096", done) == ["softmax@4096"]


@pytest.mark.parametrize("name", compiled.STEPS)
def test_steps_have_a_configuration_of_published_size(name):
    assert read_config(compiled.STEPS[name], []).num_epochs > 0


@pytest.mark.parametrize(
    ("target", "package", "extra"),
    [("v5e", "libtpu", "tpu"), ("h100", "jax_cuda13_plugin", "cuda13")],
)
def test_without_the_compiler(target, package, extra, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match="2"):
        compiled.main([f"--target={target}", f"--output={tmp_path}"])
    assert capsys.readouterr().err == (
        f"error: benchmarks.compiled needs {package}: pip install 'jax[{extra}]'\n"
    )


def test_the_table_in_the_text_has_the_numbers_of_the_rows():
    """What docs/speed.md says of Translution in blocks, beside that by rows."""
    text = (ROOT / "docs" / "speed.md").read_text("utf-8")
    text = text.split("### Translution in blocks of pairs")[1]
    pattern = re.compile(r"([\d.,]+) (instructions|\wB moved|\wB temporary|ms)")
    fields = ("instructions", "moved_mb", "temporary_mb", "time_ms")
    rows = re.findall(r"`(\S+)` \| .+ temporary.* \| (.+) \|\n", text)
    for name, cell in rows:
        found = pattern.findall(cell)
        for (number, unit), field in zip(found, fields, strict=True):
            value = MEASURED["h100"][name][field] / (1e3 if unit[0] == "G" else 1)
            digits = len(number.partition(".")[2])
            assert number == f"{value:,.{digits}f}", (name, cell)
    assert len(rows) == 6


# The others take minutes each.
QUICK = [
    (target, name)
    for target, rows in MEASURED.items()
    for name, row in rows.items()
    if row.get("seconds", 600) < 30
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name"), QUICK)
def test_compiles_as_measured(target, name, tmp_path):
    pytest.importorskip(compiled.TARGETS[target].package)
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.compiled"),
            *(f"--target={target}", f"--only={name}", f"--output={tmp_path}"),
        ],
        cwd=ROOT,
        env={key: os.environ[key] for key in os.environ if key not in NOT_OF_USERS},
        check=True,
    )
    path = tmp_path / f"compiled_{target}.json"
    (row,) = json.loads(path.read_text("utf-8")).values()
    for key, (factor, slack) in BOUNDS.items():
        assert row[key] <= factor * MEASURED[target][name][key] + slack, key
