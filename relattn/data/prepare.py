"""Prepares a full image set once, with the official TFDS builder and TensorFlow.

    relattn prepare --name=mnist [--data_dir=DIR] [--manual_dir=DIR]

needs ``pip install relattn[prepare]``, and a network unless ``--manual_dir`` names a
folder of the archives that TFDS would download. Reading the set afterwards needs
neither.
"""

from __future__ import annotations

import importlib.util
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path

import tensorflow_datasets as tfds
from ml_collections import ConfigDict

from relattn import command
from relattn.data.errors import describe_error
from relattn.data.registry import SETS
from relattn.data.streaming import open_streamed
from relattn.data.tfds import check_content, data_root, find_prepared, read_prepared
from relattn.files import expand
from relattn.manifest import write_manifest


def prepare(name: str, data_dir: str = "", manual_dir: str = "") -> Path:
    """Writes a set in array_record format, unless it exists.

    Args:
        name: Name of the set, one of `SETS`.
        data_dir: Folder of TFDS's sets; "" for its default folder.
        manual_dir: Folder of archives that are not downloaded; "" for none.

    Returns:
        The folder of the set.

    Raises:
        ImportError: If TensorFlow is not installed.
        ConnectionError: If archives are missing and their host cannot be reached.
        FileNotFoundError: If archives are missing that cannot be downloaded.
        ValueError: If the images are not those of the set.
    """
    folder = find_prepared(name, data_dir)
    if folder is None:
        if importlib.util.find_spec("tensorflow") is None:
            raise ImportError(
                "TensorFlow is not installed: `pip install 'relattn[prepare]'`"
            )
        root = data_root(data_dir)
        builder = tfds.builder(name, data_dir=root, file_format="array_record")
        check_archives(name, builder.url_infos or {}, manual_dir)
        builder.download_and_prepare(
            # TFDS caches extracted files by name, and MNIST's archives have the same
            # names as Fashion-MNIST's: each set needs a separate folder.
            download_dir=root / "downloads" / name,
            download_config=tfds.download.DownloadConfig(
                manual_dir=expand(manual_dir, "manual_dir") if manual_dir else None
            ),
        )
        folder = Path(builder.data_path)
        # Record files are left out: they contain checksums, verified by their reader.
        names = sorted(file.name for file in folder.iterdir())
        write_manifest(folder, (n for n in names if n.endswith((".json", ".txt"))))
    entry = SETS[name]
    if entry.streamed:
        open_streamed(ConfigDict({"name": name}), folder, entry)
    else:
        train, test, _ = read_prepared(folder, entry.test_split)
        check_content(entry, folder, train, test)
    return folder


def check_archives(name: str, urls: Iterable[str], manual_dir: str) -> None:
    """Raises an error if archives are missing and cannot be downloaded.

    TFDS would retry for minutes before it fails.

    Args:
        name: Name of the set.
        urls: URLs of its archives.
        manual_dir: Folder of archives that are not downloaded; "" for none.

    Raises:
        ConnectionError: If the host of a missing archive cannot be reached.
        FileNotFoundError: If only its owners distribute a missing archive.
    """
    folder = expand(manual_dir, "manual_dir") if manual_dir else None
    for file in SETS[name].manual_archives:
        if not (folder and (folder / file).is_file()):
            where = f"is not in {folder}" if folder else "needs --manual_dir"
            raise FileNotFoundError(
                f"{file} {where}: register with its owners to download it"
            )
    missing = {}
    for url in urls:
        file = url.rpartition("/")[2]
        needed = file.startswith(SETS[name].archive_prefix)
        if needed and not (folder and (folder / file).is_file()):
            missing[file] = urllib.parse.urlsplit(url)
    # Behind a proxy this check is impossible: the download is tried.
    if not missing or urllib.request.getproxies():
        return
    address = next(iter(missing.values()))
    port = 443 if address.scheme == "https" else 80
    try:
        socket.create_connection((address.hostname, port), timeout=20).close()
    except OSError as error:
        where = f"{', '.join(missing)} not in {folder} and " if folder else ""
        raise ConnectionError(f"{where}no connection to {address.hostname}") from error


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prepares the set that the arguments name."""
    parser = command.Parser("python -m relattn.data.prepare", __doc__)
    add = parser.add_argument
    add("--name", choices=list(SETS), required=True, help="name of the set")
    add("--data_dir", default="", help="folder to write to; by default that of TFDS")
    add("--manual_dir", default="", help="folder of archives that are not downloaded")
    options = parser.parse_args(argv)
    try:
        folder = prepare(options.name, options.data_dir, options.manual_dir)
    except Exception as error:
        if command.lacks_resources(error):
            raise
        raise ValueError(
            f"{options.name} was not prepared: {describe_error(error)}"
        ) from error
    print(f"{options.name} is prepared in {folder}")


if __name__ == "__main__":
    main()
