"""Several processes that train one model together, one for each host or device."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from relattn.command import USER_ERRORS
from relattn.training.errors import WorkdirError

_T = TypeVar("_T")
# A network directory may show a new file to other hosts after some seconds.
_PATIENCE_SECONDS = 10.0
MOST_SECONDS = 10**6


def initialize(
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    *,
    heartbeat_seconds: int = 100,
) -> None:
    """Connects this process to the others; call it before any other use of JAX.

    Without arguments, JAX reads the cluster's environment: SLURM, Open MPI, Kubernetes
    or TPU.

    Args:
        coordinator: ``HOST:PORT`` of process 0, which all processes can reach.
        num_processes: The number of processes.
        process_id: The index of this process, from 0.
        heartbeat_seconds: Seconds without a heartbeat after which a process counts as
            dead, and the others end.

    Raises:
        ValueError: If an argument is missing or out of range, or all are missing and
            JAX finds no cluster.
        ConnectionError: If the other processes cannot be reached.
    """
    given = (bool(coordinator), num_processes > 0, process_id >= 0)
    if any(given) and not all(given):
        raise ValueError(
            "--coordinator=HOST:PORT, --num_processes and --process_id go together: "
            "pass all three, or --distributed alone on a cluster that JAX supports"
        )
    if all(given) and process_id >= num_processes:
        raise ValueError(
            f"--process_id={process_id} must be below --num_processes={num_processes}: "
            "processes are counted from 0"
        )
    port = re.fullmatch(r".+:([0-9]{1,5})", coordinator)
    if coordinator and not (port and 1 <= int(port[1]) < 2**16):
        raise ValueError(
            f"--coordinator={coordinator} must be HOST:PORT, such as 10.0.0.1:1234"
        )
    # JAX would end the process without a message, or wait for weeks.
    if not 1 <= heartbeat_seconds <= MOST_SECONDS:
        raise ValueError(
            f"--heartbeat_seconds={heartbeat_seconds} must be from 1 to {MOST_SECONDS}"
        )
    try:
        jax.distributed.initialize(
            coordinator or None,
            num_processes if all(given) else None,
            process_id if all(given) else None,
            heartbeat_timeout_seconds=heartbeat_seconds,
        )
    except ValueError as error:
        raise ValueError(
            "--distributed found no cluster that JAX supports (SLURM, Open MPI, "
            "Kubernetes, TPU): pass --coordinator=HOST:PORT, --num_processes and "
            f"--process_id ({error})"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(
            f"the processes cannot reach each other at {coordinator or 'the cluster'} "
            f"({str(error).splitlines()[0]}): start all of them, with the same "
            "--coordinator"
        ) from error


def barrier(name: str) -> None:
    """Waits until every process has reached this call.

    Args:
        name: Name of the barrier, the same in all processes.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_primary(make: Callable[[], Any]) -> Any:
    """Calls a function in process 0 and returns its value in every process.

    Args:
        make: Called in process 0 only; returns a value that JSON can hold.

    Returns:
        The value; a tuple becomes a list.

    Raises:
        Exception: In process 0, any error of ``make``.
        ValueError: In the others, with the same message, if it is an error for users.

    Example:
        >>> from_primary(lambda: {"step": 3})
        {'step': 3}
    """
    if jax.process_count() == 1:
        return make()
    message, error = {}, None
    if is_primary():
        try:
            message = {"value": make()}
        except USER_ERRORS as raised:
            message, error = {"error": str(raised)}, raised
    text = np.frombuffer(json.dumps(message).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(length, np.uint8)
    padded[: len(text)] = text[:length]
    sent = json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(padded))))
    if error is not None:
        raise error
    if "error" in sent:
        raise ValueError(sent["error"])
    return sent["value"]


def primary_first(make: Callable[[], _T]) -> _T:
    """Calls a function in process 0, and afterwards in the other processes.

    The others find the files that process 0 wrote, instead of writing them at the same
    time.

    Args:
        make: Called once in every process.

    Returns:
        Its value in this process.

    Example:
        >>> primary_first(lambda: 3)
        3
    """
    made: list[Any] = []
    from_primary(lambda: made.append(make()))
    return made[0] if is_primary() else make()


def check_shared(workdir: Path) -> None:
    """Checks that all processes see the same run directory.

    Args:
        workdir: The run directory, in each process.

    Raises:
        WorkdirError: In every process, if one of them does not see a file that process
            0 writes there.
    """
    if jax.process_count() == 1:
        return
    name = from_primary(lambda: f".shared-{time.time_ns()}")
    mark, until = workdir / name, time.monotonic() + _PATIENCE_SECONDS
    if is_primary():
        mark.touch()
    barrier("directory marked")
    while not mark.exists() and time.monotonic() < until:
        time.sleep(0.1)
    seen = multihost_utils.process_allgather(np.array([mark.exists()])).ravel()
    if is_primary():
        mark.unlink()
    if not seen.all():
        raise WorkdirError(
            f"--workdir {workdir} is not shared by all processes: process "
            f"{int(np.argmin(seen))} does not see a file that process 0 wrote there; "
            "pass a directory that all hosts share"
        )


def all_preempted(step: int) -> bool:
    """Checks whether the processes end at this step because some got SIGTERM.

    Args:
        step: The step; every process calls after the same updates.

    Returns:
        True in all processes or in none.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(
        step
    )


def is_primary() -> bool:
    """Returns True for process 0, which writes logs and output."""
    return jax.process_index() == 0
