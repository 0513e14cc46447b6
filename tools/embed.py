"""Writes the embedded subsets of MNIST and Fashion-MNIST, without TensorFlow.

    python -m tools.embed --source=DIR [--output=DIR]

The source DIR holds the four original archives of each set, in ``mnist/`` and
``fashion_mnist/``. The selection is a pure function of the archives: every run writes
the same images in the same order.
"""

import gzip
import io
import pathlib
import shutil
import struct
import tempfile
from collections.abc import Sequence

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Bool, Int, Real, UInt8
from PIL import Image

from relattn import command
from relattn.data.errors import describe_error
from relattn.data.registry import EMBEDDED_FOLDER, EMBEDDED_VERSION, SETS
from relattn.files import check_folder

SELECTION_SEED = 2021
NUM_TRAIN = 5000
NUM_TEST = 1000
MAX_SHIFT = 8
MOVABLE_CLASS = 1
# Number of movable images among the 100 test images of class 1. In the original test
# sets, 854 of 1,135 digits "1" and 791 of 1,000 trousers are movable.
NUM_MOVABLE = {"mnist": 100, "fashion_mnist": 90}
ARCHIVES = {"train": "train", "test": "t10k"}


def read_archive(folder: pathlib.Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Reads a split from the original archives.

    Args:
        folder: Folder of ``train-images-idx3-ubyte.gz`` and the other three archives.
        split: "train" or "test".

    Returns:
        uint8 images [n, 28, 28] and int64 labels [n].

    Raises:
        FileNotFoundError: If an archive is missing.
        ValueError: If an archive is damaged.
    """
    arrays = []
    for kind in ("images-idx3", "labels-idx1"):
        path = folder / f"{ARCHIVES[split]}-{kind}-ubyte.gz"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: --source must hold the original archives in "
                "mnist/ and fashion_mnist/."
            )
        try:
            content = gzip.decompress(path.read_bytes())
            ndim = content[3]
            shape = struct.unpack_from(f">{ndim}I", content, 4)
            array = np.frombuffer(content, np.uint8, offset=4 + 4 * ndim)
            arrays.append(array.reshape(shape))
        except Exception as error:
            raise ValueError(
                f"{path} is damaged ({describe_error(error)}): download it again."
            ) from error
    return arrays[0], arrays[1].astype(np.int64)


def movable(
    images: Real[np.ndarray, "n height width"], max_shift: int
) -> Bool[np.ndarray, " n"]:
    """Finds the images that keep every non-zero pixel when shifted along x, both ways.

    The `max_shift` outermost columns on both sides must be empty. An image that can
    move 8 pixels at 28x28 can also do so at 32x32, where the margins are wider.

    Args:
        images: [n, height, width].
        max_shift: Number of pixels to the left and to the right.

    Returns:
        [n], True for an image that can move.

    Example:
        >>> images = np.zeros((2, 3, 5), np.uint8)
        >>> images[0, 1, 2] = images[1, 1, 1] = 255
        >>> movable(images, 2)
        array([ True, False])
    """
    columns = images.any(axis=1)
    return ~(columns[:, :max_shift] | columns[:, -max_shift:]).any(axis=1)


def select(
    labels: Int[np.ndarray, " n"],
    count: int,
    seed: list[int],
    preferred: Bool[np.ndarray, " n"] | None = None,
    num_preferred: int = 0,
) -> Int[np.ndarray, " count"]:
    """Draws `count` indices, class-balanced: class sizes differ by at most one.

    Args:
        labels: [n], 0 .. classes - 1.
        count: Number of indices to draw.
        seed: Seed of NumPy's generator.
        preferred: [n], True for the images from which `num_preferred` are drawn first,
            in each class that has any.
        num_preferred: Number of preferred images; more are drawn only if the others run
            out.

    Returns:
        [count], in random order.
    """
    rng = np.random.default_rng(seed)
    num_classes = int(labels.max()) + 1
    chosen = []
    for label in range(num_classes):
        quota = count // num_classes + (label < count % num_classes)
        candidates = rng.permutation(np.flatnonzero(labels == label))
        if preferred is not None and preferred[candidates].any():
            wanted = preferred[candidates]
            first = candidates[wanted][:num_preferred]
            rest = candidates[~wanted][: quota - len(first)]
            more = candidates[wanted][num_preferred:]
            candidates = np.concatenate([first, rest, more])
        chosen.append(candidates[:quota])
    return rng.permutation(np.concatenate(chosen))


def select_subset(
    name: str, split: str, images: np.ndarray, labels: np.ndarray
) -> np.ndarray:
    """Returns the indices of the embedded images within a split of the original set."""
    seed = [SELECTION_SEED, list(SETS).index(name), list(ARCHIVES).index(split)]
    if split == "train":
        return select(labels, NUM_TRAIN, seed)
    preferred = movable(images, MAX_SHIFT) & (labels == MOVABLE_CLASS)
    return select(labels, NUM_TEST, seed, preferred, NUM_MOVABLE[name])


def encode_png(image: UInt8[np.ndarray, "height width"]) -> io.BytesIO:
    """Encodes an image as a PNG file in memory, with Pillow's best compression."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    buffer.seek(0)
    return buffer


def _write_subset(
    name: str, source: pathlib.Path, output: pathlib.Path
) -> pathlib.Path:
    """Writes one embedded subset in TFDS's array_record format.

    ``source`` holds ``<name>/`` with the original archives.
    """
    entry = SETS[name]
    archives = {split: read_archive(source / name, split) for split in ARCHIVES}

    class Subset(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        # For a module in a package, TFDS would search it with importlib_resources.
        __module__ = "embed"
        VERSION = tfds.core.Version(EMBEDDED_VERSION)
        # TFDS cannot infer this for a class outside of TFDS.
        pkg_dir_path = pathlib.Path(__file__).parent

        def _info(self) -> tfds.core.DatasetInfo:
            return tfds.core.DatasetInfo(
                builder=self,
                description=(
                    f"{NUM_TRAIN} training and {NUM_TEST} test images of {entry.title},"
                    " class-balanced, drawn with a fixed seed."
                ),
                features=tfds.features.FeaturesDict(
                    {
                        "image": tfds.features.Image(
                            shape=(28, 28, 1), encoding_format="png"
                        ),
                        "label": tfds.features.ClassLabel(names=entry.class_names),
                    }
                ),
                supervised_keys=("image", "label"),
                license=entry.licence,
                citation=entry.citation,
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(split) for split in ARCHIVES}

        def _generate_examples(self, split):
            images, labels = archives[split]
            for position, index in enumerate(
                select_subset(name, split, images, labels)
            ):
                yield (
                    position,
                    {
                        "image": encode_png(images[index]),
                        "label": int(labels[index]),
                    },
                )

    Subset.name = name
    with tempfile.TemporaryDirectory() as scratch:
        builder = Subset(data_dir=scratch, file_format="array_record")
        builder.download_and_prepare()
        written = pathlib.Path(scratch) / name / EMBEDDED_VERSION
        target = output / name / EMBEDDED_VERSION
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(written, target)
    return target


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Writes both embedded subsets."""
    parser = command.Parser("python -m tools.embed", __doc__)
    add = parser.add_argument
    add("--source", type=pathlib.Path, required=True, help="folder of the archives")
    add("--output", default=EMBEDDED_FOLDER, help="output folder")
    options = parser.parse_args(argv)
    output = check_folder(options.output, "--output")
    for name in NUM_MOVABLE:
        folder = _write_subset(name, options.source, output)
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{folder}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
