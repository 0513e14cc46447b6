"""The baselines of Horn et al., Translational Equivariance in Kernelizable Attention.

    python train.py --config=configs/baselines.py:MODEL,DATASET --workdir=DIR

MODEL: ``alexnet``, ``vgg16``, ``resnet18``, ``linformer`` or ``routing``. DATASET:
``mnist``, ``fashion_mnist`` or ``cifar10``, prepared once with ``relattn prepare``.
Example: ``configs/baselines.py:resnet18,cifar10``.

``modern``, the default, has our models for 32x32 images and the recipe of the
Performers (``configs/performer.py``). The paper's text states neither the sizes of its
baselines, other than their parameter counts, nor their recipes. ``published``, as in
``configs/baselines.py:resnet18,cifar10,published``, has those of the authors'
notebooks:

- AlexNet with three dropouts of 0.5, VGG-16 and ResNet-18 as in torchvision, ResNet-18
  with the stem for ImageNet: Adam(0.9, 0.999) with learning rate 2e-4, 20 epochs of
  batches of 32, no clipping.
- Linformer on patches of 32x32 pixels, hence on two tokens including CLS: dim 256, 12
  layers, 8 heads, k = 64; learning rate 3e-5, multiplied by 0.7 after each epoch, 20
  epochs of batches of 64. The notebook creates this schedule but never steps it; for a
  constant learning rate add
  ``--config.schedule.name=constant --config.schedule.decay_rate=1.0``.
- Routing Transformer: the authors published no code, so ``published`` equals
  ``modern``.

The notebooks test the model after the last epoch; here, as in all configurations, the
test accuracy is that of the epoch with the best validation accuracy. The notebook of
CIFAR-10 also defines horizontal flips, which are left out here.

Test accuracy (%) on Fashion-MNIST, ``published``, seed 0, on a CPU core each;
docs/results.md has the commands (``--preset=performer_table1``) and the accuracies
under shifts:

    alexnet 89.8, linformer 88.8 (20 epochs); resnet18 88.9 (2); vgg16 83.2 (1);
    routing 86.0 (1 epoch, on patches of 4x4 pixels)

``cpu`` reduces a recipe to two CPU cores as in ``configs/performer.py``, but keeps
convolutional networks unchanged; Linformer's k falls with the number of tokens, from
256 of 1,025 to 16 of 65.

A run of seconds on the embedded images (``vgg16`` and ``resnet18``: a minute or two):

    python train.py --config=configs/baselines.py:alexnet,smoke --workdir=runs/smoke
"""

from ml_collections import ConfigDict

from configs.performer import DATASETS, fit_cpu, recipe
from relattn.models.cnn import PUBLISHED_BASELINES
from relattn.spec import read_arguments

# Dropout of configs/performer.py.
PERFORMER_DROPOUT = {"attention_dropout": 0.1, "dropout": 0.1}
MODELS = {
    "alexnet": {"name": "alexnet"},
    "vgg16": {"name": "vgg16"},
    "resnet18": {"name": "resnet18"},
    "linformer": {"name": "linformer", **PERFORMER_DROPOUT},
    "routing": {"name": "routing", **PERFORMER_DROPOUT},
}


def get_config(arguments: str = "") -> ConfigDict:
    """Returns the recipe for a model and a data set.

    Args:
        arguments: Any of a model, a data set, ``modern`` or ``published``, and ``cpu``
            or ``smoke``, separated by commas; by default ``alexnet,mnist,modern``.

    Returns:
        The locked configuration.

    Raises:
        ValueError: If an argument is unknown; the message names the closest.
    """
    chosen, _ = read_arguments(
        arguments,
        "configs/baselines.py",
        {"model": MODELS, "dataset": DATASETS, "form": FORMS, "cut": CUTS},
    )
    name, dataset = chosen.get("model", "alexnet"), chosen.get("dataset", "mnist")
    if chosen.get("form") == "published" and name in PUBLISHED_BASELINES:
        config = _published(name, dataset)
    else:
        config = recipe(MODELS[name], dataset)
    if "cut" in chosen:
        CUTS[chosen["cut"]](config)
    return config.lock()


def _published(name: str, dataset: str) -> ConfigDict:
    """Returns the recipe of the authors' notebooks."""
    config = recipe(PUBLISHED_BASELINES[name], dataset)
    config.num_epochs = 20
    config.early_stopping_epochs = 0
    config.optimizer.update(learning_rate=2e-4, b2=0.999, clip_norm=0.0)
    config.batch_size = 32
    if name == "linformer":
        config.optimizer.learning_rate = 3e-5
        config.batch_size = 64
        config.schedule.update(name="exponential", decay_rate=0.7)
    return config


def _fit_cpu(config: ConfigDict) -> None:
    """Reduces a recipe to two CPU cores."""
    fit_cpu(config)
    if config.model.name == "linformer":
        config.model.attention = "linformer(k=16, sharing='key_value')"


def _shrink(config: ConfigDict) -> None:
    """Reduces a recipe to a run of seconds, or of a minute or two."""
    _fit_cpu(config)
    config.num_steps = 20
    config.eval_every_steps = 10


FORMS = ("modern", "published")
CUTS = {"cpu": _fit_cpu, "smoke": _shrink}
