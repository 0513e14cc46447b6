"""The Performers of Horn et al., Translational Equivariance in Kernelizable Attention.

    python train.py --config=configs/performer.py:DATASET,VARIANT --workdir=DIR

trains VARIANT (``none``, ``learnable_sincos``: absolute, ``constrained_sincos``:
strategy 1, ``banded``: strategy 2) on DATASET (``mnist``, ``fashion_mnist``,
``cifar10``), as in ``configs/performer.py:fashion_mnist,constrained_sincos``. The full
data sets are prepared once, by ``python -m relattn.data.prepare``.

The paper's learning rate is 5e-4; its published runs used another:

    --config.optimizer.learning_rate=5e-5

The argument ``cpu`` cuts a recipe to a budget for two CPU cores: tokens are patches of
4x4 pixels, images those of MNIST or Fashion-MNIST that ship with the package, 4,750 of
them to train on, and there are 200 steps of 32 images, evaluated every 50.
``python -m relattn.evaluation.study --preset=performer_table1_cpu --seeds=3`` measured
test accuracies on MNIST and Fashion-MNIST of 41.7 ± 4.3 and 60.7 ± 3.8% with ``none``,
72.3 ± 2.4 and 69.3 ± 4.3% with ``learnable_sincos``, 78.3 ± 1.2 and 67.5 ± 1.9% with
``constrained_sincos`` and 42.9 ± 2.5 and 61.0 ± 2.8% with ``banded``.

A run of seconds on the embedded images, for a first look on a CPU:

    python train.py --config=configs/performer.py:smoke --workdir=runs/smoke
"""

from typing import Any

from ml_collections import ConfigDict

from relattn.arguments import read_arguments
from relattn.training import default_config

DATASETS = ("mnist", "fashion_mnist", "cifar10")
VARIANTS = {
    "none": {"attention": "favor", "position": "none"},
    "learnable_sincos": {"attention": "favor", "position": "learnable_sincos"},
    "constrained_sincos": {
        "attention": "favor",
        "position": "constrained_sincos(num_scales=4)",
    },
    "banded": {"attention": "banded(clip=6)", "position": "none"},
}


def get_config(arguments: str = "") -> ConfigDict:
    """The recipe for a data set and a variant.

    Args:
        arguments: Any of a data set, a variant, and ``cpu`` or ``smoke``, separated by
            commas; by default ``mnist,constrained_sincos``.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument does not exist; names the closest.
    """
    chosen, _ = read_arguments(
        arguments,
        "configs/performer.py",
        {"dataset": DATASETS, "variant": VARIANTS, "cut": CUTS},
    )
    model = {
        "name": "performer",
        "dim": 256,
        "num_layers": 6,
        "heads": 8,
        "mlp_dim": 1024,
        "patch_size": 1,
        **VARIANTS[chosen.get("variant", "constrained_sincos")],
        "attention_dropout": 0.1,
        "dropout": 0.1,
        "dtype": "float32",
        "remat": False,
    }
    config = recipe(model, chosen.get("dataset", "mnist"))
    config.redraw_every = 1000
    if "cut" in chosen:
        CUTS[chosen["cut"]](config)
    return config.lock()


def recipe(model: dict[str, Any], dataset: str) -> ConfigDict:
    """The recipe of the paper for a model.

    Args:
        model: What ``config.model`` is.
        dataset: One of `DATASETS`.

    Returns:
        An unlocked configuration.
    """
    config = default_config()
    config.model = ConfigDict(model)
    config.data = ConfigDict(
        {
            "name": dataset,
            "source": "tfds",
            "data_dir": "",
            "manual_dir": "",
            "image_size": 32,
            "standardize": dataset == "cifar10",
            "num_validation": 5000,
            "split_seed": 0,
        }
    )
    config.batch_size = 22
    config.eval_batch_size = 100
    config.num_epochs = 200
    config.early_stopping_epochs = 20
    config.optimizer.update(
        name="adam", learning_rate=5e-4, b1=0.9, b2=0.98, clip_norm=0.5
    )
    return config


def fit_cpu(config: ConfigDict) -> None:
    """Cuts a recipe to a budget for two CPU cores; pixels are taken in patches.

    Args:
        config: Of `recipe`; changed in place.
    """
    if "patch_size" in config.model:
        config.model.patch_size = 4
    config.data.update(source="embedded", num_validation=250)
    config.batch_size = 32
    config.num_epochs = 0
    config.num_steps = 200
    config.eval_every_steps = 50
    config.early_stopping_epochs = 0


def _shrink(config: ConfigDict) -> None:
    """Turns a recipe into a run of seconds."""
    config.model.update(dim=32, num_layers=2, heads=2, mlp_dim=64, patch_size=4)
    config.data.update(source="embedded", num_validation=500)
    config.optimizer.learning_rate = 2e-3
    config.batch_size = 32
    config.num_epochs = 1
    config.redraw_every = 50
    config.early_stopping_epochs = 0


CUTS = {"cpu": fit_cpu, "smoke": _shrink}
