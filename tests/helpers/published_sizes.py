"""Starts a configuration at its published size, on noise in place of its data.

``python -m tests.helpers.published_sizes CONFIG`` trains the real model until its
first update is logged, and prints the measurements as JSON; only the batch is smaller.
A model whose training does not fit into memory is compiled, not run.
test_published_sizes.py runs this program.
"""

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import jax
import numpy as np

from benchmarks.measure import peak_memory
from benchmarks.memory import measure
from relattn.data import ImageData, ImageSplit, load_data, load_text
from relattn.data.canvas import place_on_canvas
from relattn.data.images import channel_statistics
from relattn.data.registry import SETS
from relattn.data.text import FILES, write_tokens
from relattn.data.tokenizers import TOKENIZERS
from relattn.training import train_and_evaluate
from relattn.training.config_file import read_config
from relattn.training.cost import device_bytes, state_bytes
from relattn.training.mesh import MeshParallel
from relattn.training.metrics_log import read_rows
from relattn.training.task import Task

BATCH_SIZE = 2
# Height, width and channels as stored, and the number of classes.
STORED = {
    "mnist": ((28, 28, 1), 10),
    "fashion_mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "imagenet2012": ((224, 224, 3), 1000),
}
# The first update of 355 million parameters took 14.3 GB, 40 bytes per parameter: 2.5
# times what `state_bytes` counts. Some memory is left for the rest of the machine.
NEEDED, USABLE = 2.5, 0.85


class Started(Exception):
    """Raised once the first update is logged."""


def read(name):
    """Reads a configuration, with a small batch."""
    config = read_config(name)
    config.batch_size = BATCH_SIZE * config.accumulate_steps
    config.eval_batch_size = BATCH_SIZE
    config.log_every_steps = 1
    config.progress = False
    return config


def program(name):
    """Identifies the compiled program; data sets of the same shape share it."""
    config = read(name).to_dict()
    data = config["data"]
    stored = STORED.get(data.pop("name"))
    # Images are placed on the host.
    data.pop("placement", None)
    return json.dumps([config, stored], sort_keys=True)


def make_data(config, folder):
    """Makes noise with the shape, vocabulary and classes of a configuration's data."""
    rng, data = np.random.default_rng(0), config.data
    if data.source == "text":
        vocab_size = TOKENIZERS[data.tokenizer or "bytes"].vocab_size
        for part in ("train", "validation"):
            tokens = rng.integers(vocab_size, size=9 * data.context_length)
            write_tokens(folder / FILES[part], [tokens], vocab_size)
        data.data_dir = str(folder)
        return load_text(data)
    if data.source in ("mnist_points", "moving_digits"):
        # Made from images that ship with the package.
        return load_data(data)
    shape, num_classes = STORED[data.name]
    images = rng.integers(0, 256, (16, *shape), np.uint8)
    labels = rng.integers(num_classes, size=16, dtype=np.int32)
    split = ImageSplit(images, labels)
    names = tuple(map(str, range(num_classes)))
    statistics = channel_statistics(images)
    if SETS[data.name].streamed:
        # Photographs are augmented one by one, on the host.
        data.augment = "none"
    made = ImageData(
        data.name,
        split,
        split,
        split,
        names,
        *statistics,
        "noise",
        augment=data.get("augment", "none"),
    )
    return place_on_canvas(made, data) if data.get("placement", "") else made


def start(name):
    """Trains until the first update is logged, or compiles."""
    config = read(name)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        data = make_data(config, folder)
        task = Task.build(config, data.info)
        seen = {"parameters": task.num_params}
        needed = NEEDED * state_bytes(task.abstract_state)
        if needed > USABLE * device_bytes(jax.devices()[0]):
            measure(task, MeshParallel(jax.devices()[:1], model_axis=1))
            return {**seen, "needed": needed, **cost()}

        def on_step(done):
            if done == 1:
                seen.update(cost())
            else:
                raise Started

        try:
            train_and_evaluate(config, folder / "run", data=data, on_step=on_step)
        except Started:
            (row,) = read_rows(folder / "run" / "metrics.jsonl")
    return {**seen, "loss": row["train_loss"], "update": row["train_update_norm"]}


def cost():
    """Returns the time, and the peak memory of this process."""
    return {"time": time.time(), "memory": peak_memory(jax.devices()[0])}


if __name__ == "__main__":
    warnings.simplefilter("error")
    print(json.dumps(start(sys.argv[1])))
