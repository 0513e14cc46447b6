"""Trains a model.

python train.py --config=configs/X.py[:argument] --workdir=DIR [--config.a.b=value]

The same command resumes a run that was interrupted.

The exit code is 0 at the end of training, 2 after an error that the user can fix, 75
(EX_TEMPFAIL) after SIGTERM and 130 after Ctrl-C. During updates, a signal ends training
once a checkpoint is written.
"""

from collections.abc import Sequence

from relattn import command, training
from relattn.training.config import read_config
from relattn.training.distributed import initialize


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Parses the options and trains.

    Args:
        argv: Command-line arguments, by default the process's.
    """
    parser = command.Parser("python train.py", __doc__, overrides=True)
    add = parser.add_argument
    add("--config", required=True, help="the configuration: configs/X.py[:argument]")
    add("--workdir", required=True, help="the run directory")
    add(
        "--distributed",
        action="store_true",
        help="train with the processes that the cluster's environment describes",
    )
    add("--coordinator", default="", help="HOST:PORT of process 0")
    add("--num_processes", type=int, default=0, help="number of processes")
    add("--process_id", type=int, default=-1, help="index of this process, from 0")
    add(
        "--heartbeat_seconds",
        type=int,
        default=100,
        help="seconds without a sign of life until a process counts as dead",
    )
    given = parser.parse_args(argv)
    config = read_config(given.config, given.overrides)
    processes = (given.coordinator, given.num_processes, given.process_id)
    if given.distributed or processes != ("", 0, -1):
        initialize(*processes, heartbeat_seconds=given.heartbeat_seconds)
    training.train_and_evaluate(config, given.workdir)


if __name__ == "__main__":
    main()
