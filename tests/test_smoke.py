"""The smoke configurations train and evaluate on up to eight devices."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.smoke import CONFIGS

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("model, counts", [("tiny", [8]), ("configured", [1, 2, 4, 8])])
def test_smoke_configurations_run_on_simulated_devices(model, counts):
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.helpers.smoke",
            model,
            ",".join(map(str, counts)),
        ],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    runs = [json.loads(line) for line in process.stdout.splitlines()]
    assert [(run["config"], run["devices"]) for run in runs] == [
        (name, count) for name in CONFIGS for count in counts
    ]
    for run in runs:
        assert math.isfinite(run["test_loss"])
