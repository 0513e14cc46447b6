"""Full image sets through TFDS, prepared on first use where that is possible."""

import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys

from relattn.data.catalogue import SETS, ImageSet
from relattn.data.images import ImageSplit
from relattn.data.prepared import (
    content_digest,
    data_root,
    find_prepared,
    read_prepared,
)


class DatasetNotPreparedError(FileNotFoundError):
    """A data set is not on this machine; the message says how to prepare it."""


def read_full(
    name: str, data_dir: str, manual_dir: str
) -> tuple[ImageSplit, ImageSplit, tuple[str, ...], str]:
    """Reads a full image set into memory, preparing it first if it is not there.

    Args:
        name: of the set, one of `SETS`.
        data_dir: where TFDS keeps its sets; "" for its default folder.
        manual_dir: archives that need no download; "" for none.

    Returns:
        The training images, the test images, the names of the classes, and the origin.

    Raises:
        DatasetNotPreparedError: the set is not there and could not be prepared.
        ValueError: the set is damaged, or its images are another set's.
    """
    folder = find_or_prepare(name, data_dir, manual_dir)
    entry = SETS[name]
    train, test, class_names = read_prepared(folder, entry.test_split)
    check_content(entry, folder, train, test)
    origin = origin_of(name, folder)
    return train, test, entry.class_names or class_names, origin


def find_or_prepare(name: str, data_dir: str, manual_dir: str) -> pathlib.Path:
    """Returns the folder of a set, preparing it first if it is not there.

    Preparation runs in a process of its own, since it imports TensorFlow.

    Args:
        name: of the set, one of `SETS`.
        data_dir: where TFDS keeps its sets; "" for its default folder.
        manual_dir: archives that need no download; "" for none.

    Returns:
        ``<data_dir>/<name>/<version>``.

    Raises:
        DatasetNotPreparedError: the set is not there and could not be prepared.
    """
    folder = find_prepared(name, data_dir)
    if folder is None:
        _prepare_in_subprocess(name, data_dir, manual_dir)
        folder = find_prepared(name, data_dir)
    return folder


def origin_of(name: str, folder: pathlib.Path) -> str:
    """Says where the images of a prepared set came from."""
    return f"{name} {folder.name}, prepared by TFDS in {folder}"


def check_content(
    entry: ImageSet, folder: pathlib.Path, train: ImageSplit, test: ImageSplit
) -> None:
    """Raises if images or labels are not those that the set is known to have.

    Args:
        entry: what is known of the set.
        folder: where it was read.
        train: its training images.
        test: its test images.

    Raises:
        ValueError: they differ.
    """
    if entry.digest and content_digest(train, test) != entry.digest:
        raise ValueError(
            f"The images or labels in {folder} are not those of {entry.title}; two "
            "sets whose archives have the same names may have been prepared from one "
            "downloads folder. Delete that folder and prepare the set again."
        )


def prepare_command(name: str, data_dir: str, manual_dir: str = "") -> list[str]:
    """Returns the arguments after ``python`` that prepare a set."""
    command = ["-m", "relattn.data.prepare", f"--name={name}"]
    if data_dir:
        command.append(f"--data_dir={data_dir}")
    if manual_dir:
        command.append(f"--manual_dir={manual_dir}")
    return command


def not_prepared(name: str, data_dir: str, cause: str) -> DatasetNotPreparedError:
    """Returns the error that says how to prepare a set, and why it was not."""
    command = shlex.join(["python", *prepare_command(name, data_dir)])
    archives = " and ".join(SETS[name].manual_archives)
    if archives:
        how = (
            f"Prepare it once: put {archives}, which its owners hand out on "
            "registration, into a folder DIR, `pip install 'relattn[prepare]'`, then "
            f"`{command} --manual_dir=DIR`."
        )
    else:
        how = (
            "Prepare it once, on a machine with a network: `pip install "
            f"'relattn[prepare]'`, then `{command}`; or from archives that you already "
            "have, with --config.data.manual_dir=DIR."
        )
    return DatasetNotPreparedError(
        f"{name} is not prepared in {data_root(data_dir)} ({cause}). {how}"
    )


def _prepare_in_subprocess(name: str, data_dir: str, manual_dir: str) -> None:
    if importlib.util.find_spec("tensorflow") is None:
        raise not_prepared(
            name, data_dir, "TensorFlow, needed for that only, is not installed"
        )
    package_root = str(pathlib.Path(__file__).parents[2])
    paths = [package_root, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    process = subprocess.Popen(
        [sys.executable, *prepare_command(name, data_dir, manual_dir)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment,
    )
    tail = b""
    with process:
        # The bars of a long download are shown as they come.
        while piece := process.stderr.read1():
            sys.stderr.write(piece.decode(errors="replace"))
            tail = (tail + piece)[-4000:]
    if process.returncode:
        lines = tail.decode(errors="replace").strip().splitlines()
        cause = lines[-1] if lines else f"exit status {process.returncode}"
        cause = cause.rpartition(f"{name} was not prepared: ")[2]
        raise not_prepared(name, data_dir, cause)
