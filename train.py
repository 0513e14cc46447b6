"""Trains a model.

python train.py --config=configs/X.py[:argument] --workdir=DIR [--config.a.b=value]

The same command goes on with a run that was interrupted.

The exit code is 0 at the end of training, 2 where a sentence says what to change, 75
(EX_TEMPFAIL) after SIGTERM and 130 after Ctrl-C, in the updates once a checkpoint is
written: the same command goes on.
"""

import signal
import sys
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from relattn import training
from relattn.training.distributed import initialize

EX_TEMPFAIL = 75
INTERRUPTED = 128 + signal.SIGINT

_CONFIG = config_flags.DEFINE_config_file("config", None, "What to train.")
_WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")
_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Several processes train together, as the cluster tells."
)
_COORDINATOR = flags.DEFINE_string("coordinator", "", "HOST:PORT of process 0.")
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", 0, "How many there are.")
_PROCESS_ID = flags.DEFINE_integer("process_id", -1, "This one's number, from 0.")
_HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_seconds", 100, "After this long without a sign a process has died."
)


def parse_flags(argv: list[str]) -> list[str]:
    """Parses the flags; a mistake in them ends in one sentence."""
    try:
        program, *rest = flags.FLAGS(argv)
        _CONFIG.value.keys()  # A file that is not there shows only now.
    except Exception as error:
        text = training.explain_flag_error(error)
        if text is None:
            raise
        refuse(text)
    if rest:
        refuse(f"unexpected argument {rest[0]!r}: options are --name=value")
    return [program]


def refuse(problem: str | Exception) -> NoReturn:
    """Ends with one sentence and the exit code 2."""
    print(f"train.py: {problem}", file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
    """Trains as the flags say."""
    del argv
    if not flags.FLAGS["verbosity"].present:
        # Orbax tells of every file it touches.
        logging.set_verbosity(logging.WARNING)
    try:
        by_hand = (_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        if _DISTRIBUTED.value or by_hand != ("", 0, -1):
            initialize(*by_hand, heartbeat_seconds=_HEARTBEAT.value)
        training.train_and_evaluate(_CONFIG.value, _WORKDIR.value)
    except training.PreemptedError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(INTERRUPTED if error.by_hand else EX_TEMPFAIL)
    except KeyboardInterrupt:
        print("train.py: interrupted: the same command goes on", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception as error:
        text = training.explain_out_of_memory(error)
        if text is None and not training.is_user_error(error):
            raise
        refuse(text or error)


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    app.run(main, flags_parser=parse_flags)
