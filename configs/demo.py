"""Small Performers on the embedded Fashion-MNIST, minutes on one CPU core.

    python train.py --config=configs/demo.py:VARIANT --workdir=DIR

VARIANT: ``none``, ``learnable_sincos`` (absolute), ``sincos_bias`` (strategy 1 as an
exact bias of the offset), ``constrained_sincos`` (strategy 1 within the random
features) or ``banded`` (strategy 2), as in ``configs/performer.py``; or ``invariant``,
``invariant_softmax``, ``invariant_banded`` or ``invariant_lor_translution``, which give
the same answer for every circular shift of an image: a torus of overlapping patches
with a polyphase anchor. Test accuracies, also under shifts, are in docs/results.md:
those of ``python -m studies --preset=invariant_shift``.

``constrained_sincos`` is invariant on average over draws of the random features. Here
one draw is frozen, and a model learns from it where a patch is. Such a run needs
redraws (``redraw_every``) and the many more epochs in which it recovers from them, or
``sincos_bias``, which has the same score for every draw.

Recipe: 20 epochs of batches of 64, AdamW with learning rate 2e-3, cosine schedule with
50 warmup steps, clipping at 0.5, no redraw. The parameters after the last step count:
on 250 validation images, chance would choose the best of 20 evaluations.

``quick``, as in ``configs/demo.py:sincos_bias,quick``, is the recipe of ``make demo``,
which trains ``learnable_sincos``, ``sincos_bias`` and ``invariant`` within minutes: 6
epochs without dropout on images of 16x16 pixels. Its patches are one pixel wide and
overlap, so that every shift along x is one by whole patches.
"""

from ml_collections import ConfigDict

from configs import performer
from relattn.data import image_options
from relattn.spec import read_arguments
from relattn.training import default_config

VARIANTS = performer.VARIANTS | {
    "sincos_bias": {"attention": "favor", "position": "sincos_bias"},
    "invariant_softmax": {
        "attention": "softmax",
        "position": "relative_bias",
        **performer.INVARIANT,
    },
    "invariant_banded": {
        "attention": "banded(clip=6)",
        "position": "none",
        **performer.INVARIANT,
    },
    "invariant_lor_translution": {
        "attention": "lor_translution(rank=8)",
        "position": "none",
        **performer.INVARIANT,
    },
}


def get_config(arguments: str = "sincos_bias") -> ConfigDict:
    """Returns the recipe of the demo.

    Args:
        arguments: Name of a variant, by default ``sincos_bias``, and ``quick`` for the
            recipe of ``make demo``, separated by a comma.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument is unknown; the message names the closest.
    """
    chosen, _ = read_arguments(
        arguments, "configs/demo.py", {"variant": VARIANTS, "form": ("quick",)}
    )
    variant = VARIANTS[chosen.get("variant", "sincos_bias")]
    config = default_config()
    config.model = ConfigDict(
        {
            "name": "performer",
            "dim": 64,
            "num_layers": 2,
            "num_heads": 4,
            "mlp_dim": 256,
            # Two pixels wide: an even shift along x shifts whole tokens.
            "patch_size": (4, 2),
            **variant,
            "attention_dropout": 0.1,
            "dropout": 0.1,
        }
    )
    config.data = image_options(name="fashion_mnist", image_size=32, num_validation=250)
    config.batch_size = 64
    config.num_epochs = 20
    # Recovering from a redraw would take more epochs than this short run has.
    config.redraw_every = 0
    config.optimizer.update(name="adamw", learning_rate=2e-3, clip_norm=0.5)
    config.schedule.update(name="cosine", warmup_steps=50)
    if "form" in chosen:
        config.model.update(
            num_heads=2,
            mlp_dim=128,
            patch_size=2 if "periodic" in variant else (4, 1),
            patch_overlap=2,
            attention_dropout=0.0,
            dropout=0.0,
        )
        config.data.image_size = 16
        config.num_epochs = 6
    config.eval_every_epochs = config.num_epochs
    return config.lock()
