"""Registry of the image sets: their classes, splits and licences."""

from __future__ import annotations

import dataclasses
from pathlib import Path

EMBEDDED_FOLDER = Path(__file__).parent / "embedded"
EMBEDDED_VERSION = "1.0.0"


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Properties of an image set that are known before it is read.

    Attributes:
        title: Name in prose.
        test_split: TFDS split used as test images; "" for those of validation.
        validation_split: TFDS split used as validation images; "" to hold out training
            images.
        embedded: True if a subset ships with the package.
        class_names: Class names, where TFDS has numbers only.
        archive_prefix: Prefix of the archives that the set needs, where TFDS lists
            more.
        manual_archives: Archives that only the owners of the set distribute.
        streamed: True if the images differ in size and do not fit into memory.
        digest: `content_digest` of the full set; "" if unknown.
        licence: Licence and attribution of an embedded set.
        citation: BibTeX entry of an embedded set.
    """

    title: str
    test_split: str = "test"
    validation_split: str = ""
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
