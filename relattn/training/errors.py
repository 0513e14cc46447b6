"""What training raises beside ValueError: each message is one sentence with the fix."""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

import jax
from absl import flags

_PACKAGE = str(Path(__file__).resolve().parents[1])


class WorkdirError(OSError):
    """A run directory cannot be used."""


class CheckpointError(OSError):
    """A checkpoint is missing, damaged or of another model, or cannot be written."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is damaged or missing.

    Attributes:
        damage: What is wrong with which file.
    """

    def __init__(self, damage: str):
        super().__init__(
            f"{damage}; nothing was changed: restore the file, or choose another "
            "checkpoint or --workdir"
        )
        self.damage = damage


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient became NaN or infinite.

    Attributes:
        step: The update at which it happened, counted from one.
    """

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class PreemptedError(Exception):
    """A signal ended a run, with a checkpoint or where none was due.

    The same call goes on.

    Attributes:
        step: Number of updates in the checkpoint; 0 where none was written.
        by_hand: Whether it was Ctrl-C, not SIGTERM.
    """

    def __init__(self, message: str, step: int = 0, *, by_hand: bool = False):
        super().__init__(message)
        self.step = step
        self.by_hand = by_hand


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes of a failure to write a file a sentence that names it.

    Args:
        path: The file, in a run directory.

    Yields:
        Nothing.

    Raises:
        WorkdirError: If what runs in the context raises an OSError.

    Example:
        >>> with writing(Path("metrics.csv")):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        relattn.training.errors.WorkdirError: metrics.csv cannot be written (No space \
left on device); what was written before is intact: make room, or the directory \
writable, and give the same command again
    """
    try:
        yield
    except OSError as error:
        raise WorkdirError(
            f"{path} cannot be written ({error.strerror or error}); what was written "
            "before is intact: make room, or the directory writable, and give the same "
            "command again"
        ) from error


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
    reason = _one_line(reason.lstrip(": ").split("\n")[0]).rstrip(".")
    return (
        f"{where} ran out of memory ({reason}): lower config.batch_size or "
        "config.eval_batch_size, raise config.accumulate_steps, set "
        "config.model.remat=True, or divide the model among devices by "
        'config.parallel="mesh"'
    )


USER_ERRORS = (ValueError, OSError, NonFiniteLossError)


def is_user_error(error: BaseException) -> bool:
    """True for an error that the package itself raised about its input.

    Such an error says all that a user needs; any other needs its traceback.

    Args:
        error: A caught exception.

    Returns:
        Whether its type is one of `USER_ERRORS` and a line of this package raised it.

    Example:
        >>> is_user_error(ValueError("raised nowhere"))
        False
    """
    trace: types.TracebackType | None = error.__traceback__
    if trace is None or not isinstance(error, USER_ERRORS):
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)


# Of a message of absl's, which repeats what it was given.
_MAX_LENGTH = 500
_FLAG_MODULES = {"absl", "ast", "ml_collections"}


def explain_flag_error(error: Exception) -> str | None:
    r"""What is wrong with the flags ``--config`` and ``--config.key=value``.

    Args:
        error: Caught where they were parsed.

    Returns:
        One sentence; None for an error in the code of a configuration, which needs its
        traceback.

    Example:
        >>> explain_flag_error(OSError("no such file\n  configs/x.py"))
        'configs/x.py'
    """
    if isinstance(error, SyntaxError) and Path(error.filename or "").is_file():
        return _one_line(
            f"{error.filename}, line {error.lineno}, is not Python ({error.msg}): "
            "--config names a file with get_config(), such as configs/demo.py"
        )
    lines = str(error).strip().split("\n")
    if isinstance(error, OSError) or "Traceback" in str(error):
        # absl puts the traceback before it; a ValueError says all by itself.
        return _one_line(lines[-1].strip().removeprefix("ValueError: "))
    if isinstance(error, flags.Error):
        return _one_line(" ".join(lines))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = {frame.f_globals["__name__"].partition(".")[0] for frame in frames[1:]}
    if not modules <= _FLAG_MODULES:
        return None
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
    problem = str(error.args[0]) if error.args else type(error).__name__
    if isinstance(error, KeyError):
        return _one_line(f"there is no --config.[...] key {problem}")
    return _one_line(f"--config.[...] cannot be read: {problem}")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MAX_LENGTH else f"{text[:_MAX_LENGTH]}..."
