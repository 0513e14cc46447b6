"""Folders of runs, as training leaves them."""

import dataclasses
import json

from relattn.data import ImageInfo, TextInfo
from relattn.training.config import to_json
from relattn.training.config_file import read_config
from studies.launcher import Training

CONFIG = "configs/demo.py:banded"
IMAGES = ImageInfo("a set", ("0", "1"), (5, 3, 1), (0.1,), (0.2,), 200, "somewhere")
TEXT = TextInfo("a text", "bytes", 256, 7, 200, "somewhere")


def make_training(
    workdir,
    info=IMAGES,
    *,
    label="banded",
    config=CONFIG,
    seed=3,
    num_seeds=1,
    overrides=(),
    rows=(),
    **result,
):
    """Makes the folder of a complete run with given rows of metrics and result."""
    workdir.mkdir(exist_ok=True)
    training = Training(label, config, workdir, seed, num_seeds, overrides)
    values = to_json(read_config(config, training.options))
    start = {"device": "abacus", "platform": "wood", "num_devices": 2}
    start |= {"cpu": "beads", "cores": 10}
    start["versions"] = {"jax": "0.11"}
    record = {"config": values, "data": dataclasses.asdict(info), "starts": [start]}
    (workdir / "run.json").write_text(json.dumps(record))
    result = {
        "step": 60,
        "num_steps": 60,
        "epochs": 20.0,
        "stopped_early": False,
        "seconds": 7.0,
        "num_params": 2706154,
        "test_accuracy": 0.875,
        **result,
    }
    (workdir / "result.json").write_text(json.dumps(result))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (workdir / "metrics.jsonl").write_text(lines)
    return training
