"""Small Performers on the pixels of Fashion-MNIST at 16x16, minutes on two CPU cores.

    python train.py --config=configs/performer_pixels16.py:VARIANT --workdir=DIR

VARIANT: ``none``, ``learnable_sincos`` (absolute), ``constrained_sincos`` (strategy 1)
or ``banded`` (strategy 2), as in ``configs/performer.py``; ``sincos_bias`` and
``softmax``, strategy 1 as an exact bias of the offset and with softmax attention; or
``invariant``, a bias of the offset on a torus, which is the same for every circular
shift. Every pixel is a token, so that every shift of an image is one by whole tokens.

``redraw=20``, as in ``configs/performer_pixels16.py:constrained_sincos,redraw=20``,
draws the random features every 20 steps; by default they are drawn once. ``cosine``
lets the learning rate decay to zero; by default it is constant. ``torus`` makes the
image a torus, on which a circular shift moves all tokens; a variant with an absolute
position refuses it.

Recipe, all of it ours: 2 layers of dim 64 with 4 heads, no dropout, 2,990 steps of 16
of the 55,000 training images, Adam with learning rate 1e-3, 100 warmup steps, clipping
at 0.5. The parameters after the last step count. It comes 10 steps before a redraw with
intervals of 20, 100 and 1,000, so that the model has adapted to the draw with which it
is evaluated; with ``redraw=1`` it has never seen that draw. The set is prepared once
with ``relattn prepare --name=fashion_mnist``.

``python -m studies --preset=performer_pixels16`` trains them and measures what the
interval of redraws does to consistency under shifts; ``--preset=performer_torus16``
does so on the torus.
"""

from ml_collections import ConfigDict

from configs import performer
from relattn.data import image_options
from relattn.spec import read_arguments
from relattn.training import default_config

STRATEGY_1 = performer.VARIANTS["constrained_sincos"]["position"]
VARIANTS = {
    name: performer.VARIANTS[name]
    for name in ("none", "learnable_sincos", "constrained_sincos", "banded")
} | {
    "softmax": {"attention": "softmax", "position": STRATEGY_1},
    "sincos_bias": {"attention": "favor", "position": "sincos_bias"},
    "invariant": {
        "attention": "favor",
        "position": "relative_bias",
        "periodic": True,
    },
}
SCHEDULES = ("constant", "cosine")
NUM_STEPS = 2990


def get_config(arguments: str = "constrained_sincos") -> ConfigDict:
    """Returns the recipe of a variant.

    Args:
        arguments: Name of a variant, by default ``constrained_sincos``; ``constant`` or
            ``cosine``; ``torus``; and ``redraw=...``, separated by commas.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument is unknown; the message names the closest.
    """
    chosen, options = read_arguments(
        arguments,
        "configs/performer_pixels16.py",
        {"variant": VARIANTS, "schedule": SCHEDULES, "grid": ("torus",)},
        options={"redraw": int},
    )
    config = default_config()
    config.model = ConfigDict(
        {
            "name": "performer",
            "dim": 64,
            "num_layers": 2,
            "num_heads": 4,
            "mlp_dim": 128,
            **VARIANTS[chosen.get("variant", "constrained_sincos")],
        }
    )
    if "grid" in chosen:
        config.model.periodic = True
    config.data = image_options(
        name="fashion_mnist", source="tfds", image_size=16, num_validation=5000
    )
    config.batch_size = 16
    config.eval_batch_size = 250
    config.num_epochs = 0
    config.num_steps = NUM_STEPS
    config.eval_every_steps = NUM_STEPS
    config.checkpoint_every_steps = 250
    config.redraw_every = options.get("redraw", 0)
    config.optimizer.update(name="adam", learning_rate=1e-3, clip_norm=0.5)
    config.schedule.update(name=chosen.get("schedule", "constant"), warmup_steps=100)
    return config.lock()
