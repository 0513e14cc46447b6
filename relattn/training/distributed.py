"""Several processes, one for each host or device, that train one model together."""

from __future__ import annotations

import jax
from jax.experimental import multihost_utils


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
            cluster here.
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
