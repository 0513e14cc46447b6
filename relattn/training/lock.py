"""One run at a time in a run directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from relattn.training.errors import WorkdirError, writing

try:
    import fcntl
except ImportError:  # Windows has no such locks.
    fcntl = None

LOCK = "lock.json"


@contextlib.contextmanager
def lock_workdir(workdir: Path) -> Iterator[None]:
    """Keeps a run directory to this process.

    The lock is the system's, ``flock`` on ``lock.json``: it ends with the process,
    however that ends. The file only says who holds it; what a process that was killed
    left there does not matter.

    Args:
        workdir: The run directory, which exists.

    Yields:
        Nothing.

    Raises:
        WorkdirError: If another run holds it; names that process and its host.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with lock_workdir(folder):
        ...     json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
        True
    """
    if fcntl is None:
        yield
        return
    path = workdir / LOCK
    with _locked(path) as file:
        with writing(path):
            file.truncate(0)
            json.dump({"pid": os.getpid(), "host": socket.gethostname()}, file)
            file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> IO[str]:
    """The file, opened and locked."""
    while True:
        with writing(path):
            file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            with file:
                raise WorkdirError(
                    f"--workdir {path.parent} is in use by {_holder(file)}: wait until "
                    "it has ended, or choose another directory"
                ) from error
        except OSError as error:
            warnings.warn(
                f"{path} cannot be locked ({error.strerror}): start no other run with "
                "this --workdir",
                stacklevel=4,
            )
            return file
        # Another run may have removed the file between the two calls.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        record = json.load(file)
        return f"process {record['pid']} on {record['host']}"
    except (ValueError, LookupError, TypeError):
        # It has not written its name yet.
        return "another process"
