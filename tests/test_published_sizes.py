"""Every configuration of the studies and of configs/ starts at its published size."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relattn.markdown import markdown_table
from studies.presets import PRESETS
from tests.helpers.published_sizes import BATCH_SIZE, program

ROOT = Path(__file__).parents[1]
SMALL = {"cpu", "smoke"}
TIMEOUT = 600
TABLE = ROOT / ".cache" / "published_sizes.md"
# Simulated devices start more threads, and tests compile with few optimisations.
NOT_OF_USERS = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")


def configurations():
    """Lists the studies' configurations of published size, and every file's default."""
    runs = [
        config
        for preset in PRESETS.values()
        for row in preset.rows
        for config in row.runs.values()
        if not SMALL & set(config.partition(":")[2].split(","))
    ]
    files = sorted((ROOT / "configs").glob("*.py"))
    return list(dict.fromkeys([*runs, *(f"configs/{file.name}" for file in files)]))


def start(name, **environment):
    """Starts a configuration in a process and returns its output; it must not fail."""
    kept = {key: os.environ[key] for key in os.environ if key not in NOT_OF_USERS}
    began = time.time()
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.published_sizes", name],
        cwd=ROOT,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert not process.returncode, process.stderr[-3000:]
    seen = json.loads(process.stdout.splitlines()[-1])
    return {**seen, "seconds": seen["time"] - began}


def expect_an_update(seen):
    assert math.isfinite(seen["loss"])
    assert seen["update"] > 0 and math.isfinite(seen["update"])


@pytest.mark.slow
def test_the_performer_of_the_paper_starts():
    # The orthogonal draws of six layers in one program once deadlocked.
    seen = start(
        "configs/performer.py:mnist,constrained_sincos",
        JAX_DISABLE_MOST_OPTIMIZATIONS="1",
    )
    assert seen["parameters"] > 4e6
    expect_an_update(seen)


def test_what_the_tables_name_is_started():
    found = configurations()
    for name in (
        "configs/performer.py:cifar10,banded,published",
        "configs/translution_vit.py:imagenet,C/16,translution",
        "configs/translution_gpt.py:openwebtext,B-512,translution",
        "configs/rpe_vit.py:cifar10,relu,string_gate",
        "configs/demo.py",
    ):
        assert name in found
    assert not any(name.endswith(("cpu", "smoke")) for name in found)


def test_sets_of_one_shape_share_a_program():
    mnist, fashion, cifar = (
        program(f"configs/performer.py:{name},none")
        for name in ("mnist", "fashion_mnist", "cifar10")
    )
    assert mnist == fashion != cifar


@pytest.fixture(scope="module")
def rows():
    """The table's rows, by configuration."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("name", configurations())
def test_starts(name, rows):
    compiled = program(name)
    same = [other for other, row in rows.items() if row["program"] == compiled]
    row = rows[name] = {"program": compiled}
    try:
        if same:
            row |= rows[same[0]] | {"same": same[0]}
        else:
            row |= start(name, JAX_ENABLE_COMPILATION_CACHE="false")
    finally:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(table(rows))
    assert "parameters" in row, f"{same[0]}, of the same program, did not start"
    if "needed" not in row:
        expect_an_update(row)


def table(rows):
    """Formats the rows so far as a table."""
    header = ["configuration", "parameters", "seconds", "peak memory", "note"]
    found = []
    for name, row in rows.items():
        cells, note = ["", "", ""], "did not start"
        if "parameters" in row:
            cells = [
                f"{row['parameters'] / 1e6:,.1f} M",
                f"{row['seconds']:.0f}",
                f"{row['memory'] / 1e9:.1f} GB",
            ]
            note = f"as {row['same']}" if "same" in row else ""
        if "needed" in row:
            needed = f"{row['needed'] / 1e9:.0f} GB"
            note = f"{note} only compiled: an update needs about {needed}".strip()
        found.append([f"`{name}`", *cells, note])
    title = (
        f"Batches of {BATCH_SIZE}, from the start of the process to the first update."
    )
    return f"{title}\n\n{markdown_table(header, found)}\n"
