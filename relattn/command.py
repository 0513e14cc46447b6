"""What the programs share: how they read their options and how they fail."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import jax
from absl import flags, logging

from relattn.spec import closest

_ROOT = Path(__file__).resolve().parents[1]
# An error that they raise is about the user's input.
_PACKAGES = tuple(
    f"{_ROOT / name}{os.sep}" for name in ("relattn", "studies", "benchmarks", "tools")
)
_OVERRIDE = re.compile(r"--?(no)?config\.")
# Characters of a message, which may repeat what was given.
_MAX_LENGTH = 500

BAD_INPUT = 2
INTERRUPTED = 130
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)


def entry_point(main: Callable[..., None]) -> Callable[..., None]:
    """Makes a program fail with one sentence on stderr.

    The exit code is the error's attribute ``exit_code``, `BAD_INPUT` if it has none.
    Errors that are not the user's keep their traceback. Characters that the terminal's
    encoding lacks are escaped.

    Args:
        main: The program's function.

    Returns:
        The function, which raises SystemExit instead of an error of the user's.

    Example:
        >>> @entry_point
        ... def main():
        ...     raise MemoryError
        >>> main()
        Traceback (most recent call last):
        SystemExit: 2
    """

    @functools.wraps(main)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            main(*args, **kwargs)
        except KeyboardInterrupt:
            print(
                "interrupted: the same command goes on or starts again", file=sys.stderr
            )
            sys.exit(INTERRUPTED)
        except Exception as error:
            if hasattr(error, "exit_code"):
                print(error, file=sys.stderr)
                sys.exit(error.exit_code)
            text = explain_out_of_memory(error)
            if text is None and not is_user_error(error):
                raise
            print(f"error: {text or error}", file=sys.stderr)
            sys.exit(BAD_INPUT)

    return wrapped


class Parser(argparse.ArgumentParser):
    """Reads a program's options; a mistake in them raises a ValueError.

    Args:
        prog: What starts the program, such as ``"python train.py"``.
        doc: The module's docstring; its first line describes the program. None under
            ``python -OO``.
        overrides: Whether to collect options ``--config.key=value`` in the list
            ``overrides`` of the result.
        **kwargs: More arguments of `argparse.ArgumentParser`.

    Example:
        >>> parser = Parser("python train.py", "Trains.", overrides=True)
        >>> parser.parse_args(["--config.seed=3"]).overrides
        ['--config.seed=3']
        >>> parser.parse_args(["--verbose"])
        Traceback (most recent call last):
        ValueError: unknown option --verbose: did you mean '--verbosity'? There are: \
--flagfile, --verbosity
    """

    def __init__(
        self, prog: str, doc: str | None, *, overrides: bool = False, **kwargs: Any
    ):
        description = (doc or "").split("\n")[0]
        super().__init__(prog, description=description, allow_abbrev=False, **kwargs)
        self._overrides = overrides
        self.add_argument("--flagfile", help="a file of options, one on each line")
        self.add_argument(
            "--verbosity", type=int, default=-1, help="-1 logs warnings, 0 more, 1 all"
        )

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Reads the options.

        Args:
            args: Those of the command line; None for the process's.
            namespace: As in `argparse`.

        Returns:
            The values by name.

        Raises:
            ValueError: If an option is unknown, missing or has a wrong value, or a
                ``--flagfile`` cannot be read.
        """
        words = sys.argv[1:] if args is None else list(args)
        try:
            words = flags.FlagValues().read_flags_from_files(words, force_gnu=True)
        except (flags.Error, OSError, ValueError) as error:
            raise ValueError(f"--flagfile cannot be read: {one_line(error)}") from error
        given, unknown = self.parse_known_args(words, namespace)
        names = [f"--{name}" for name in vars(given)]
        if self._overrides:
            given.overrides, unknown = _split_overrides(unknown)
        if unknown and unknown[0].startswith("--"):
            name = unknown[0].partition("=")[0]
            raise ValueError(f"unknown option {name}: {closest(name, names)}")
        if unknown:
            raise ValueError(
                f"unexpected argument {unknown[0]!r}: options are --name=value"
            )
        # Orbax logs every file that it touches.
        logging.set_verbosity(given.verbosity)
        return given

    def error(self, message: str) -> None:
        """Raises a ValueError, where argparse ends the process."""
        raise ValueError(one_line(message).removeprefix("argument "))


def _split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """``--config.key=value``, the value perhaps in the next word, and the rest."""
    overrides, rest, words = [], [], list(words)
    while words:
        word = words.pop(0)
        if not _OVERRIDE.match(word):
            rest.append(word)
            continue
        overrides.append(word)
        if "=" not in word and words and not words[0].startswith("--"):
            overrides.append(words.pop(0))
    return overrides, rest


def is_user_error(error: BaseException) -> bool:
    """True for an error that this project raised about its input.

    Such an error says all that a user needs; any other needs its traceback.

    Args:
        error: A caught exception.

    Returns:
        Whether its type is one of `USER_ERRORS` and a line of this project raised it.

    Example:
        >>> is_user_error(ValueError("raised nowhere"))
        False
    """
    trace: types.TracebackType | None = error.__traceback__
    if trace is None or not isinstance(error, USER_ERRORS):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(_PACKAGES)


def explain_out_of_memory(error: BaseException) -> str | None:
    """What to do where the memory of a device, or of the host, does not suffice.

    Args:
        error: A caught exception.

    Returns:
        One sentence; None for any other error.

    Example:
        >>> error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        >>> explain_out_of_memory(error)[:45]
        'a device ran out of memory (Out of memory): l'
        >>> explain_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no"))
    """
    where, reason = "the host", str(error)
    if not isinstance(error, MemoryError):
        where = "a device"
        _, exhausted, reason = str(error).partition("RESOURCE_EXHAUSTED")
        if not isinstance(error, jax.errors.JaxRuntimeError) or not exhausted:
            return None
    # XLA may go on with a table of what it holds.
    reason = one_line(reason.lstrip(": ").split("\n")[0]).rstrip(".")
    return (
        f"{where} ran out of memory ({reason}): lower config.batch_size or "
        "config.eval_batch_size, raise config.accumulate_steps, set "
        "config.model.remat=True, or divide the model among devices by "
        'config.parallel="mesh"'
    )


def one_line(message: object) -> str:
    r"""A message in one line, cut where it is long.

    Args:
        message: Text, or an error.

    Returns:
        The text, with single spaces for line breaks.

    Example:
        >>> one_line(ValueError("wrong:\n  3"))
        'wrong: 3'
    """
    text = " ".join(str(message).split())
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
