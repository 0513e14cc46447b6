"""The image sets known by name: their classes, splits and terms of use."""

import dataclasses
import pathlib
from collections.abc import Collection

from relattn import spec

EMBEDDED_FOLDER = pathlib.Path(__file__).parent / "embedded"
EMBEDDED_VERSION = "1.0.0"


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """What is known of an image set before it is read.

    Attributes:
        title: its name in prose.
        test_split: the TFDS split used as test images.
        embedded: whether a subset of it ships with the package.
        class_names: where TFDS knows the classes by number only.
        archive_prefix: of the file names of its archives, among others of TFDS's set.
        manual_archives: those that nobody but its owners may hand out.
        streamed: whether its images differ in size and are too many for memory.
        digest: of the full set, see `content_digest`; "" where it is not known.
        licence: and attribution, for the embedded ones.
        citation: BibTeX, for the embedded ones.
    """

    title: str
    test_split: str = "test"
    embedded: bool = False
    class_names: tuple[str, ...] = ()
    archive_prefix: str = ""
    manual_archives: tuple[str, ...] = ()
    streamed: bool = False
    digest: str = ""
    licence: str = ""
    citation: str = ""


SETS = {
    "mnist": ImageSet(
        title="MNIST",
        embedded=True,
        class_names=tuple("0123456789"),
        digest="c76374e3064cfb4af38cb9138cd1e24f1311085d62cfa8b22774262aef3f4c64",
        licence="CC BY-SA 3.0, Yann LeCun, Corinna Cortes, Christopher J. C. Burges",
        citation="""@article{lecun2010mnist,
  title={MNIST handwritten digit database},
  author={LeCun, Yann and Cortes, Corinna and Burges, CJ},
  journal={ATT Labs [Online]. Available: http://yann.lecun.com/exdb/mnist},
  volume={2},
  year={2010}
}""",
    ),
    "fashion_mnist": ImageSet(
        title="Fashion-MNIST",
        embedded=True,
        class_names=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        digest="92896f6d7bdb656623636a2adaf6228fac50359acc7860ee754e8af905f40f7e",
        licence="MIT, Copyright (c) 2017 Zalando SE",
        citation="""@article{xiao2017fashion,
  title={Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning
         Algorithms},
  author={Xiao, Han and Rasul, Kashif and Vollgraf, Roland},
  journal={arXiv:1708.07747},
  year={2017}
}""",
    ),
    "cifar10": ImageSet(title="CIFAR-10"),
    "imagenet_resized/64x64": ImageSet(
        title="ImageNet 64x64", test_split="validation", archive_prefix="Imagenet64_"
    ),
    "imagenet2012": ImageSet(
        title="ImageNet-1K",
        test_split="validation",
        manual_archives=("ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"),
        streamed=True,
    ),
}


def check_choice(
    key: str, value: str, choices: Collection[str], where: str = ""
) -> None:
    """Raises unless a value is one of the known ones.

    Args:
        key: the name of the argument or configuration key.
        value: what was given.
        choices: the known values.
        where: they are known, for the message.

    Raises:
        ValueError: the value is unknown; the message names the closest.

    Example:
        >>> check_choice("data.source", "flder", ["folder"])
        Traceback (most recent call last):
        ValueError: unknown data.source 'flder': did you mean 'folder'? There are: \
folder
    """
    if value not in choices:
        shown, hint = spec.shorten(value), spec.closest(value, choices)
        raise ValueError(f"unknown {key} {shown}{where}: {hint}")
