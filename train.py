"""Trains a model.

python train.py --config=configs/X.py[:argument] --workdir=DIR [--config.a.b=value]

The same command goes on with a run that was interrupted.

The exit code is 0 at the end of training, 2 where a sentence says what to change, 75
(EX_TEMPFAIL) after SIGTERM and 130 after Ctrl-C, in the updates once a checkpoint is
written: the same command goes on.
"""

from collections.abc import Sequence

from relattn import command, training
from relattn.training.config import read_config
from relattn.training.distributed import initialize


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Trains as the options say.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python train.py", __doc__, overrides=True)
    add = parser.add_argument
    add("--config", required=True, help="what to train: configs/X.py[:argument]")
    add("--workdir", required=True, help="the run directory")
    add(
        "--distributed",
        action="store_true",
        help="several processes train together, as the cluster tells",
    )
    add("--coordinator", default="", help="HOST:PORT of process 0")
    add("--num_processes", type=int, default=0, help="how many there are")
    add("--process_id", type=int, default=-1, help="this one's number, from 0")
    add(
        "--heartbeat_seconds",
        type=int,
        default=100,
        help="after this long without a sign a process has died",
    )
    given = parser.parse_args(argv)
    config = read_config(given.config, given.overrides)
    by_hand = (given.coordinator, given.num_processes, given.process_id)
    if given.distributed or by_hand != ("", 0, -1):
        initialize(*by_hand, heartbeat_seconds=given.heartbeat_seconds)
    training.train_and_evaluate(config, given.workdir)


if __name__ == "__main__":
    main()
