"""Checks the ``config.json`` of a saved model, before anything is built of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from relattn import models
from relattn.json_files import DATA, Range, check_json, read_json
from relattn.messages import check_choice, shorten
from relattn.models import preprocessing, source_configs
from relattn.models.patches import patch_sides

# Above the sizes of models that exist.
_SIZE = Range(1, 2**24)
_SIDE = Range(1, 2**16)
_MAX_TOKENS = 2**16

MODEL = {
    "name": str,
    "dim?": Range(1, 2**17),
    "num_layers?": Range(1, 1000),
    "num_heads?": Range(1, 2**12),
    "mlp_dim?": (Range(1, 2**20), None),
    "patch_size?": (_SIDE, [_SIDE]),
    "*": (str, bool, int, float, None, [object]),
}
# The sizes that a model takes from its data, and the data, by the model's inputs.
_SIZES = {
    # Without a head, 0.
    "num_classes?": Range(0, 2**24),
    "image_shape?": ([_SIDE] * 3, [_SIDE] * 4),
    "point_shape?": [_SIDE] * 3,
    "vocab_size?": _SIZE,
    "context_length?": Range(1, 2**24),
}
# Pixels are divided by it.
_STD = [Range(1e-6, 1e6, float)]
_OPTIONS = {
    "background?": str,
    "image_size?": (Range(0, 2**16), [_SIDE] * 2),
    "placement?": str,
    "short_side?": Range(0, 2**16),
    "standardize?": bool,
    "mean?": [Range(-1e6, 1e6, float)],
    "std?": _STD,
    "interpolation?": str,
    "crop_pct?": Range(0.01, 1, float),
}
_SCHEMA = {
    "model": MODEL,
    **_SIZES,
    "data?": {"kind?": str},
    "training?": {
        "data": _OPTIONS,
        "seed?": Range(0, 2**32),
        "eval_draws?": Range(1, 2**16),
    },
    "preprocessing?": preprocessing.SCHEMA,
    # Only of a converted model: a run has them in its data.
    "class_names?": [str],
    "tokenizer?": str,
}


def read_saved_config(path: Path) -> dict[str, Any]:
    """Reads the ``config.json`` of a saved model.

    Args:
        path: The file.

    Returns:
        Its contents, with checked types and sizes.

    Raises:
        ValueError: If it describes no model; the message names the file.
    """
    config = read_json(path, dict)
    if "model" not in config:
        other = source_configs.describe_other(config)
        raise ValueError(f"{path} describes no model of relattn: {other}")
    check_json(config, _SCHEMA, path)
    try:
        options = models.complete_options(config["model"])
        kind = models.MODELS[options["name"]].inputs
        sizes = models.DATA_ARGUMENTS[kind]
        check_json(config, {size: _SIZES[f"{size}?"] for size in sizes}, "it")
        if "data" in config:
            _check_data(config, kind)
        if "preprocessing" in config:
            _check_preprocessing(config)
        if "class_names" in config:
            found, expected = len(config["class_names"]), config.get("num_classes", 0)
            if found != expected:
                raise ValueError(f"it has {found} class_names, expected {expected}")
        if "patch_size" in options:
            _check_patches(config["image_shape"], options["patch_size"])
    except ValueError as error:
        raise ValueError(f"{path} describes no model of relattn: {error}") from error
    return config


def _check_data(config: dict[str, Any], kind: str) -> None:
    data = config["data"]
    schema = DATA[kind] | ({"std": _STD} if kind == "images" else {})
    check_json(data, schema, "it", "data")
    if data.get("kind", "images") != kind:
        raise ValueError(f"it has data.kind={shorten(data['kind'])}, not {kind!r}")
    known = {name.removesuffix("?") for name in (*schema, "kind")}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"it has an unknown key in data, {shorten(unknown[0])}")
    if kind == "tokens":
        return
    counts = {"class_names": config["num_classes"]}
    if kind == "images":
        counts |= dict.fromkeys(("mean", "std"), data["image_shape"][-1])
    for key, count in counts.items():
        if len(data[key]) != count:
            raise ValueError(f"it has {len(data[key])} data.{key}, expected {count}")


def _check_preprocessing(config: dict[str, Any]) -> None:
    values, channels = config["preprocessing"], config["image_shape"][-1]
    for key in ("mean", "std"):
        if len(values[key]) != channels:
            raise ValueError(
                f"it has {len(values[key])} preprocessing.{key}, expected {channels}"
            )
    filters = preprocessing.INTERPOLATIONS
    check_choice("preprocessing.interpolation", values["interpolation"], filters)


def _check_patches(image_shape: list[int], patch_size: Any) -> None:
    """Refuses more patches than a model can see."""
    *size, _ = image_shape
    sides = zip(size, patch_sides(patch_size, len(size)), strict=True)
    patches = math.prod(side // patch for side, patch in sides)
    if patches > _MAX_TOKENS:
        raise ValueError(
            f"its image_shape={image_shape} are {patches:,} patches, and at most "
            f"{_MAX_TOKENS:,} are possible"
        )
