"""Fetches the packages that a machine without a network needs, as wheels.

    python -m tools.offline --python=3.12 --installed=packages.txt --output=DIR

packages.txt is the output of ``pip list --format=freeze`` on that machine, a Linux of
x86-64; what it has is left out. There, ``python -m pip install --no-index --no-deps
DIR/*.whl`` installs the rest, and then the folder of relattn itself is enough.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from relattn import command
from relattn.messages import shorten
from relattn.training.workdir import usable_folder

ROOT = Path(__file__).resolve().parents[1]
# The versions of glibc that wheels may need, new and old; pip matches each exactly.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
_PLATFORMS += [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]
# A requirement, without its marker.
_NO_WHEEL = re.compile(r"No matching distribution found for ([^;\n]+)")
_NO_EXTRA = re.compile(r"does not provide the extra '(.*)'")
# A line of the output of `pip list --format=freeze` or of `pip freeze`.
_INSTALLED = re.compile(r"([A-Za-z0-9][\w.-]*) ?(==|@)")


def resolve(
    requirements: Sequence[str], python: str, folder: Path
) -> list[tuple[str, str]]:
    """Finds the packages that requirements need, with the packages that these need.

    A package without wheels is built, if its wheel then serves every machine.

    Args:
        requirements: Requirements as for pip.
        python: Version of Python, such as ``"3.12"``.
        folder: Where built wheels are written.

    Returns:
        Name and version of each package.

    Raises:
        ValueError: If pip finds no version of a package, or there is no such extra.
    """
    built: set[str] = set()
    while True:
        options = ["--dry-run", "--ignore-installed", "--report=-"]
        target = [f"--target={folder}", f"--find-links={folder}"]
        run = _pip("install", *options, *target, *_machine(python), *requirements)
        if run.returncode == 0:
            if no_extra := _NO_EXTRA.search(run.stderr):
                raise ValueError(f"--extras: relattn has no extra {no_extra[1]!r}")
            packages = json.loads(run.stdout)["install"]
            found = [package["metadata"] for package in packages]
            return [(metadata["name"], metadata["version"]) for metadata in found]
        no_wheel = _NO_WHEEL.search(run.stderr)
        missing = no_wheel and no_wheel[1].strip()
        if missing is None or missing in built:
            raise _failure(run.stderr)
        built.add(missing)
        with tempfile.TemporaryDirectory() as wheels:
            _pip("wheel", "--no-deps", f"--wheel-dir={wheels}", missing)
            for wheel in Path(wheels).glob("*-none-any.whl"):
                shutil.move(wheel, folder / wheel.name)


def fetch(packages: Sequence[str], python: str, folder: Path) -> None:
    """Downloads the wheels of packages that the folder does not have.

    Args:
        packages: Names and versions, such as ``"grain==0.2.18"``.
        python: Version of Python.
        folder: Where to write the wheels.

    Raises:
        ValueError: If pip cannot download one.
    """
    options = ["--no-deps", f"--dest={folder}", f"--find-links={folder}"]
    run = _pip("download", *options, *_machine(python), *packages)
    if run.returncode:
        raise _failure(run.stderr)


def _names_in(text: str) -> set[str]:
    """Reads the names of packages, normalised, from the output of pip.

    Example:
        >>> sorted(_names_in("ml_collections==1.1.0"))
        ['ml-collections']
    """
    names = set()
    for line in text.splitlines():
        # Comments, and packages in a folder or repository.
        if not line.strip() or line.startswith(("#", "-e ")):
            continue
        match = _INSTALLED.match(line)
        if match is None:
            raise ValueError(f"{shorten(line)} is not name==version")
        names.add(normalise(match[1]))
    return names


def normalise(name: str) -> str:
    """Returns the one spelling of a package's name that pip compares.

    Example:
        >>> normalise("ml_collections")
        'ml-collections'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def choose(
    packages: Sequence[tuple[str, str]], installed: Collection[str]
) -> list[str]:
    """Leaves out the packages that the machine has.

    Args:
        packages: Names and versions.
        installed: Normalised names.

    Returns:
        ``name==version`` of the others.

    Example:
        >>> choose([("jax", "0.12.0"), ("Grain", "0.2.18")], {"jax"})
        ['Grain==0.2.18']
    """
    return [
        f"{name}=={version}"
        for name, version in packages
        if normalise(name) not in installed
    ]


def _machine(python: str) -> list[str]:
    platforms = [f"--platform={platform}" for platform in _PLATFORMS]
    return [
        *platforms,
        f"--python-version={python}",
        "--implementation=cp",
        "--only-binary=:all:",
    ]


def _failure(stderr: str) -> ValueError:
    """Returns an error with the last one that pip wrote."""
    errors = re.findall(r"^ERROR: (.+)", stderr, re.MULTILINE)
    return ValueError(f"pip failed: {command.one_line((errors or [stderr])[-1])}")


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    quiet = ["--quiet", "--disable-pip-version-check"]
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments, *quiet],
        capture_output=True,
        text=True,
    )


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Fetches the wheels."""
    parser = command.Parser("python -m tools.offline", __doc__)
    add = parser.add_argument
    add("--python", required=True, help="the machine's version, such as 3.12")
    add("--installed", default="", help="a file: what pip lists on the machine")
    add("--extras", default="train", help="extras of relattn, separated by commas")
    add("--also", default="", help="other packages, separated by commas")
    add("--output", required=True, help="output folder")
    given = parser.parse_args(argv)
    if not re.fullmatch(r"3\.\d+", given.python):
        raise ValueError(f"--python={given.python}: pass a version such as 3.12")
    folder = usable_folder(given.output, "--output")
    installed = {"relattn"}
    if given.installed:
        try:
            installed |= _names_in(Path(given.installed).read_text("utf-8"))
        except ValueError as error:
            raise ValueError(
                f"--installed={given.installed}: {error}: pass the output of pip list "
                "--format=freeze"
            ) from error
    requirements = [f"relattn[{given.extras}] @ {ROOT.as_uri()}"]
    also = [name.strip() for name in given.also.split(",")]
    for name in filter(None, also):
        if name.startswith("-"):
            raise ValueError(f"--also={given.also}: {name} is not a package")
        requirements.append(name)
    print("pip chooses and downloads the packages, which takes minutes")
    packages = choose(resolve(requirements, given.python, folder), installed)
    if packages:
        fetch(packages, given.python, folder)
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(packages)} packages, {size / 1e6:,.0f} MB, in {folder}")


if __name__ == "__main__":
    main()
