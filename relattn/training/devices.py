"""Chooses the devices of a run and how they share its work."""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from relattn.training.mesh import MeshParallel
from relattn.training.parallel import Device, Parallel, list_devices
from relattn.training.pmap import DataParallel

# Values of ``config.parallel``; the first is the default.
PARALLEL = ("pmap", "mesh")


def make_training_parallel(
    config: ConfigDict, devices: Sequence[Device] | None = None
) -> Parallel:
    """Chooses the devices of a training run, see `choose_devices`.

    Args:
        config: A checked configuration.
        devices: Devices to choose from; all by default.

    Returns:
        The devices.

    Raises:
        ValueError: If the configuration, its batch or the number of devices does not
            fit.
    """
    parallel = make_parallel(config, choose_devices(config, devices))
    parallel.check_batch(
        "config.batch_size", config.batch_size, config.accumulate_steps
    )
    return parallel


def make_parallel(
    config: ConfigDict,
    devices: Sequence[Device] | None = None,
    *,
    model_axis: int | None = None,
) -> Parallel:
    """Makes the `Parallel` that ``config.parallel`` names.

    Args:
        config: A configuration with ``parallel`` and ``model_axis``.
        devices: Devices to use; all by default.
        model_axis: Overrides ``config.model_axis``.

    Returns:
        A `DataParallel` or a `MeshParallel`.

    Raises:
        ValueError: If the configuration or the number of devices does not fit.
    """
    if config.parallel == "mesh":
        return MeshParallel(devices, model_axis=model_axis or config.model_axis)
    return DataParallel(devices)


def choose_devices(
    config: ConfigDict, devices: Sequence[Device] | None = None
) -> list[Device]:
    """Chooses the largest number of devices that divides the batch of a run.

    Every process keeps the same number of its devices, at least one.

    Args:
        config: A configuration with ``batch_size``, ``accumulate_steps``,
            ``model_axis``, and ``num_devices``, which fixes the number unless it is 0.
        devices: Devices to choose from; all by default.

    Returns:
        The first devices of each process; all of them if no number divides the batch,
        which `Parallel.check_batch` reports.

    Raises:
        ValueError: If ``config.num_devices`` are not available, or ``devices`` are no
            list of devices.
    """
    devices = list_devices(devices)
    by_process: dict[int, list[Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    num_processes = len(by_process)
    most = min(len(own) for own in by_process.values())

    def first(count: int) -> list[Device]:
        return [device for own in by_process.values() for device in own[:count]]

    if config.num_devices:
        count, rest = divmod(config.num_devices, num_processes)
        if rest or count > most:
            shared = f" of {num_processes} processes" if num_processes > 1 else ""
            multiple = f"a multiple of {num_processes}, " if num_processes > 1 else ""
            raise ValueError(
                f"config.num_devices={config.num_devices} does not fit the "
                f"{len(devices)} devices{shared}: set it to {multiple}at most "
                f"{most * num_processes}, or to 0 for as many as divide the batch"
            )
        return first(count)
    for count in range(most, 0, -1):
        shards, rest = divmod(count * num_processes, config.model_axis)
        split = count % config.model_axis and config.model_axis % count
        if rest or split:
            continue
        if config.batch_size % (shards * config.accumulate_steps) == 0:
            return first(count)
    return devices
