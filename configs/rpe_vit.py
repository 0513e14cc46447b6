"""The Vision Transformers of Guoji, Improving efficient Vision Transformers with RPEs.

    python train.py --config=configs/rpe_vit.py:DATA,ATTENTION,POSITION --workdir=DIR

trains ATTENTION (``softmax``, ``favor``, ``relu``) with POSITION beside the learned one
(``none``, ``rope2d``, ``irpe_gate``, ``string_gate``) on DATA (``mnist``, ``cifar10``),
as in ``configs/rpe_vit.py:cifar10,relu,string_gate``. The full data sets are prepared
once, by ``python -m relattn.data.prepare``. Three seeds at once, in one run:

    --config.num_seeds=3

The paper states the sizes, the data, the batch and the epochs, but neither optimiser,
learning rate and dropout nor how large the head's hidden layer is. Here these are AdamW
and the cosine of Translution's Vision Transformers, a dropout of 0.1, and ``mlp_dim``.
Random features are drawn once, as nothing is said of a redraw. The seed is the paper's,
42.

The argument ``cpu`` keeps the model and cuts the rest to a budget for two CPU cores: of
MNIST the images that ship with the package, 4,750 of them to train on, and 300 steps of
32 images, evaluated every 60. ``python -m studies
--preset=rpe_vit_cpu --seeds=3`` measured test accuracies of 91.1 ± 1.6% with softmax,
91.2 to 93.0% with favor and 90.1 to 90.8% with relu.

A run of seconds on the embedded images, for a first look on a CPU:

    python train.py --config=configs/rpe_vit.py:smoke --workdir=runs/smoke
"""

from ml_collections import ConfigDict

from relattn.spec import read_arguments
from relattn.training import default_config

# Epochs and augmentation.
DATA = {
    "mnist": (20, "rotate(degrees=10)"),
    "cifar10": (100, "flip_crop(padding=4)"),
}
ATTENTIONS = ("softmax", "favor", "relu")
POSITIONS = ("none", "rope2d", "irpe_gate", "string_gate")


def get_config(arguments: str = "") -> ConfigDict:
    """The recipe for data, an attention and a position.

    Args:
        arguments: Any of data, an attention, a position, and ``cpu`` or ``smoke``,
            separated by commas; by default ``mnist,favor,rope2d``.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument does not exist; names the closest.
    """
    chosen, _ = read_arguments(
        arguments,
        "configs/rpe_vit.py",
        {
            "data": DATA,
            "attention": ATTENTIONS,
            "position": POSITIONS,
            "cut": CUTS,
        },
    )
    data, position = chosen.get("data", "mnist"), chosen.get("position", "rope2d")
    epochs, augment = DATA[data]
    config = default_config()
    config.seed = 42
    config.model = ConfigDict(
        {
            "name": "vit",
            "dim": 256,
            "num_layers": 6,
            "num_heads": 8,
            "mlp_dim": 512,
            "patch_size": 4,
            "attention": chosen.get("attention", "favor"),
            "position": "learned" if position == "none" else f"learned + {position}",
            "attention_dropout": 0.1,
            "dropout": 0.1,
            "qkv_bias": True,
            "embedding_norms": False,
            "head": "mlp",
            "dtype": "float32",
            "remat": False,
        }
    )
    config.data = ConfigDict(
        {
            "name": data,
            "source": "tfds",
            "data_dir": "",
            "manual_dir": "",
            "image_size": {"mnist": 28, "cifar10": 32}[data],
            "augment": augment,
            "standardize": True,
            "num_validation": 5000,
            "split_seed": 42,
        }
    )
    config.batch_size = 128
    config.eval_batch_size = 256
    config.num_epochs = epochs
    config.optimizer.update(name="adamw", learning_rate=3e-4, weight_decay=0.05)
    config.schedule.name = "cosine"
    if "cut" in chosen:
        CUTS[chosen["cut"]](config)
    return config.lock()


def _embed(config: ConfigDict, num_validation: int) -> None:
    """Takes the images that ship with the package, which are MNIST's."""
    config.data.update(
        name="mnist",
        source="embedded",
        image_size=28,
        augment=DATA["mnist"][1],
        num_validation=num_validation,
    )


def _fit_cpu(config: ConfigDict) -> None:
    """Cuts a recipe to a budget for two CPU cores; the model stays."""
    _embed(config, 250)
    config.batch_size = 32
    config.eval_batch_size = 50
    config.num_epochs = 0
    config.num_steps = 300
    config.eval_every_steps = 60
    config.optimizer.update(learning_rate=1e-3, clip_norm=1.0)
    config.schedule.warmup_steps = 30


def _shrink(config: ConfigDict) -> None:
    """Turns a recipe into a run of seconds."""
    _embed(config, 500)
    config.model.update(dim=32, num_layers=2, num_heads=2, mlp_dim=64)
    config.batch_size = 32
    config.eval_batch_size = 100
    config.num_epochs = 0
    config.num_steps = 100
    config.optimizer.learning_rate = 3e-3


CUTS = {"cpu": _fit_cpu, "smoke": _shrink}
