"""Models on the Hugging Face hub: ``hf:owner/name``, and what their cards must have."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from relattn.command import lacks_resources, one_line
from relattn.markdown import quote_yaml
from relattn.messages import shorten

PREFIX = "hf:"
_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# The licences that people choose most; the hub refuses names that it does not know.
LICENSES = {
    *("apache-2.0", "mit", "bsd", "bsd-2-clause", "bsd-3-clause", "isc", "zlib"),
    *("gpl", "gpl-2.0", "gpl-3.0", "lgpl-2.1", "lgpl-3.0", "agpl-3.0", "mpl-2.0"),
    *("cc", "cc0-1.0", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-sa-3.0"),
    *("cc-by-sa-4.0", "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nd-4.0"),
    *("cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0", "odc-by", "odbl"),
    *("openrail", "openrail++", "bigscience-openrail-m", "wtfpl", "unlicense"),
    *("afl-3.0", "artistic-2.0", "epl-2.0", "eupl-1.2", "ofl-1.1", "pddl"),
    *("unknown", "other"),
}


def is_hub_id(folder: Any) -> bool:
    """Returns whether a name is of a model on the hub, not of a folder.

    Args:
        folder: The argument of `relattn.load_pretrained`.

    Example:
        >>> is_hub_id("hf:owner/name"), is_hub_id("owner/name")
        (True, False)
    """
    return isinstance(folder, str) and folder.startswith(PREFIX)


def download(name: str, files: tuple[str, ...]) -> Path:
    """Returns the folder of a model of the hub, in the cache of `huggingface_hub`.

    Files that the cache has already are not downloaded again; without a network, those
    of the last download are used.

    Args:
        name: ``"hf:owner/name"``, or ``"hf:owner/name@revision"`` for a branch, a tag
            or a commit.
        files: Names of the files.

    Returns:
        The folder.

    Raises:
        ImportError: If `huggingface_hub` is not installed.
        ValueError: If the name is not of this form.
        FileNotFoundError: If the hub has no such model, or it is neither in the cache
            nor can be downloaded.

    Example:
        >>> download("hf:vit", ())
        Traceback (most recent call last):
        ValueError: 'hf:vit' is not a model on the hub: write hf:owner/name or \
hf:owner/name@revision
    """
    model, _, revision = name.removeprefix(PREFIX).partition("@")
    if not _ID.fullmatch(name.removeprefix(PREFIX)):
        raise ValueError(
            f"{shorten(name)} is not a model on the hub: write hf:owner/name or "
            "hf:owner/name@revision"
        )
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            f"{name} needs huggingface_hub: pip install 'relattn[hf]'"
        ) from error
    try:
        folder = hub.snapshot_download(
            model, revision=revision or None, allow_patterns=list(files)
        )
    except Exception as error:
        if lacks_resources(error):
            raise
        kind = type(error).__name__
        if kind == "LocalEntryNotFoundError":
            raise FileNotFoundError(
                f"{name} is not in the cache of huggingface_hub, and cannot be "
                "downloaded: connect to a network, or download it elsewhere and pass "
                "its folder"
            ) from error
        raise FileNotFoundError(
            f"{name} cannot be downloaded ({kind}: {one_line(error)}): check the name "
            "and, if the model is private, log in by `hf auth login`"
        ) from error
    return Path(folder)


def front_matter(config: dict[str, Any], license: str) -> list[str]:
    """Returns the lines with which the hub files a model: YAML between two rules.

    Args:
        config: The contents of ``config.json``.
        license: The licence of the weights. A name that the hub does not know becomes
            ``other`` with a ``license_name``, and ``"unspecified"`` becomes
            ``unknown``.

    Returns:
        The lines.

    Example:
        >>> front_matter({"vocab_size": 256}, "my licence")[2:6]
        ['license: other', 'license_name: "my licence"', \
'pipeline_tag: text-generation', 'tags:']
    """
    if license == "unspecified":
        names = ["license: unknown"]
    elif license.lower() in LICENSES:
        names = [f"license: {license.lower()}"]
    else:
        names = ["license: other", f"license_name: {quote_yaml(license)}"]
    return [
        "---",
        "library_name: relattn",
        *names,
        *_task(config),
        "tags:",
        "- jax",
        "- flax",
        "---",
    ]


def _task(config: dict[str, Any]) -> list[str]:
    """Returns the line of the model's task, or none if the hub has no such task."""
    if "vocab_size" in config:
        return ["pipeline_tag: text-generation"]
    if "image_shape" not in config:
        return []
    what = "image" if len(config["image_shape"]) == 3 else "video"
    return [f"pipeline_tag: {what}-classification"]
