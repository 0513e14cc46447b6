"""Several processes, one for each host or device, that train one model together."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from relattn.command import USER_ERRORS
from relattn.training.errors import WorkdirError

# A directory of the network may show a new file to others after some seconds.
_PATIENCE_SECONDS = 10.0
MOST_SECONDS = 10**6


def initialize(
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    *,
    heartbeat_seconds: int = 100,
) -> None:
    """Joins this process to the others; to be called before any other use of JAX.

    Without arguments JAX asks the cluster's environment: SLURM, Open MPI, Kubernetes or
    a TPU's.

    Args:
        coordinator: ``HOST:PORT`` of process 0, which all can reach.
        num_processes: How many there are.
        process_id: This one's number, from 0.
        heartbeat_seconds: A process that says nothing for so long has died: the others
            end.

    Raises:
        ValueError: If only some of the arguments are given, or none and JAX knows no
            cluster here, or one makes no sense.
        ConnectionError: If the other processes cannot be reached.
    """
    given = (bool(coordinator), num_processes > 0, process_id >= 0)
    if any(given) and not all(given):
        raise ValueError(
            "--coordinator=HOST:PORT, --num_processes and --process_id go together: "
            "give all three, or --distributed alone where the cluster tells them"
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
    # JAX would end the process without a word, or wait for weeks.
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
            "--distributed found no cluster that JAX knows (SLURM, Open MPI, "
            "Kubernetes, TPU): give --coordinator=HOST:PORT, --num_processes and "
            f"--process_id ({error})"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise ConnectionError(
            f"the processes cannot reach each other at {coordinator or 'the cluster'} "
            f"({str(error).splitlines()[0]}): start all of them, with the same "
            "--coordinator"
        ) from error


def barrier(name: str) -> None:
    """Waits until every process has come here.

    Args:
        name: Of the place, the same in all.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def from_primary(make: Callable[[], Any]) -> Any:
    """What a function gives in process 0, in every process.

    Args:
        make: Called in process 0 alone; gives what JSON can hold.

    Returns:
        Its value; a tuple comes as a list.

    Raises:
        Exception: In process 0 what ``make`` raises.
        ValueError: In the others, with its message, if it is one for users.

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


def primary_first(make: Callable[[], Any]) -> Any:
    """Calls a function in process 0, and when it is done in the other processes.

    So that what it leaves on a disk is there for the others, who would else write it at
    the same time.

    Args:
        make: Called once in every process.

    Returns:
        What it gives in this process.

    Example:
        >>> primary_first(lambda: 3)
        3
    """
    made: list[Any] = []
    from_primary(lambda: made.append(make()))
    return made[0] if is_primary() else make()


def check_shared(workdir: Path) -> None:
    """Raises unless all processes see one run directory.

    Args:
        workdir: The run directory, in each process.

    Raises:
        WorkdirError: In every process, if one of them does not see what process 0
            writes there.
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
            f"--workdir {workdir} is not one directory for all processes: process "
            f"{int(np.argmin(seen))} does not see what process 0 writes there; give a "
            "directory that all hosts share"
        )


def all_preempted(step: int) -> bool:
    """Whether the processes, of which some got SIGTERM, have agreed to end here.

    Args:
        step: Called by every process after the same updates.
    """
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(
        step
    )


def is_primary() -> bool:
    """Whether this process writes what one alone should: logs, and on the screen."""
    return jax.process_index() == 0
