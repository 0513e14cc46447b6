"""Refuses worker processes in scripts without a main guard."""

from __future__ import annotations

import ast
import multiprocessing
import sys
import types
from pathlib import Path

# Names by which a condition tells the first process from its workers.
GUARDS = {"__name__", "current_process", "parent_process"}


def check_main_guard(num_workers: int) -> None:
    """Checks that worker processes will not run the caller's script again.

    A worker imports the script under another name, and runs what is not guarded by
    ``if __name__ == "__main__":``.

    Args:
        num_workers: Number of worker processes.

    Raises:
        ValueError: If the statement of the script that led here is not guarded, or
            this process is itself such a worker.

    Example:
        >>> check_main_guard(num_workers=0)
    """
    if not num_workers:
        return
    inside_worker = getattr(multiprocessing.current_process(), "_inheriting", False)
    if inside_worker or _is_unguarded(_main_frame()):
        raise ValueError(
            f"data.num_workers={num_workers} starts processes that import the script "
            'again: put the call that trains under `if __name__ == "__main__":`, or '
            "set data.num_workers=0"
        )


def _main_frame() -> types.FrameType | None:
    """Returns the frame of the script's own code, if it is running."""
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code.co_name
        if code == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame
        frame = frame.f_back
    return None


def _is_unguarded(frame: types.FrameType | None) -> bool:
    if frame is None:
        return False
    # A worker imports a file only: notebooks and `python -c` have none.
    path = frame.f_globals.get("__file__")
    if path is None or not Path(path).is_file():
        return False
    # It does not import the module of `python -m package`, `package.__main__`.
    spec = frame.f_globals.get("__spec__")
    if spec is not None and spec.name.rpartition(".")[2] == "__main__":
        return False
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except SyntaxError:
        # A notebook's or another language's file.
        return False
    for statement in statements:
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or 0):
            return not (isinstance(statement, ast.If) and _mentions_guard(statement))
    return False


def _mentions_guard(statement: ast.If) -> bool:
    names = {
        getattr(node, "id", getattr(node, "attr", ""))
        for node in ast.walk(statement.test)
    }
    return bool(names & GUARDS)
