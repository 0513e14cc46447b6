"""The Vision Transformers of Translution, tables 2 to 6, 10 and 11.

    python train.py --config=configs/translution_vit.py:DATA,SIZE,METHOD --workdir=DIR

trains METHOD (``self_attention``, ``lor_translution``, ``translution``) in the size
SIZE (``A/12``: ViT-A with patches of 12 pixels; A, B or C, and any patch that divides
the image) on DATA (``static`` or ``dynamic``: MNIST on a canvas of 84x84 pixels, and
evaluated on both; ``imagenet``), as in
``configs/translution_vit.py:dynamic,A/12,lor_translution``. The full data sets are
prepared once, by ``python -m relattn.data.prepare``.

METHOD may also be a baseline of table 4: ``no_position``, ``relative_key``,
``relative_value`` (both beside learned positions of the tokens, which the published
parameter counts have), ``relative_bias``, ``gated_positional``, ``rope`` (base 10,000).
Ablations are further arguments: ``rank=16``, ``base=False``, ``absolute=True``,
``relative=qk``, ``average=True``, ``position=learned``, and ``layers=3`` for a hybrid
with the method in its first three layers and softmax in the rest.

The argument ``cpu`` keeps the model and cuts the rest to a budget for two CPU cores:
of MNIST the images that ship with the package, 4,750 of them to train on, and 200 steps
of 32 images where they are static, 1,000 where they are dynamic, which take longer to
learn; evaluated five times. ``python -m studies
--preset=translution_table2_cpu`` measured, with one seed, on static and dynamic test
images: self-attention 88.9% and 14.4%, LoR-Translution 88.0% and 20.8%, Translution
88.1% and 16.9%; trained on dynamic ones, on dynamic ones, self-attention 22.6% and
LoR-Translution 31.7%.

A run of seconds on the embedded images, for a first look on a CPU:

    python train.py --config=configs/translution_vit.py:smoke --workdir=runs/smoke
"""

from ml_collections import ConfigDict

from relattn.models import SIZES
from relattn.models.variants import METHODS, method_options
from relattn.spec import read_arguments
from relattn.training import default_config

DATA = ("static", "dynamic", "imagenet")
EXAMPLES = [f"{letter}/{patch}" for letter in SIZES for patch in (7, 12, 16, 32, 56)]
OPTIONS = {
    "rank": int,
    "base": bool,
    "absolute": bool,
    "relative": str,
    "average": bool,
    "position": str,
    "layers": int,
}


def get_config(arguments: str = "") -> ConfigDict:
    """The recipe for data, a size and a method.

    Args:
        arguments: Any of data, a size, a method, options, and ``cpu`` or ``smoke``,
            separated by commas; by default ``static,A/12,lor_translution``.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument does not exist; names the closest.
    """
    chosen, options = read_arguments(
        arguments,
        "configs/translution_vit.py",
        {"data": DATA, "method": METHODS, "size": EXAMPLES, "cut": CUTS},
        patterns={"size": f"[{''.join(SIZES)}]/[0-9]+"},
        options=OPTIONS,
    )
    data = chosen.get("data", "static")
    letter, patch_size = chosen.get("size", "A/12").split("/")
    config = default_config()
    config.model = ConfigDict(
        {
            "name": "vit",
            **SIZES[letter],
            "patch_size": int(patch_size),
            "num_relative_layers": options.pop("layers", 0),
            **method_options(
                chosen.get("method", "lor_translution"), "images", **options
            ),
            "attention_dropout": 0.0,
            "dropout": 0.0,
            "dtype": "float32",
            "remat": False,
        }
    )
    config.data = ConfigDict(_imagenet() if data == "imagenet" else _mnist(data))
    config.batch_size = 256
    config.eval_batch_size = 256
    config.num_epochs = 300
    config.optimizer.update(name="adamw", learning_rate=3e-4, weight_decay=0.05)
    config.schedule.name = "cosine"
    if "cut" in chosen:
        CUTS[chosen["cut"]](config)
    return config.lock()


def _mnist(placement: str) -> dict:
    return {
        "name": "mnist",
        "source": "tfds",
        "data_dir": "",
        "manual_dir": "",
        "image_size": 84,
        "placement": placement,
        "canvas": 84,
        "standardize": False,
        "num_validation": 5000,
        "split_seed": 0,
    }


def _imagenet() -> dict:
    return {
        "name": "imagenet2012",
        "source": "tfds",
        "data_dir": "",
        "manual_dir": "",
        "image_size": 224,
        "augment": "randaugment(num_ops=2, magnitude=9)",
        "mix": "cutmix(alpha=1.0) | mixup(alpha=0.8)",
        "standardize": True,
        "num_validation": 10000,
        "num_workers": 8,
    }


def _fit_cpu(config: ConfigDict) -> None:
    """Cuts a recipe to a budget for two CPU cores; the model stays."""
    config.data = ConfigDict(_mnist(config.data.get("placement", "static")))
    config.data.update(source="embedded", num_validation=250)
    config.batch_size = 32
    config.eval_batch_size = 50
    config.num_epochs = 0
    config.num_steps = 1000 if config.data.placement == "dynamic" else 200
    config.eval_every_steps = config.num_steps // 5
    config.optimizer.update(learning_rate=1e-3, clip_norm=1.0)
    config.schedule.warmup_steps = 20


def _shrink(config: ConfigDict) -> None:
    """Turns a recipe into a run of seconds."""
    config.model.update(dim=24, num_layers=2, mlp_dim=48, num_heads=3, patch_size=12)
    config.data = ConfigDict(_mnist(config.data.get("placement", "static")))
    config.data.update(source="embedded", num_validation=500)
    config.optimizer.learning_rate = 3e-3
    config.batch_size = 32
    config.eval_batch_size = 100
    config.num_epochs = 0
    config.num_steps = 60


CUTS = {"cpu": _fit_cpu, "smoke": _shrink}
