"""Reads a configuration file, and overrides its keys by options."""

from __future__ import annotations

import ast
import re
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from relattn.command import lacks_resources, one_line
from relattn.messages import closest, shorten
from relattn.training.config import complete_model, default_config, given_keys
from relattn.training.initialize import take_model
from relattn.training.overrides import override, typed_keys

_MODULE = "relattn_config"
_HINT = "--config names a file with get_config(), such as configs/demo.py"

# Lengths that replace each other: that of the command line replaces the recipe's.
REPLACED = {
    "num_steps": "num_epochs",
    "num_epochs": "num_steps",
    "eval_every_epochs": "eval_every_steps",
}


def read_config(
    config: str | Path, options: Sequence[str] = (), workdir: str | Path = ""
) -> ConfigDict:
    """Calls ``get_config`` of a file and overrides keys of the result.

    Args:
        config: ``configs/NAME.py``, or ``NAME`` for a configuration of the package;
            optionally with ``:`` and an argument.
        options: Overrides such as ``--config.key=value``.
        workdir: The directory of the run, which may resume; "" for none.

    Returns:
        The configuration, locked, with every option of its model. With
        ``--config.init_from``, the model is the saved one, with the overridden
        options.

    Raises:
        ValueError: If the file cannot be read, its code raises an error, or an option
            does not fit the configuration.

    Example:
        >>> read_config("demo:banded", ["--config.num_epochs=3"]).num_epochs
        3
    """
    if isinstance(options, str):
        raise ValueError(f"options must be a list of texts, got {shorten(options)}")
    if not isinstance(config, str | Path):
        raise ValueError(
            "config must be the name or the path of a configuration, got "
            f"{shorten(config)}"
        )
    path, _, argument = str(config).partition(":")
    if not path:
        raise ValueError(f"--config={config} names no file: {_HINT}")
    if re.fullmatch(r"\w+", path):
        path = _package_config(path)
    loader = SourceFileLoader(_MODULE, path)
    found = spec_from_loader(_MODULE, loader)
    assert found is not None
    module = module_from_spec(found)
    # Dataclasses look up their module in sys.modules.
    sys.modules[_MODULE] = module
    try:
        loader.exec_module(module)
        result = module.get_config(*filter(None, [argument]))
    except Exception as error:
        if lacks_resources(error):
            raise
        raise ValueError(_explain_file(error, path, argument)) from error
    if not isinstance(result, ConfigDict):
        raise ValueError(
            f"get_config() of {path} returned {type(result).__name__}, not a ConfigDict"
        )
    override(result, options)
    typed = typed_keys(options)
    _replace(result, typed)
    if result.get("init_from"):
        if "init_from" in typed:
            take_model(result, typed, workdir)
        elif "name" not in result.get("model", {}):
            take_model(result, typed | given_keys(result), workdir)
    complete_model(result)
    return result.lock()


def _replace(config: ConfigDict, typed: set[str]) -> None:
    """Resets values of the recipe that options on the command line replace.

    Raises:
        ValueError: If two options exclude each other.
    """
    for key in REPLACED.keys() & typed:
        other = REPLACED[key]
        if key not in config or other not in config or not config[key]:
            continue
        if other in typed and config[other]:
            raise ValueError(
                f"--config.{key}={config[key]} and --config.{other}={config[other]} "
                "exclude each other: leave one out"
            )
        config[other] = 0
    default = default_config().optimizer
    if config.get("optimizer", default).get("name") != "sgd":
        return
    for key in ("b1", "b2"):
        if f"optimizer.{key}" in typed:
            raise ValueError(
                f"--config.optimizer.{key} needs config.optimizer.name 'adam' or "
                "'adamw', got 'sgd': leave it out"
            )
        if "optimizer.name" in typed and key in config.optimizer:
            config.optimizer[key] = default[key]


def package_titles() -> dict[str, str]:
    """Returns the first line of the docstring of each configuration of the package.

    Returns:
        The titles by the names that ``--config`` takes.

    Example:
        >>> package_titles()["demo"]
        'Small Performers on the embedded Fashion-MNIST, minutes on one CPU core.'
    """
    titles = {}
    for name, path in sorted(_package_configs().items()):
        text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        titles[name] = text.partition("\n")[0]
    return titles


def _package_configs() -> dict[str, Path]:
    """Returns the files of the configurations of the package."""
    package = Path(__file__).parents[1]
    # In a checkout, the folder is at the top.
    folder = package / "configs"
    folder = folder if folder.is_dir() else package.parent / "configs"
    return {path.stem: path for path in folder.glob("*.py")}


def _package_config(name: str) -> str:
    """Returns the path of a configuration of the package."""
    paths = _package_configs()
    if name not in paths:
        raise ValueError(
            f"unknown --config {name!r}: {closest(name, paths)}; for a file, pass "
            "its path, such as NAME.py"
        )
    folder = paths[name].parent
    # These configurations import each other as `configs.NAME`.
    configs = sys.modules.setdefault("configs", ModuleType("configs"))
    others = [path for path in getattr(configs, "__path__", []) if path != str(folder)]
    configs.__path__ = [*others, str(folder)]
    return str(paths[name])


def _explain_file(error: Exception, path: str, argument: str) -> str:
    """Describes in one sentence what is wrong with a configuration file."""
    if isinstance(error, SyntaxError):
        line = f", line {error.lineno}," if error.lineno else ""
        return one_line(
            f"{error.filename or path}{line} is not Python ({error.msg}): {_HINT}"
        )
    frames = [
        (frame.f_code.co_name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == path
    ]
    in_get_config = bool(frames) and frames[0][0] == "get_config"
    if argument and in_get_config and isinstance(error, ValueError):
        # get_config refuses the argument.
        return str(error)
    problem = f"{type(error).__name__}: {error}"
    if frames:
        return one_line(f"{path}, line {frames[-1][1]}: {problem}")
    if isinstance(error, OSError):
        problem = error.strerror or problem
    return one_line(f"{path} cannot be read ({problem}): {_HINT}")
