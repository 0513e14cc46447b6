"""`load_data`: a data set from a configuration; `load_images`: one in memory."""

from ml_collections import ConfigDict

from relattn.data.augment import check_augmentation, make_mix
from relattn.data.base import DataSource
from relattn.data.canvas import place_on_canvas
from relattn.data.folder import read_folder
from relattn.data.images import (
    ImageData,
    ImageSplit,
    channel_statistics,
    split_validation,
)
from relattn.data.paths import expand, reading_data
from relattn.data.registry import EMBEDDED_FOLDER, EMBEDDED_VERSION, SETS, check_choice
from relattn.data.streaming import open_streamed
from relattn.data.text import load_text
from relattn.data.tfds import find_or_prepare, read_full, read_prepared

Source = tuple[ImageSplit, ImageSplit, tuple[str, ...], str]


@reading_data()
def load_data(config: ConfigDict) -> DataSource:
    """Loads the data that a configuration's ``source`` names.

    Args:
        config: with the keys of its source; "embedded", "tfds" and "folder" are those
            of `load_images`, "text" those of `load_text`. All images have ``mix``, a
            spec of `relattn.data.augment.make_mix`. Photographs that are read as
            training goes on (``name="imagenet2012"`` of "tfds") have these beside them:

            - ``image_size``: side of the random crop to train on and of the central
              crop to evaluate on, by default 224;
            - ``short_side``: that an image is resized to before the central crop; 0,
              the default, for 256 / 224 of ``image_size``;
            - ``augment``: of training images, after the random crop and flip:
              "randaugment(num_ops=2, magnitude=9)", or "none", the default;
            - ``num_workers``: processes that read; 0, the default, for one thread.

    Returns:
        The data.

    Raises:
        ValueError: the source is unknown, or as the source's loader says.
        OSError: a file cannot be read.
        DatasetNotPreparedError: a set is not there; the message says how to get it.
    """
    source = config.get("source", "embedded")
    check_choice("data.source", source, LOADERS)
    # Refused here, before an hour of preparation.
    make_mix(config.get("mix", "none"), "tokens" if source == "text" else "images")
    return LOADERS[source](config)


@reading_data()
def load_images(config: ConfigDict) -> ImageData:
    """Loads an image set into memory as a configuration says.

    Args:
        config: with the keys

            - ``name``: of the set, for instance "mnist";
            - ``source``: "embedded" (the subsets that ship with the package), "tfds"
              (full sets, prepared once) or "folder" (``train/<class>/*.jpg`` and
              ``test/<class>/*.jpg``);
            - ``data_dir``: of the prepared sets ("" for TFDS's default) or the image
              folder;
            - ``manual_dir``: archives that you already have, for preparation;
            - ``num_validation``, ``split_seed``: the training images set apart;
            - ``placement``, ``canvas``: "static" or "dynamic" puts the images on a
              larger canvas, see `place_on_canvas`; "" does not;
            - ``augment``: of training images, "rotate(degrees=10)",
              "flip_crop(padding=4)" or "none".

            All but ``name`` may be missing: an embedded set without validation images.

    Returns:
        The images, in memory or memory-mapped.

    Raises:
        ValueError: an unknown name, source or augmentation, a damaged set, or a
            `num_validation` that leaves no training image.
        DatasetNotPreparedError: the set is not there; the message says how to get it.
        FileNotFoundError: the image folder is not there.
        OSError: a file cannot be read.

    Example:
        >>> from ml_collections import ConfigDict
        >>> data = load_images(ConfigDict({"name": "mnist", "num_validation": 500}))
        >>> len(data.train), len(data.validation), len(data.test), data.image_shape
        (4500, 500, 1000, (28, 28, 1))
    """
    source, augment = config.get("source", "embedded"), config.get("augment", "none")
    check_choice("data.source", source, SOURCES)
    _check_name(config)
    check_augmentation(augment)
    train, test, class_names, origin = SOURCES[source](config)
    train, validation = split_validation(
        train, config.get("num_validation", 0), config.get("split_seed", 0)
    )
    mean, std = channel_statistics(train.images)
    data = ImageData(
        config.name,
        train,
        validation,
        test,
        class_names,
        mean,
        std,
        origin,
        augment=augment,
    )
    return place_on_canvas(data, config) if config.get("placement", "") else data


def _check_name(config: ConfigDict) -> None:
    if "name" not in config:
        raise ValueError("config.data.name is missing")


def load_embedded(config: ConfigDict) -> Source:
    """Reads a subset that ships with the package."""
    names = [name for name, entry in SETS.items() if entry.embedded]
    check_choice("data.name", config.name, names, ' of the source "embedded"')
    folder = EMBEDDED_FOLDER / config.name / EMBEDDED_VERSION
    train, test, class_names = read_prepared(folder)
    origin = (
        f"the subset of {SETS[config.name].title} that ships with relattn "
        f"({len(train):,} training and {len(test):,} test images)"
    )
    return train, test, class_names, origin


def load_tfds(config: ConfigDict) -> DataSource:
    """Loads a full set into memory, or opens one that is too large for it."""
    _check_name(config)
    check_choice("data.name", config.name, SETS)
    if not SETS[config.name].streamed:
        return load_images(config)
    folder = find_or_prepare(
        config.name, config.get("data_dir", ""), config.get("manual_dir", "")
    )
    return open_streamed(config, folder, SETS[config.name].test_split)


def load_full(config: ConfigDict) -> Source:
    """Reads a full set that TFDS prepared, or prepares it first."""
    check_choice("data.name", config.name, SETS)
    if SETS[config.name].streamed:
        raise ValueError(
            f"data.name={config.name!r} does not fit into memory: `load_data` opens "
            "it, `load_images` cannot."
        )
    return read_full(
        config.name, config.get("data_dir", ""), config.get("manual_dir", "")
    )


def load_folder(config: ConfigDict) -> Source:
    """Reads a folder of images."""
    if not config.get("data_dir", ""):
        raise ValueError(
            'data.data_dir is empty: data.source="folder" needs the folder that holds '
            "train/<class>/*.jpg and test/<class>/*.jpg."
        )
    return read_folder(expand(config.data_dir, "data.data_dir"))


SOURCES = {"embedded": load_embedded, "tfds": load_full, "folder": load_folder}
LOADERS = {**dict.fromkeys(SOURCES, load_images), "tfds": load_tfds, "text": load_text}
