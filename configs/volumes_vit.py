"""Small Vision Transformers on volumes: digits of MNIST that move, by direction.

    python train.py --config=configs/volumes_vit.py:METHOD --workdir=DIR

A volume has 8 frames of 28x28 pixels, made of the embedded MNIST; its class is the
direction of motion, one of eight. A patch of 2 frames of 7x7 pixels is a token, so the
grid has 4x4x4. METHOD is an attention with a position: ``learned``, ``relative_bias``,
``rope2d``, ``fourier_values``, ``lor_translution`` or ``translution``, all with
softmax, or ``sincos_bias``, with linear attention.

Recipe, all of it ours: 2 layers of dim 48 with 3 heads, 1,000 steps of 32 of the 4,500
training volumes, AdamW with learning rate 1e-3, cosine schedule, 50 warmup steps.

A run of seconds:

    python train.py --config=configs/volumes_vit.py:smoke --workdir=runs/smoke
"""

from ml_collections import ConfigDict

from relattn.data import image_options
from relattn.spec import read_arguments
from relattn.training import default_config

# Attention and position.
METHODS = {
    "learned": ("softmax", "learned"),
    "relative_bias": ("softmax", "relative_bias"),
    "rope2d": ("softmax", "rope2d"),
    "fourier_values": ("softmax", "fourier_values(num_frequencies=4)"),
    "sincos_bias": ("favor", "sincos_bias"),
    "lor_translution": ("lor_translution(rank=4)", "none"),
    "translution": ("translution", "none"),
}


def get_config(arguments: str = "") -> ConfigDict:
    """Returns the recipe of a method.

    Args:
        arguments: Name of a method, by default ``rope2d``, and ``smoke``, separated by
            commas.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument is unknown; the message names the closest.
    """
    chosen, _ = read_arguments(
        arguments, "configs/volumes_vit.py", {"method": METHODS, "cut": CUTS}
    )
    attention, position = METHODS[chosen.get("method", "rope2d")]
    config = default_config()
    config.model = ConfigDict(
        {
            "name": "vit",
            "dim": 48,
            "num_layers": 2,
            "num_heads": 3,
            "mlp_dim": 96,
            "patch_size": (2, 7, 7),
            "attention": attention,
            "position": position,
        }
    )
    config.data = image_options(
        name="moving_digits",
        source="moving_digits",
        image_size=28,
        standardize=True,
        num_validation=500,
    )
    config.batch_size = 32
    config.eval_batch_size = 250
    config.num_epochs = 0
    config.num_steps = 1000
    config.eval_every_steps = 250
    config.optimizer.update(name="adamw", learning_rate=1e-3, weight_decay=0.05)
    config.schedule.update(name="cosine", warmup_steps=50)
    if "cut" in chosen:
        CUTS[chosen["cut"]](config)
    return config.lock()


def _shrink(config: ConfigDict) -> None:
    """Reduces a recipe to a run of seconds."""
    config.model.update(dim=36, mlp_dim=48)
    config.num_steps = 60
    config.eval_every_steps = 0
    config.optimizer.learning_rate = 3e-3
    config.schedule.warmup_steps = 10


CUTS = {"smoke": _shrink}
