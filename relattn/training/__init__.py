"""Training: configuration, loop, checkpoints and trained runs."""

from relattn.extras import require_train

require_train(__name__)

from relattn.training.config import check_config as check_config
from relattn.training.config import default_config as default_config
from relattn.training.config_file import read_config as read_config
from relattn.training.errors import CheckpointError as CheckpointError
from relattn.training.errors import NonFiniteLossError as NonFiniteLossError
from relattn.training.errors import PreemptedError as PreemptedError
from relattn.training.errors import WorkdirError as WorkdirError
from relattn.training.linearize import imitate_softmax as imitate_softmax
from relattn.training.linearize import init_lora as init_lora
from relattn.training.linearize import merge_lora as merge_lora
from relattn.training.linearize import softmax_divergences as softmax_divergences
from relattn.training.linearize import swap_attention as swap_attention
from relattn.training.loop import train_and_evaluate as train_and_evaluate
from relattn.training.metrics import Metric as Metric
from relattn.training.metrics import register_metric as register_metric
from relattn.training.run import Run as Run
from relattn.training.run import evaluate as evaluate
from relattn.training.run import make_predict_fn as make_predict_fn
from relattn.training.saved_run import load_run as load_run
from relattn.training.saved_run import load_runs as load_runs
from relattn.training.step import TrainState as TrainState
from relattn.training.step import create_state as create_state
from relattn.training.step import make_eval_step as make_eval_step
from relattn.training.step import make_train_step as make_train_step
