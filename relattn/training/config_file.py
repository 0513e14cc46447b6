"""The configuration that a file and the options of the command line give."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

from absl import flags
from ml_collections import ConfigDict, config_flags

from relattn.command import one_line

_MODULE = "relattn_config"
_HINT = "--config names a file with get_config(), such as configs/demo.py"
_FLAG_MODULES = {"absl", "ast", "ml_collections"}


def read_config(config: str, options: Sequence[str] = ()) -> ConfigDict:
    """Calls ``get_config`` of a file and overrides keys of what it returns.

    Args:
        config: ``configs/NAME.py``, perhaps with ``:`` and an argument.
        options: ``--config.key=value``.

    Returns:
        The configuration, locked.

    Raises:
        ValueError: If the file cannot be read, its code raises an error, or an option
            does not fit the configuration.

    Example:
        >>> read_config("configs/demo.py:banded", ["--config.num_epochs=3"]).num_epochs
        3
    """
    path, _, argument = config.partition(":")
    loader = SourceFileLoader(_MODULE, path)
    module = module_from_spec(spec_from_loader(_MODULE, loader))
    # A dataclass looks up its module there.
    sys.modules[_MODULE] = module
    try:
        loader.exec_module(module)
        result = module.get_config(*filter(None, [argument]))
    except Exception as error:
        raise ValueError(_explain_file(error, path, argument)) from error
    if not isinstance(result, ConfigDict):
        raise ValueError(
            f"get_config() of {path} returned {type(result).__name__}, not a ConfigDict"
        )
    values, argv = flags.FlagValues(), ["train.py", *options]
    try:
        config_flags.DEFINE_config_dict("config", result, "", values, sys_argv=argv)
        _, *rest = values(argv, known_only=True)
    except Exception as error:
        problem = _explain_override(error)
        if problem is None:
            raise
        raise ValueError(problem) from error
    if rest:
        raise ValueError(f"{rest[0]!r} is no option --config.key=value")
    return result


def _explain_file(error: Exception, path: str, argument: str) -> str:
    """What is wrong with a configuration's file, in one sentence."""
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
        # It refuses the argument.
        return str(error)
    problem = f"{type(error).__name__}: {error}"
    if frames:
        return one_line(f"{path}, line {frames[-1][1]}: {problem}")
    if isinstance(error, OSError):
        problem = error.strerror or problem
    return one_line(f"{path} cannot be read ({problem}): {_HINT}")


def _explain_override(error: Exception) -> str | None:
    """What is wrong with ``--config.key=value``; None for an error in other code."""
    if isinstance(error, flags.Error):
        return one_line(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {frame.f_globals["__name__"].partition(".")[0] for frame in frames[1:]}
    if not modules <= _FLAG_MODULES:
        return None
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    problem = error.args[0] if error.args else type(error).__name__
    if isinstance(error, KeyError):
        return one_line(f"there is no --config.[...] key {problem}")
    return one_line(f"--config.[...] cannot be read: {problem}")
