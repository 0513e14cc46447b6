"""Runs one of the processes that train a tiny model together, for test_processes.py.

``python -m tests.helpers.process REQUEST``: REQUEST is a JSON object with ``config``,
``workdir``, ``port``, ``num_processes``, ``process_id`` and ``pause_at``, the step
after which the process waits for a line on its standard input, or 0.
"""

import json
import sys

import chex

from relattn import data as data_lib
from relattn import models, training
from relattn.training.distributed import initialize
from tests.training.conftest import build_tiny, make_data

NUM_DEVICES = 4


def main(request):
    num_processes = request["num_processes"]
    chex.set_n_cpu_devices(NUM_DEVICES // num_processes)
    initialize(
        f"127.0.0.1:{request['port']}",
        num_processes,
        request["process_id"],
        heartbeat_seconds=10,
    )
    models.build_model = build_tiny
    data_lib.load_data = lambda config: make_data()
    config = training.default_config()
    config.update(request["config"])

    def on_step(step):
        print(f"step {step}", flush=True)
        if step == request["pause_at"]:
            sys.stdin.readline()

    training.train_and_evaluate(config, request["workdir"], on_step=on_step)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
