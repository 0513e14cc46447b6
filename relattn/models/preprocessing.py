"""How a checkpoint's images are prepared: read from its files, kept in ``config.json``.

``preprocessing`` of ``config.json`` has ``resized``, the short side of an image before
its central part is cropped, or with ``squash`` both sides; ``interpolation``, that of
the resize; and ``mean`` and ``std`` of each channel for values in [0, 1]. With
``floor_crop``, the crop is rounded as by transformers, see
`relattn.data.image_transforms.resized_center_crop`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relattn.json_files import Range, check_json, read_json
from relattn.messages import check_choice, shorten
from relattn.models.source_configs import read_settings
from relattn.models.source_keys import (
    HF_OWN_PROCESSORS,
    HF_PROCESSOR,
    HF_PROCESSORS,
    Processor,
)

# Pillow's filters, by transformers' numbers.
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
PREPROCESSOR = "preprocessor_config.json"
# Has the contents of the other file as "image_processor".
_PROCESSOR = "processor_config.json"

_VALUE = Range(-1e6, 1e6, float)
_SIDE = Range(1, 2**16)
SCHEMA = {
    "resized": _SIDE,
    "squash": bool,
    "floor_crop?": bool,
    "interpolation": str,
    "mean": [_VALUE],
    # Pixels are divided by it.
    "std": [Range(1e-6, 1e6, float)],
}


def timm_preprocessing(
    settings: Mapping[str, Any], image_size: int
) -> dict[str, Any] | None:
    """Returns the preprocessing of timm's ``config.json``, or None if it has none.

    Args:
        settings: The file's contents, with ``pretrained_cfg`` or its keys.
        image_size: Side of the model's images.

    Raises:
        ValueError: If a value is not one of relattn's preprocessing.

    Example:
        >>> timm_preprocessing({"mean": [0.5], "std": [0.5], "crop_pct": 0.875}, 224)
        {'resized': 256, 'squash': False, 'interpolation': 'bicubic', 'mean': [0.5], \
'std': [0.5]}
    """
    given = {**(settings.get("pretrained_cfg") or {}), **settings}
    given = {key: value for key, value in given.items() if value is not None}
    if not {"mean", "std"} <= set(given):
        return None
    schema = {
        "mean": SCHEMA["mean"],
        "std": SCHEMA["std"],
        "crop_pct?": Range(0.01, 1, float),
        "crop_mode?": str,
        "interpolation?": str,
    }
    check_json(given, schema, "config.json")
    mode = given.get("crop_mode", "center")
    check_choice("crop_mode of config.json", mode, ("center", "squash"))
    return _checked(
        {
            "resized": math.floor(image_size / given.get("crop_pct", 0.875)),
            "squash": mode == "squash",
            "interpolation": given.get("interpolation", "bicubic"),
            "mean": given["mean"],
            "std": given["std"],
        },
        "config.json",
    )


def hf_preprocessing(
    folder: Path, image_size: int, source: str
) -> dict[str, Any] | None:
    """Returns the preprocessing of transformers' ``preprocessor_config.json``.

    If the images that the file describes are of another size than the model's, as those
    of DINOv2, they are scaled to the model's.

    Args:
        folder: The checkpoint's folder.
        image_size: Side of the model's images.
        source: The ``--source``, whose class prepares the images if the file names
            none.

    Returns:
        The preprocessing; None if there is neither such a file nor a
        ``processor_config.json`` with its contents.

    Raises:
        ValueError: If a value is not one of relattn's preprocessing.
    """
    given = _read_hf(folder)
    if given is None:
        return None
    _check_hf(given)
    processor = _hf_processor(given, source)
    needed = ["size", "resample", "image_mean", "image_std"]
    if given.get("do_center_crop", processor.crop):
        needed.append("crop_size")
    for key in needed:
        if key not in given:
            raise ValueError(
                f"{PREPROCESSOR} has no {key}, whose default depends on the class: add "
                "it, or remove the file to convert without it"
            )
    resized, squash = _hf_size(given, image_size, processor)
    return _checked(
        {
            "resized": resized,
            "squash": squash,
            "floor_crop": True,
            "interpolation": INTERPOLATIONS[given["resample"]],
            "mean": given["image_mean"],
            "std": given["image_std"],
        },
        PREPROCESSOR,
    )


def _read_hf(folder: Path) -> dict[str, Any] | None:
    """Reads the keys of transformers' preprocessor; None if there is no file."""
    path, whole = folder / PREPROCESSOR, folder / _PROCESSOR
    if path.exists():
        given = read_json(path, dict)
    elif whole.exists():
        schema = {"image_processor?": dict, "*": object}
        given = read_json(whole, schema).get("image_processor")
    else:
        return None
    if given is None:
        return None
    # For transformers, null is not the default of a step but leaves it out.
    given = {
        key: False if value is None and key.startswith("do_") else value
        for key, value in given.items()
    }
    return read_settings(given, HF_PROCESSOR, PREPROCESSOR, "preprocessing")


def _hf_processor(given: Mapping[str, Any], source: str) -> Processor:
    """Returns the class that prepares the images."""
    for key in ("image_processor_type", "feature_extractor_type"):
        if key in given:
            name = re.split("ImageProcessor|FeatureExtractor", given[key])[0]
            return HF_PROCESSORS[name]
    return HF_PROCESSORS[HF_OWN_PROCESSORS[source]]


def _check_hf(given: Mapping[str, Any]) -> None:
    """Raises ValueError if relattn's preprocessing lacks a value of the file."""
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if not given.get(key, True):
            raise ValueError(
                f"{PREPROCESSOR} has {key}={shorten(given[key])}, which relattn's "
                "preprocessing does not have: remove the file to convert without it"
            )
    schema = {
        "resample?": Range(0, len(INTERPOLATIONS) - 1),
        "image_mean?": SCHEMA["mean"],
        "image_std?": SCHEMA["std"],
        "rescale_factor?": Range(0, 1, float),
        "image_processor_type?": str,
        "feature_extractor_type?": str,
        "do_center_crop?": bool,
        "default_to_square?": bool,
        "crop_size?": (_SIDE, {"height": _SIDE, "width": _SIDE}),
    }
    check_json(given, schema, PREPROCESSOR)
    if not math.isclose(given.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-3):
        raise ValueError(
            f"{PREPROCESSOR} has rescale_factor={shorten(given['rescale_factor'])}, "
            "and relattn's preprocessing divides by 255: remove the file to convert "
            "without it"
        )


def _hf_size(
    given: Mapping[str, Any], image_size: int, processor: Processor
) -> tuple[int, bool]:
    """Returns the resized side, and whether images are squashed to a square."""
    size = given["size"]
    if type(size) is int:
        square = given.get("default_to_square", processor.square)
        sides = {"height": size, "width": size} if square else {"shortest_edge": size}
    else:
        sides = size if isinstance(size, dict) else {}
    values = list(sides.values())
    # Such as longest_edge, which limits the other side.
    known = set(sides) in ({"shortest_edge"}, {"height", "width"})
    resized = values[0] if known and values[0] == values[-1] else None
    squash = "shortest_edge" not in sides
    crop = None
    if given.get("do_center_crop", processor.crop):
        crop = given["crop_size"]
        if isinstance(crop, dict):
            if crop["height"] != crop["width"]:
                raise ValueError(
                    f"{PREPROCESSOR} has crop_size={shorten(crop)}, and relattn's "
                    "preprocessing crops squares: remove the file to convert without it"
                )
            crop = crop["height"]
    elif not squash:
        raise ValueError(
            f"{PREPROCESSOR} has size={shorten(size)} and crops nothing, so that "
            "images keep their shape, and relattn's preprocessing makes squares: "
            "remove the file to convert without it"
        )
    if type(resized) is not int or resized < (crop or 1):
        raise ValueError(
            f"{PREPROCESSOR} has size={shorten(size)}, expected one side of at "
            f"least {crop or 1} pixels: correct it, or remove the file"
        )
    return round(resized * image_size / (crop or resized)), squash


def write_timm_preprocessing(
    preprocessing: Mapping[str, Any], image_size: int
) -> dict[str, Any]:
    """Returns the keys of timm's ``pretrained_cfg``; see `timm_preprocessing`.

    Args:
        preprocessing: See the module.
        image_size: Side of the model's images.

    Example:
        >>> values = {"resized": 256, "squash": False, "interpolation": "bicubic",
        ...           "mean": [0.5], "std": [0.5]}
        >>> write_timm_preprocessing(values, 224)["crop_pct"]
        0.875
    """
    resized = preprocessing["resized"]
    crop_pct = image_size / resized
    if math.floor(image_size / crop_pct) != resized:
        # timm rounds the side down.
        crop_pct = image_size / (resized + 0.5)
    return {
        "mean": list(preprocessing["mean"]),
        "std": list(preprocessing["std"]),
        "interpolation": preprocessing["interpolation"],
        "crop_pct": crop_pct,
        "crop_mode": "squash" if preprocessing["squash"] else "center",
    }


def write_hf_preprocessing(
    preprocessing: Mapping[str, Any], image_size: int
) -> dict[str, Any]:
    """Returns transformers' ``preprocessor_config.json``; see `hf_preprocessing`.

    Args:
        preprocessing: See the module.
        image_size: Side of the model's images.

    Example:
        >>> values = {"resized": 256, "squash": False, "interpolation": "bicubic",
        ...           "mean": [0.5], "std": [0.5]}
        >>> write_hf_preprocessing(values, 224)["size"]
        {'shortest_edge': 256}
    """
    resized, squash = preprocessing["resized"], preprocessing["squash"]
    size = {"shortest_edge": resized}
    if squash:
        size = {"height": resized, "width": resized}
    return {
        # It resizes to a side and to a square, and crops.
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": size,
        "resample": INTERPOLATIONS.index(preprocessing["interpolation"]),
        "do_center_crop": not squash or resized != image_size,
        "crop_size": {"height": image_size, "width": image_size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocessing["mean"]),
        "image_std": list(preprocessing["std"]),
        "do_convert_rgb": len(preprocessing["mean"]) == 3,
    }


def _checked(preprocessing: dict[str, Any], where: str) -> dict[str, Any]:
    what = f"interpolation of {where}"
    check_choice(what, preprocessing["interpolation"], INTERPOLATIONS)
    return preprocessing


def with_channels(preprocessing: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Fits the statistics to another number of channels: their mean, repeated.

    Args:
        preprocessing: See the module.
        channels: The new number.

    Example:
        >>> with_channels({"mean": [0.25, 0.5, 0.75], "std": [0.5, 0.5, 0.5]}, 1)
        {'mean': [0.5], 'std': [0.5]}
    """
    changed = dict(preprocessing)
    for key in ("mean", "std"):
        if len(changed[key]) != channels:
            changed[key] = [sum(changed[key]) / len(changed[key])] * channels
    return changed
