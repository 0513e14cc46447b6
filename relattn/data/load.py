"""Loads data sets from a configuration: `load_data`, `load_images`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from relattn import spec
from relattn.data import streaming
from relattn.data.arrays import read_arrays
from relattn.data.augment import (
    AUGMENTATIONS,
    check_augmentation,
    make_erase,
    make_mix,
)
from relattn.data.base import DataSource
from relattn.data.canvas import PLACEMENTS, place_on_canvas
from relattn.data.csv_images import find_csv_images
from relattn.data.errors import reading_data
from relattn.data.folder import find_files
from relattn.data.huggingface import find_huggingface_images
from relattn.data.image_io import check_background
from relattn.data.image_list import (
    MEMORY_BYTES,
    WITHOUT_TEST,
    ImageList,
    Images,
    decode_list,
    read_list,
)
from relattn.data.images import (
    ImageData,
    channel_statistics,
    check_no_draw,
    draw_validation,
    split_validation,
)
from relattn.data.mnist_points import make_mnist_points
from relattn.data.moving_digits import make_moving_digits
from relattn.data.points import read_points
from relattn.data.preprocess import check_statistics, is_standardized
from relattn.data.registry import EMBEDDED_FOLDER, EMBEDDED_VERSION, SETS
from relattn.data.streaming import open_list, open_streamed
from relattn.data.text import load_text
from relattn.data.tfds import find_or_prepare, find_set, read_full, read_prepared
from relattn.data.user_images import interpolation, short_side
from relattn.files import expand
from relattn.messages import check_choice, closest, shorten

# The options of images with their defaults; ``name`` and ``image_size`` have none.
IMAGE_OPTIONS = {
    "source": "embedded",
    "data_dir": "",
    "manual_dir": "",
    "short_side": 0,
    "standardize": False,
    "augment": "none",
    "mix": "none",
    "erase": "none",
    "placement": "",
    "canvas": 84,
    "background": "white",
    "skip_unreadable": False,
    "num_validation": 0,
    "split_seed": 0,
    "num_workers": 0,
}

# Options of images without a default, or whose default depends on the images.
OTHER_IMAGE_OPTIONS = ("image_size", "mean", "std", "interpolation", "crop_pct")
_ALL_IMAGE_OPTIONS = ("name", *IMAGE_OPTIONS, *OTHER_IMAGE_OPTIONS)
_POINT_OPTIONS = ("source", "name", "data_dir", "num_validation", "split_seed")
_TEXT_OPTIONS = (
    "source",
    "name",
    "data_dir",
    "context_length",
    "tokenizer",
    "bpe_dir",
    "windows_per_epoch",
)
_VOLUME_OPTIONS = (
    "source",
    "standardize",
    "mix",
    "erase",
    "num_validation",
    "split_seed",
)
_PHOTOGRAPHS = "photographs that are read during training"


def image_options(
    name: str, image_size: int | tuple[int, int], **changes: Any
) -> ConfigDict:
    """Returns every option of an image set, for ``config.data``.

    Args:
        name: Name of the set.
        image_size: Side of the model's inputs, or their height and width.
        **changes: Values that differ from those of `IMAGE_OPTIONS`.

    Returns:
        An unlocked configuration.

    Raises:
        TypeError: If an option is unknown.

    Example:
        >>> image_options("mnist", 28, num_validation=500).augment
        'none'
    """
    for option in changes:
        if option not in IMAGE_OPTIONS:
            hint = closest(option, IMAGE_OPTIONS)
            raise TypeError(f"images have no option {option!r}: {hint}")
    return ConfigDict(
        {"name": name, "image_size": image_size, **IMAGE_OPTIONS, **changes}
    )


@reading_data()
def load_data(config: ConfigDict) -> DataSource:
    """Loads the data set that a configuration selects.

    Args:
        config: Options of the data. ``source`` is "embedded", "tfds", "folder", "csv",
            "hf" or "npz", with the options of `load_images`, "text", with those of
            `load_text`, or "moving_digits", volumes (`make_moving_digits`), with
            ``num_validation`` and ``split_seed``. Sets of points have these two as
            well: "mnist_points" (`make_mnist_points`), and "points", a file
            ``data_dir`` of arrays (`relattn.data.points.read_points`).
            Images also have

            - ``image_size``: side of the model's inputs, or ``(height, width)``, by
              default those of the images;
            - ``standardize``: whether to subtract the mean of each channel and divide
              by its standard deviation, those of the training images, or those of
              ``mean`` and ``std``, which have no default;
            - ``mix``: mixing of training images and labels, a spec of
              `relattn.data.augment.make_mix`, or "none", the default;
            - ``erase``: erasing of a part of each training image, after everything
              else: "random_erasing(probability=0.25)", or "none", the default.

            Photographs that are read during training (sets of "tfds" whose images
            differ in size, such as ``name="imagenet2012"``, and images of "folder",
            "csv" and "hf" that differ in size or take more than 1 GiB) also have

            - ``image_size``: side of the random crop in training and of the central
              crop in evaluation, by default 224;
            - ``short_side``: short side of an image before the central crop; 0, the
              default, is ``image_size`` / ``crop_pct``;
            - ``crop_pct``: fraction of the short side that is cropped, by default
              224 / 256;
            - ``interpolation``: filter of the resize, by default "bilinear";
            - ``augment``: augmentation of training images after random crop and flip:
              "randaugment(num_ops=2, magnitude=9)", or "none", the default;
            - ``num_workers``: number of processes that read; 0, the default, reads in
              one thread. With more, a script needs ``if __name__ == "__main__":``.

    Returns:
        The data.

    Raises:
        ValueError: If the source is unknown, or an option of the source is invalid or
            has no effect on the images.
        OSError: If a file cannot be read.
        DatasetNotPreparedError: If a set is not prepared; the message says how to
            prepare it.
    """
    source = config.get("source", "embedded")
    check_choice("data.source", source, LOADERS)
    # Fails before the set is prepared, which may take an hour.
    kind = "tokens" if source == "text" else "images"
    kind = "points" if source in ("points", "mnist_points") else kind
    make_mix(config.get("mix", "none"), kind)
    make_erase(config.get("erase", "none"), kind)
    data = LOADERS[source](config)
    if not isinstance(data, DataSource):
        raise ValueError(
            f"the loader of data.source={source!r} returned {type(data).__name__}: "
            "return a data set, such as ImageData.from_arrays(...), see "
            "relattn.data.DataSource"
        )
    return data


@reading_data()
def load_images(config: ConfigDict) -> ImageData:
    """Loads an image set into memory.

    Args:
        config: Options of the data:

            - ``name``: name of the set, for example "mnist"; your own images are by
              default named by their folder or file;
            - ``source``: "embedded" (the subsets that ship with the package, the
              default), "tfds" (full sets, prepared once), "folder"
              (``train/<class>/*.jpg``, and optionally ``validation`` and ``test``),
              "csv" (a table of files, see `relattn.data.csv_images.find_csv_images`),
              "hf" (a Hugging Face data set on disk) or "npz" (arrays, see
              `relattn.data.arrays.read_arrays`);
            - ``data_dir``: folder of the prepared sets ("" for TFDS's default), the
              image folder, or the file or folder of the other sources;
            - ``manual_dir``: folder of archives for preparation without download;
            - ``num_validation``: number of training images held out for validation, by
              default 0; must be 0 if the data have validation images of their own;
            - ``split_seed``: seed that selects them;
            - ``placement``: "static", "dynamic" or "dynamic_once" puts the images on a
              larger canvas, see `place_on_canvas`; "" does not;
            - ``canvas``: height and width of that canvas, in pixels;
            - ``augment``: augmentation of training images, "rotate(degrees=10)",
              "flip_crop(padding=4)" or "none";
            - ``background``: colour behind transparent pixels of image files, by
              default "white";
            - ``skip_unreadable``: whether to leave out image files that cannot be read,
              instead of raising.

            Only ``name`` is required.

    Returns:
        The images, in memory or memory-mapped.

    Raises:
        ValueError: If the name, source or augmentation is unknown, an option has no
            effect, the set is damaged, or ``num_validation`` leaves no training image.
        DatasetNotPreparedError: If the set is not prepared; the message says how to
            prepare it.
        FileNotFoundError: If the image folder is missing.
        OSError: If a file cannot be read.

    Example:
        >>> from ml_collections import ConfigDict
        >>> data = load_images(ConfigDict({"name": "mnist", "num_validation": 500}))
        >>> len(data.train), len(data.validation), len(data.test), data.image_shape
        (4500, 500, 1000, (28, 28, 1))
    """
    source = config.get("source", "embedded")
    check_choice("data.source", source, READERS)
    config = _with_name(config)
    _check_effect(config, in_memory=True)
    check_augmentation(config.get("augment", "none"))
    return _make_images(config, READERS[source](config))


def _make_images(config: ConfigDict, images: Images) -> ImageData:
    """Splits images in memory, and places them on a canvas if asked for."""
    train, test, class_names, origin, validation = images
    origin += WITHOUT_TEST * (test is None)
    num_validation = config.get("num_validation", 0)
    if validation is None:
        train, validation = split_validation(
            train, num_validation, config.get("split_seed", 0)
        )
    else:
        check_no_draw(num_validation)
    mean, std = channel_statistics(train.images)
    data = ImageData(
        config.name,
        train,
        validation,
        validation if test is None else test,
        class_names,
        mean,
        std,
        origin,
        augment=config.get("augment", "none"),
    )
    data = place_on_canvas(data, config) if config.get("placement", "") else data
    check_statistics(config, data.info)
    return data


def _with_name(config: ConfigDict) -> ConfigDict:
    """Names a user's own data by their folder or file, unless they have a name.

    If the name is that of a set of relattn, it comes from a recipe and is replaced.
    """
    data_dir = config.get("data_dir", "")
    own = data_dir and config.get("source", "embedded") in NEEDED
    if not own or config.get("name", "") not in ("", *SETS, *LOADERS):
        _check_name(config)
        return config
    path = Path(os.path.abspath(expand(data_dir, "data.data_dir")))
    name = path.name if path.is_dir() else path.stem
    return ConfigDict({**config, "name": name})


def _check_name(config: ConfigDict) -> None:
    if "name" not in config:
        raise ValueError(
            "config.data.name is missing: set it to the name of a data set"
        )


def _check_effect(config: ConfigDict, *, in_memory: bool) -> None:
    """Refuses options that would have no effect on images, before any is read."""
    _check_known(config, _ALL_IMAGE_OPTIONS)
    if placement := config.get("placement", ""):
        check_choice("data.placement", placement, PLACEMENTS)
    _check_standardized(config)
    source = config.get("source", "embedded")
    files = "a data.source of image files, such as 'folder'"
    needs = {
        "data_dir": (source != "embedded", "another data.source than 'embedded'"),
        "manual_dir": (source == "tfds", "data.source='tfds'"),
        "background": (source in LISTS, files),
        "skip_unreadable": (source in LISTS, files),
        "canvas": (config.get("placement", ""), "data.placement"),
        "short_side": (not in_memory, _PHOTOGRAPHS),
        "num_workers": (not in_memory, _PHOTOGRAPHS),
    }
    for option, (has_effect, need) in needs.items():
        if not has_effect:
            _check_unset(config, option, f"here, since it needs {need}")


def _check_unset(config: ConfigDict, option: str, why: str) -> None:
    """Refuses an option that has no effect, unless it is left at its default."""
    default = IMAGE_OPTIONS.get(option)
    value = config.get(option, default)
    if value != default:
        fix = "leave it out" if default is None else f"leave it at {default!r}"
        raise ValueError(f"data.{option}={shorten(value)} has no effect {why}: {fix}")


def _check_standardized(config: ConfigDict) -> None:
    """Refuses ``mean`` and ``std`` of images that are not standardised."""
    if not is_standardized(config):
        for option in ("mean", "std"):
            _check_unset(config, option, "here, since it needs data.standardize=True")


def _read_embedded(config: ConfigDict) -> Images:
    """Reads a subset that ships with the package."""
    names = [name for name, entry in SETS.items() if entry.embedded]
    if config.name in SETS.keys() - names:
        raise ValueError(
            f"data.name={config.name!r} does not ship with relattn: prepare it by "
            f"relattn prepare --name={config.name}, and set data.source='tfds' and "
            "data.data_dir"
        )
    check_choice("data.name", config.name, names, ' of the source "embedded"')
    folder = EMBEDDED_FOLDER / config.name / EMBEDDED_VERSION
    train, test, class_names = read_prepared(folder)
    origin = (
        f"the subset of {SETS[config.name].title} that ships with relattn "
        f"({len(train):,} training and {len(test):,} test images)"
    )
    return Images(train, test, class_names, origin)


def _read_tfds(config: ConfigDict) -> Images:
    """Reads a full set from TFDS, preparing it first if necessary."""
    data_dir = config.get("data_dir", "")
    if find_set(config.name, data_dir).streamed:
        raise ValueError(
            f"data.name={config.name!r} does not fit into memory: open it with "
            "`load_data` instead of `load_images`"
        )
    return read_full(config.name, data_dir, config.get("manual_dir", ""))


def _read_listed(config: ConfigDict) -> Images:
    """Reads images of one size that a folder, a table or a data set lists."""
    reading = _reading(config)
    return read_list(_list_images(config), **reading)


def _list_images(config: ConfigDict) -> ImageList:
    path = _path(config)
    if config.source == "csv":
        skip_missing = config.get("skip_unreadable", False)
        return find_csv_images(path, skip_missing=skip_missing)
    return find_huggingface_images(path) if config.source == "hf" else find_files(path)


def _path(config: ConfigDict) -> Path:
    """Returns the folder or file of the images."""
    if not config.get("data_dir", ""):
        raise ValueError(
            f"data.data_dir is empty: data.source={config.source!r} needs "
            f"{NEEDED[config.source]}"
        )
    return expand(config.data_dir, "data.data_dir")


def _reading(config: ConfigDict) -> dict[str, Any]:
    """Returns the options of decoding image files.

    Options of later steps are checked too, because decoding may take an hour.
    """
    background = config.get("background", "white")
    check_background(background)
    skip_unreadable = config.get("skip_unreadable", False)
    if skip_unreadable not in (True, False):
        # The text "False" would count as true.
        raise ValueError(
            f"data.skip_unreadable={shorten(skip_unreadable)} must be True or False"
        )
    spec.resolve(
        config.get("augment", "none"),
        {**AUGMENTATIONS, **streaming.AUGMENTATIONS},
        "data.augment",
        reserved=("images", "draws", "image", "rng"),
    )
    # Photographs have one side; images in memory may have two.
    if not isinstance(config.get("image_size", 0), list | tuple):
        short_side(config)
    interpolation(config)
    return {"background": background, "skip_unreadable": skip_unreadable}


def _load_listed(config: ConfigDict) -> DataSource:
    """Loads listed images, or opens photographs of any size for streaming."""
    config = _with_name(config)
    _check_effect(config, in_memory=False)
    reading = _reading(config)
    listed = _list_images(config)
    num_validation = config.get("num_validation", 0)
    if listed.validation:
        check_no_draw(num_validation)
    else:
        draw_validation(len(listed.train), num_validation, config.get("split_seed", 0))
    decoded = decode_list(listed, memory_bytes=MEMORY_BYTES, **reading)
    decoded.listed.warn()
    if decoded.images is None:
        return open_list(config, decoded.listed)
    _check_effect(config, in_memory=True)
    return _make_images(config, decoded.splits())


def _load_moving_digits(config: ConfigDict) -> DataSource:
    """Makes moving digits; refuses options that would have no effect."""
    _check_known(config, _ALL_IMAGE_OPTIONS)
    for option in IMAGE_OPTIONS:
        if option not in _VOLUME_OPTIONS:
            _check_unset(config, option, "on moving digits")
    _check_standardized(config)
    data = make_moving_digits(
        config.get("num_validation", 0), config.get("split_seed", 0)
    )
    check_statistics(config, data.info)
    return data


def _load_mnist_points(config: ConfigDict) -> DataSource:
    """Makes the sets of points of MNIST."""
    _check_known(config, _POINT_OPTIONS)
    if config.get("data_dir", ""):
        raise ValueError(
            f"data.data_dir={shorten(config.data_dir)} has no effect on the points of "
            "MNIST: set data.source='points' to read a file"
        )
    return make_mnist_points(
        config.get("num_validation", 0), config.get("split_seed", 0)
    )


def _load_points(config: ConfigDict) -> DataSource:
    """Reads a file of sets of points."""
    config = _with_name(config)
    _check_known(config, _POINT_OPTIONS)
    return read_points(
        _path(config),
        config.name,
        config.get("num_validation", 0),
        config.get("split_seed", 0),
    )


def _load_text(config: ConfigDict) -> DataSource:
    """Loads a text."""
    _check_known(config, _TEXT_OPTIONS)
    return load_text(config)


def _check_known(config: ConfigDict, known: Sequence[str]) -> None:
    """Refuses options that a source does not have; `load_data` checks two itself."""
    source = config.get("source", "embedded")
    for option in config:
        if option not in (*known, "mix", "erase"):
            raise ValueError(
                f"data.source={source!r} has no option data.{option}: "
                f"{closest(option, known)}"
            )


def _load_tfds(config: ConfigDict) -> DataSource:
    """Loads a full set into memory, or opens it for streaming if it is too large."""
    _check_name(config)
    data_dir = config.get("data_dir", "")
    entry = find_set(config.name, data_dir)
    if not entry.streamed:
        return load_images(config)
    _check_effect(config, in_memory=False)
    folder = find_or_prepare(config.name, data_dir, config.get("manual_dir", ""))
    return open_streamed(config, folder, entry)


def register_data(name: str, loader: Callable[[ConfigDict], DataSource]) -> None:
    """Registers data of your own as a ``config.data.source``.

    Args:
        name: A Python identifier that names no source of relattn. A second call with
            the same name replaces the first.
        loader: Loads the data from the options ``config.data``.

    Raises:
        ValueError: If relattn uses the name, it is not a Python identifier, or the
            loader is not a function.

    Example:
        >>> from ml_collections import ConfigDict
        >>> import numpy as np
        >>> def load_stripes(config):
        ...     images = np.zeros((7, 5, 5, 1), np.uint8)
        ...     return ImageData.from_arrays(
        ...         "stripes", images, np.arange(7) % 2, ("rows", "columns"),
        ...         num_validation=config.num_validation,
        ...     )
        >>> register_data("stripes", load_stripes)
        >>> config = ConfigDict({"source": "stripes", "num_validation": 3})
        >>> load_data(config).info.num_train
        4
    """
    if not callable(loader):
        raise ValueError(
            f"the loader of {shorten(name)} must be a function from the options "
            f"config.data to the data, got {shorten(loader)}"
        )
    spec.check_new_name(name, BUILT_IN)
    LOADERS[name] = loader


# What the data_dir of each source is. The sources in `LISTS` are read image by image.
NEEDED = {
    "folder": "the folder that holds train/<class>/*.jpg",
    "csv": "the CSV file with the columns path and label",
    "hf": "the folder that a Hugging Face data set was saved to",
    "npz": "the .npz file with the arrays train_images and train_labels",
    "points": "the .npz file with the arrays train_positions and train_labels",
}
LISTS = ("folder", "csv", "hf")
READERS = {
    "embedded": _read_embedded,
    "tfds": _read_tfds,
    **dict.fromkeys(LISTS, _read_listed),
    "npz": lambda config: read_arrays(_path(config)),
}
LOADERS: dict[str, Callable[[ConfigDict], DataSource]] = {
    **dict.fromkeys(READERS, load_images),
    "tfds": _load_tfds,
    **dict.fromkeys(LISTS, _load_listed),
    "text": _load_text,
    "moving_digits": _load_moving_digits,
    "points": _load_points,
    "mnist_points": _load_mnist_points,
}
# The entries above; users register others.
BUILT_IN = frozenset(LOADERS)
