"""Trains, kills the training by SIGKILL many times, and lets it finish.

``python -m tests.helpers.killed FOLDER`` trains once without kills, in ``whole``, and
once with kills, in ``parts``, and prints what happened as JSON. Every attempt is a
process forked from this one, which has imported everything and used no device.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
import zlib
from pathlib import Path

import numpy as np

from relattn import data as data_lib
from relattn import models, training
from relattn.training.checkpoint import checkpoint_steps
from relattn.training.task import Task
from tests.training.conftest import build_tiny, make_config, make_data

KILLS = 20
# Minimum number of kills during a checkpoint write.
TORN = 6
# An attempt stops after this number of updates and waits to be killed, so that the run
# is long enough on a fast machine.
UPDATES = 4
NUM_STEPS = 100


def train(workdir, notify=None, pause=None):
    """Trains in this process; logs the number and the checksum of every batch.

    Args:
        workdir: The run directory.
        notify: A pipe to which every update writes a byte.
        pause: The update after which training stops and waits.
    """
    config = make_config()
    config.num_steps = NUM_STEPS
    config.eval_every_steps = 17
    config.checkpoint_every_steps = 2
    config.log_every_steps = 3
    # Compiling the redraws would take most of an attempt.
    config.redraw_every = 0
    log = os.open(f"{workdir}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(log, b"start\n")
    load = Task.loader

    @contextlib.contextmanager
    def logging_loader(task, *args):
        with load(task, *args) as batches:
            yield logged(batches)

    def logged(batches):
        for step, batch in batches:
            checksum = zlib.crc32(np.asarray(batch["image"]).tobytes())
            os.write(log, f"{step + 1} {checksum}\n".encode())
            yield step, batch

    def on_step(done):
        if notify is not None:
            os.write(notify, b".")
            while done == pause:
                time.sleep(1)

    Task.loader = logging_loader
    models.build_model = build_tiny
    data_lib.load_data = lambda config: make_data()
    training.train_and_evaluate(config, workdir, on_step=on_step)


def fork(function, *args):
    """Runs a function in a new process; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def unfinished(checkpoints):
    """Finds unfinished checkpoints, also those of earlier kills, and their times."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for path in checkpoints.glob("*.orbax-checkpoint-tmp"):
            with contextlib.suppress(FileNotFoundError):
                found[path.name] = path.stat().st_ctime_ns
    return found


def latest(checkpoints):
    """Returns the step of the latest complete checkpoint, 0 without one."""
    return (checkpoint_steps(checkpoints) or [0])[-1]


def wait_until(condition):
    """Waits for a condition, but at most a second: it may have passed unseen."""
    end = time.monotonic() + 1.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)


def attempt(workdir, draw, aimed):
    """Resumes and kills; returns whether a checkpoint write was cut short."""
    checkpoints = workdir / "checkpoints"
    start = latest(checkpoints)
    before = unfinished(checkpoints)
    read, write = os.pipe()
    child = fork(train, workdir, write, start + UPDATES)
    os.close(write)
    # With zero updates the kill comes while the attempt restores and compiles.
    updates = draw.randint(1 if aimed else 0, UPDATES)
    for _ in range(updates):
        if not os.read(read, 1):
            raise RuntimeError("training ended before it was killed")
    if aimed:
        wait_until(lambda: unfinished(checkpoints) != before)
    elif updates > 1:
        # Kills need some progress between them.
        wait_until(lambda: latest(checkpoints) > start)
        time.sleep(draw.uniform(0, 0.05))
    else:
        time.sleep(draw.uniform(0, 0.5))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(read)
    if not os.WIFSIGNALED(status):
        raise RuntimeError("training ended before it was killed")
    after = unfinished(checkpoints)
    return any(before.get(name) != time for name, time in after.items())


def let_end(workdir):
    _, status = os.waitpid(fork(train, workdir), 0)
    if status:
        raise RuntimeError(f"training failed with {status}")


def main():
    folder = Path(sys.argv[1])
    draw = random.Random(0)
    # The first run fills the compilation cache for the others.
    let_end(folder / "whole")
    torn, resumed = [], []
    while len(torn) < KILLS or sum(torn) < TORN:
        workdir = folder / "parts"
        torn.append(attempt(workdir, draw, aimed=len(torn) % 2 == 0))
        resumed.append(latest(workdir / "checkpoints"))
    let_end(folder / "parts")
    print(json.dumps({"torn": torn, "resumed": resumed}))


if __name__ == "__main__":
    main()
