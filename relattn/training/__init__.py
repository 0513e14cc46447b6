"""Training: the loop, its state and its checkpoints."""

from relattn.extras import require_train

require_train(__name__)

from relattn.training.config import check_config, default_config
from relattn.training.errors import (
    CheckpointError,
    NonFiniteLossError,
    PreemptedError,
    WorkdirError,
)
from relattn.training.loop import train_and_evaluate
from relattn.training.run import Run, evaluate, load_run, load_runs, make_predict_fn
from relattn.training.step import (
    TrainState,
    create_state,
    make_eval_step,
    make_train_step,
)

__all__ = [
    "CheckpointError",
    "NonFiniteLossError",
    "PreemptedError",
    "Run",
    "TrainState",
    "WorkdirError",
    "check_config",
    "create_state",
    "default_config",
    "evaluate",
    "load_run",
    "load_runs",
    "make_eval_step",
    "make_predict_fn",
    "make_train_step",
    "train_and_evaluate",
]
