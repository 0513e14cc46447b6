"""``kill -9`` at any moment loses only the updates after the last checkpoint."""

import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import pytest

from relattn.training.checkpoint import checkpoint_steps
from tests.helpers.interrupted import final_state, untimed, untimed_rows
from tests.helpers.killed import KILLS, NUM_STEPS, TORN

ROOT = Path(__file__).parents[2]


def read_log(path):
    """Reads the batches (step, checksum) of every attempt."""
    attempts = []
    for line in path.read_text().splitlines():
        if line == "start":
            attempts.append([])
        else:
            attempts[-1].append(tuple(map(int, line.split())))
    return attempts


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        # A separate cache: a kill may leave half an entry.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    process = subprocess.run(
        [sys.executable, "-m", "tests.helpers.killed", tmp_path],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    report = json.loads(process.stdout)
    assert len(report["torn"]) >= KILLS and sum(report["torn"]) >= TORN
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    chex.assert_trees_all_equal(final_state(parts), final_state(whole))
    results = [json.loads((run / "result.json").read_text()) for run in (parts, whole)]
    assert untimed(results[0]) == untimed(results[1])
    assert untimed_rows(parts) == untimed_rows(whole)
    steps = [checkpoint_steps(run / "checkpoints") for run in (parts, whole)]
    assert steps[0] == steps[1]
    (expected,) = read_log(tmp_path / "whole.log")
    assert [step for step, _ in expected] == list(range(1, NUM_STEPS + 1))
    attempts = read_log(tmp_path / "parts.log")
    # From the last complete checkpoint on, the batches equal those without kills.
    for start, batches in zip([0, *report["resumed"]], attempts, strict=True):
        assert batches == expected[start : start + len(batches)]
    assert attempts[-1] == expected[report["resumed"][-1] :]
    started = [batches[0][0] for batches in attempts if batches]
    assert started == sorted(started) and len(set(started)) > KILLS // 3
