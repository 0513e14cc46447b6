"""Options and error messages of the command-line programs."""

from __future__ import annotations

import _thread
import argparse
import contextlib
import ctypes
import errno
import functools
import importlib
import importlib.util
import math
import os
import platform
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import jax

from relattn.messages import closest, printable

_P = ParamSpec("_P")

_ROOT = Path(__file__).resolve().parents[1]
# The errors that these packages raise are about the user's input.
_PACKAGES = tuple(
    f"{_ROOT / name}{os.sep}" for name in ("relattn", "studies", "benchmarks", "tools")
)
# The options that keep every value; "extend" is an "append".
_REPEATABLE = (argparse._AppendAction, argparse._CountAction)
_OVERRIDE = re.compile(r"--?(config\.|noconfig\.[^=]*\Z)")
# The help of --draws, which several programs have.
DRAWS_HELP = (
    "number of draws of the random features over which the probabilities are averaged, "
    "by default the run's config.eval_draws; K draws take K times the time"
)
BATCH_HELP = "examples in a batch, by default the run's config.eval_batch_size"
SEED_HELP = "the seed, if several were trained together; by default the first"
CONTEXT_HELP = (
    "number of tokens in a window, by default that of training; the model's position "
    "tables are cut or resized"
)
# The modules of --import, for the processes that a program starts.
imported: list[str] = []
# Length limit of a message in characters: it may quote the input.
_MAX_LENGTH = 500
# Characters of the start, and of the end, of a longer error message.
_MAX_PART = 1000

_FORMAT = warnings.formatwarning

# What to do about errors of the system.
_FIXES = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "make it accessible, or choose another",
    ),
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
        "free some space, or raise the limit",
    ),
    **dict.fromkeys(
        (errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"
    ),
    **dict.fromkeys((errno.EIO, errno.ESTALE), "check the disk, and try again"),
    errno.EPIPE: "let the program that reads it run to the end",
}

BAD_INPUT = 2
INTERRUPTED = 130
USER_ERRORS = (ValueError, OSError, ImportError, FloatingPointError)


def entry_point(main: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates a program's main function: user errors become one sentence on stderr.

    So do errors of the system about files, wherever they are raised, and about an
    output that cannot be written. Other errors keep their traceback. The exit code is
    the error's attribute ``exit_code``, or `BAD_INPUT` without one. Characters that
    the terminal's encoding lacks are escaped, and in errors and warnings those that it
    would obey. Compiled programs are kept on disk, see `keep_compiled`.

    Args:
        main: The main function; its ``argv`` are command-line arguments, by default the
            process's.

    Returns:
        The function, which raises SystemExit instead of a user error.

    Example:
        >>> @entry_point
        ... def main():
        ...     raise MemoryError
        >>> main()
        Traceback (most recent call last):
        SystemExit: 2
    """

    @functools.wraps(main)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> None:
        _open_streams()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        warnings.formatwarning = _format_warning
        keep_compiled()
        try:
            try:
                with _repeating_interrupts():
                    main(*args, **kwargs)
            except SystemExit as error:
                if not error.code:
                    _flush_output()
                raise
            _flush_output()
        except KeyboardInterrupt:
            _leave(
                "interrupted: run the same command to continue or restart", INTERRUPTED
            )
        except BaseException as error:
            exit_code = getattr(error, "exit_code", None)
            if exit_code is not None:
                _leave(str(error), exit_code)
            text = (
                explain_out_of_memory(error)
                or explain_no_backend(error)
                or explain_system_error(error)
            )
            if text is None and not is_user_error(error):
                raise
            _leave(f"error: {text or error}", BAD_INPUT)

    return wrapped


@contextlib.contextmanager
def _repeating_interrupts() -> Iterator[None]:
    """Repeats a Ctrl-C that Python drops, in the context.

    Python reports and ignores what a callback raises that no code has called: JAX has
    one for each garbage collection, which often is the first to run after long work
    outside of Python.
    """
    before = sys.unraisablehook

    def report(lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            before(lost)
            return
        # Once the callback has returned: raised here, it would be lost again.
        timer = threading.Timer(0.05, _thread.interrupt_main)
        timer.daemon = True
        timer.start()

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def _leave(message: str, code: int) -> NoReturn:
    """Ends the process with a message."""
    message = printable(message)
    if len(message) > 2 * _MAX_PART:
        # It may quote names of any length; the fix is at the end.
        message = f"{message[:_MAX_PART]} ... {message[-_MAX_PART:]}"
    # The output or the terminal may be gone.
    with contextlib.suppress(OSError):
        _flush_output()
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)
    sys.exit(code)


def _open_streams() -> None:
    """Opens the streams that the caller has closed, such as by ``>&-``.

    Otherwise the next file that is opened takes the place of the stream, and what
    libraries write to the terminal.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _flush_output() -> None:
    """Writes what was printed; Python would report its errors after the end.

    Raises:
        OSError: If it cannot be written, such as to a full disk or a closed pipe.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        # Python would try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OSError(
            f"the output cannot be written ({error.strerror}): write it to another "
            "place, such as a file on a disk that is not full"
        ) from error


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Formats a warning in one line if relattn gives it, otherwise as Python does."""
    text = printable(str(message))
    if category is UserWarning and os.path.abspath(filename).startswith(_PACKAGES):
        return f"warning: {text}\n"
    return _FORMAT(text, category, filename, lineno, line)


def keep_compiled() -> None:
    """Makes JAX keep compiled programs on disk, for the next start.

    They are in ``relattn/jax`` of the user's cache folder, ``$XDG_CACHE_HOME`` or
    ``~/.cache``, unless the user has set a folder, such as by
    ``JAX_COMPILATION_CACHE_DIR``.
    """
    # JAX adds the attributes of its configuration when it starts.
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        folder = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        folder = os.path.join(folder, "relattn", "jax")
        jax.config.update("jax_compilation_cache_dir", folder)


def keep_heap() -> None:
    """Makes glibc keep freed memory, where JAX computes on CPUs.

    XLA's CPU client takes the memory of temporaries from malloc, and otherwise a step
    waits for the system to map it again. Blocks of more than a gigabyte are returned
    all the same: a smaller block in the place of a freed one would double the memory.
    Must be called before JAX starts the client: its threads then use one heap, instead
    of one each that is returned to the system. Changes nothing if the user has set
    ``GLIBC_TUNABLES``.
    """
    if (
        "GLIBC_TUNABLES" in os.environ
        or platform.libc_ver()[0] != "glibc"
        or not _only_cpus()
    ):
        return
    # M_TRIM_THRESHOLD (never), M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h. Older
    # versions refuse a threshold of more than 32 MB.
    for parameter, value in ((-1, -1), (-3, 1 << 25), (-3, 1 << 30), (-8, 1)):
        ctypes.CDLL(None).mallopt(parameter, value)


def _only_cpus() -> bool:
    """Returns whether JAX will choose CPUs, without starting its client."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms:
        return platforms == "cpu"
    return not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


class Parser(argparse.ArgumentParser):
    """Parses a program's options; raises ValueError where argparse would exit.

    Args:
        prog: The command, such as ``"python train.py"``.
        doc: The module's docstring; its first line describes the program. None under
            ``python -OO``.
        overrides: If True, the result's list ``overrides`` collects options
            ``--config.key=value``.
        **kwargs: Other arguments of `argparse.ArgumentParser`.

    Example:
        >>> parser = Parser("python train.py", "Trains.", overrides=True)
        >>> parser.parse_args(["--config.seed=3"]).overrides
        ['--config.seed=3']
        >>> parser.parse_args(["--verbose"])
        Traceback (most recent call last):
        ValueError: unknown option --verbose: did you mean '--verbosity'? Available: \
--flagfile, --import, --verbosity; a key of the configuration is written \
--config.verbose
    """

    def __init__(
        self, prog: str, doc: str | None, *, overrides: bool = False, **kwargs: Any
    ):
        description = (doc or "").split("\n")[0]
        # The command `relattn NAME` calls itself so.
        prog = sys.argv[0] if sys.argv[0].startswith("relattn ") else prog
        super().__init__(prog, description=description, allow_abbrev=False, **kwargs)
        self._overrides = overrides
        # Options with type=float take no NaN and no infinity.
        self.register("type", float, _finite)
        self.add_argument("--flagfile", help="a file of options, one per line")
        self.add_argument(
            "--import",
            action="append",
            default=[],
            metavar="MODULE",
            help="a Python module to import first, such as one that registers an "
            "attention; repeatable",
        )
        self.add_argument(
            "--verbosity",
            type=int,
            default=-1,
            help="log level: -1 warnings, 0 info, 1 debug",
        )

    def parse_args(
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parses the options.

        Args:
            args: The arguments; None for those of the process.
            namespace: The object that takes the values; None for a new one.

        Returns:
            The values by name.

        Raises:
            ValueError: If an option is unknown, missing, given twice or has a wrong
                value, or a ``--flagfile`` or ``--import`` cannot be read.
        """
        words = [*_expand_flagfiles(sys.argv[1:] if args is None else args)]
        # Before argparse misses a required option whose name is mistyped.
        self._check_known(words)
        self._check_repeated(words)
        # An option may stand between two arguments without a name.
        mixed = bool(self._get_positional_actions())
        parse = self.parse_known_intermixed_args if mixed else self.parse_known_args
        given, unknown = parse(words, namespace)
        if self._overrides:
            given.overrides, unknown = split_overrides(unknown)
        if unknown:
            raise ValueError(
                f"unexpected argument {unknown[0]!r}: options are --name=value"
            )
        # Orbax and TFDS log to absl. Orbax logs every file that it opens.
        from absl import logging

        values = vars(given)
        del values["flagfile"]
        logging.set_verbosity(values.pop("verbosity"))
        imported[:] = values.pop("import")
        for name in imported:
            _import(name)
        return given

    def _check_known(self, words: Sequence[str]) -> None:
        """Refuses unknown options."""
        known = self._option_string_actions
        for word in words:
            if word == "--":
                break
            name = word.partition("=")[0]
            # With spaces, it is a value to argparse, such as a text.
            if name in known or not name.startswith("--") or " " in name:
                continue
            if self._overrides and _OVERRIDE.match(word):
                continue
            names = [x for x in known if x.startswith("--") and x != "--help"]
            hint = closest(name, names)
            if self._overrides:
                hint += f"; a key of the configuration is written --config.{name[2:]}"
            raise ValueError(f"unknown option {name}: {hint}")

    def _check_repeated(self, words: Sequence[str]) -> None:
        """Refuses an option that is given twice; argparse would keep the last."""
        seen = set()
        for word in words:
            name = word.partition("=")[0]
            action = self._option_string_actions.get(name)
            if action is None or isinstance(action, _REPEATABLE):
                continue
            if action.dest in seen:
                raise ValueError(f"{name} is given twice, but takes one: pass it once")
            seen.add(action.dest)

    def error(self, message: str) -> None:
        """Raises ValueError; argparse would end the process."""
        raise ValueError(one_line(message).removeprefix("argument "))


def _finite(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
    return value


def _import(name: str) -> None:
    """Imports a module from the Python path or the current folder."""
    if name.endswith(".py") or "/" in name:
        module = Path(name).stem
        raise ValueError(
            f"--import={name} is a file: pass the name of its module, "
            f"--import={module}, in its folder"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(name)
    except Exception as error:
        fix = "correct the module"
        if isinstance(error, ModuleNotFoundError) and name.startswith(
            error.name or "-"
        ):
            fix = "run the command in the module's folder, or add that to PYTHONPATH"
        raise ValueError(
            f"--import={name} failed ({type(error).__name__}: {one_line(error)}): {fix}"
        ) from error


def _expand_flagfiles(
    words: Sequence[str], outer: tuple[str, ...] = ()
) -> Iterator[str]:
    """Replaces every ``--flagfile`` by the options in its file; files may nest."""
    rest = iter(words)
    for word in rest:
        option, equals, path = word.partition("=")
        if option != "--flagfile":
            yield word
            continue
        path = path if equals else next(rest, "")
        if path in outer:
            raise ValueError(f"--flagfile cannot be read: {path} is given twice")
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ValueError(f"--flagfile cannot be read: {one_line(error)}") from error
        options = [line.strip() for line in lines if not re.match(r"\s*(#|$)", line)]
        yield from _expand_flagfiles(options, (*outer, path))


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits overrides ``--config.key=value`` from other words.

    Args:
        words: The words; the value of a key may be a word of its own.

    Returns:
        The overrides, each one word, and the other words.

    Example:
        >>> split_overrides(["--config.seed", "3", "--json"])
        (['--config.seed=3'], ['--json'])
    """
    overrides, rest, words = [], [], list(words)
    while words:
        word = words.pop(0)
        match = _OVERRIDE.match(word)
        if match is None:
            rest.append(word)
            continue
        may_join = match[1] == "config." and "=" not in word
        if may_join and words and not words[0].startswith("--"):
            word = f"{word}={words.pop(0)}"
        overrides.append(word)
    return overrides, rest


def is_user_error(error: BaseException) -> bool:
    """Returns True for an error that this project raised about its input.

    The message of such an error is enough; other errors need their traceback.

    Args:
        error: A caught exception.

    Returns:
        True if its type is in `USER_ERRORS` and it was raised in this project's code.

    Example:
        >>> is_user_error(ValueError("raised nowhere"))
        False
    """
    return isinstance(error, USER_ERRORS) and _source(error).startswith(_PACKAGES)


def _source(error: BaseException) -> str:
    """Returns the file in which an error was raised, "" if it was not."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_code.co_filename if frames else ""


def explain_out_of_memory(error: BaseException) -> str | None:
    """Explains an out-of-memory error of a device or the host, with the remedies.

    Args:
        error: A caught exception.

    Returns:
        One sentence; None for other errors.

    Example:
        >>> error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        >>> explain_out_of_memory(error)[:45]
        'a device ran out of memory (Out of memory): l'
        >>> explain_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: no"))
    """
    where, reason = "the host", str(error)
    no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    no_thread = isinstance(error, RuntimeError) and reason == "can't start new thread"
    if not (isinstance(error, MemoryError) or no_memory or no_thread):
        where = "a device"
        _, exhausted, reason = str(error).partition("RESOURCE_EXHAUSTED")
        if not isinstance(error, jax.errors.JaxRuntimeError) or not exhausted:
            return None
    # XLA may append a table of its buffers.
    reason = one_line(reason.lstrip(": ").split("\n")[0]).rstrip(".")
    return (
        f"{where} ran out of memory ({reason}): lower config.batch_size or "
        "config.eval_batch_size, raise config.accumulate_steps, set "
        "config.model.remat=True, or shard the model over devices with "
        'config.parallel="mesh"'
    )


def lacks_resources(error: BaseException | None) -> bool:
    """Returns True if an error is a lack of memory, threads or open files.

    It says nothing about the file that was read meanwhile, which is not damaged.

    Args:
        error: A caught exception; its causes count too.

    Example:
        >>> lacks_resources(OSError(errno.EMFILE, "Too many open files"))
        True
        >>> lacks_resources(OSError(errno.EIO, "Input/output error"))
        False
    """
    while error is not None:
        if explain_out_of_memory(error):
            return True
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def explain_system_error(error: BaseException) -> str | None:
    """Explains an error of the system about a file, with its name.

    Args:
        error: A caught exception.

    Returns:
        One sentence; None for other errors.

    Example:
        >>> explain_system_error(OSError(errno.EACCES, "Permission denied", "a.json"))
        'a.json cannot be read or written (Permission denied): make it accessible, or \
choose another'
        >>> explain_system_error(OSError("no number")) is None
        True
    """
    if not isinstance(error, OSError) or not error.strerror:
        return None
    if error.errno == errno.ENOENT and not _has_working_directory():
        return "the current folder was deleted: change to another"
    fix = _FIXES.get(error.errno or 0, "")
    name = error.filename
    if name is None or isinstance(name, int):
        # Another error without a file may be of a network.
        if not fix:
            return None
        name = "the output" if error.errno == errno.EPIPE else "a file"
    fix = fix or "check the path, and the disk"
    return f"{os.fsdecode(name)} cannot be read or written ({error.strerror}): {fix}"


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def explain_no_backend(error: BaseException) -> str | None:
    """Explains that JAX lacks the platform that the user named.

    Args:
        error: A caught exception.

    Returns:
        One sentence; None for other errors.

    Example:
        >>> explain_no_backend(RuntimeError("Unable to initialize backend 'gpu': no"))
        "JAX_PLATFORMS cannot be used: Unable to initialize backend 'gpu': no"
        >>> explain_no_backend(RuntimeError("no"))
    """
    text = one_line(error)
    if isinstance(error, AssertionError) and _source(error).endswith("xla_bridge.py"):
        # JAX without the package for GPUs asserts that there is a platform.
        text = f"JAX has none of {jax.config.jax_platforms}: set it to '' or 'cpu'"  # pyright: ignore[reportAttributeAccessIssue]
        return f"JAX_PLATFORMS cannot be used: {text}"
    # JAX ends the message with the fix: to set the variable to ''.
    found = isinstance(error, RuntimeError) and "nable to initialize backend" in text
    return f"JAX_PLATFORMS cannot be used: {text}" if found else None


def one_line(message: object) -> str:
    r"""Puts a message on one line and truncates it.

    Args:
        message: A string or an error.

    Returns:
        The message, with line breaks replaced by spaces, and other characters that are
        not printed escaped.

    Example:
        >>> one_line(ValueError("wrong:\n  3"))
        'wrong: 3'
    """
    text = printable(" ".join(str(message).split()))
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
