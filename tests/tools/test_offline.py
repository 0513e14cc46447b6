"""Fetching wheels, with a pip that fetches nothing."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tools import offline

RESOLVED = [("jax", "0.12.0"), ("ml_collections", "1.1.0"), ("promise", "2.3")]


# The second one serves this machine only.
WHEELS = ["promise-2.3-py3-none-any.whl", "promise-2.3-cp311-cp311-linux_x86_64.whl"]


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of pip, which has no wheel of promise until it builds one."""
    calls = []

    def pip(command, *arguments):
        calls.append((command, *arguments))
        built = any(call[0] == "wheel" for call in calls)
        if command == "wheel":
            folder = Path(arguments[1].removeprefix("--wheel-dir="))
            for name in WHEELS:
                (folder / name).touch()
        if command == "install" and not built:
            text = "ERROR: No matching distribution found for promise>=2; extra == 'a'"
            return subprocess.CompletedProcess([], 1, "", text)
        metadata = [{"metadata": {"name": n, "version": v}} for n, v in RESOLVED]
        report = json.dumps({"install": metadata})
        return subprocess.CompletedProcess([], 0, report, "")

    monkeypatch.setattr(offline, "_pip", pip)
    return calls


def test_fetches_what_the_machine_lacks_and_builds_what_has_no_wheel(calls, tmp_path):
    listed = tmp_path / "packages.txt"
    listed.write_text("# of pip\njax==0.11.2\nnumpy @ file:///numpy.whl\n")
    offline.main(["--python=3.12", f"--installed={listed}", f"--output={tmp_path}"])
    assert [call[0] for call in calls] == ["install", "wheel", "install", "download"]
    assert calls[1][-1] == "promise>=2"
    assert [path.name for path in tmp_path.glob("*.whl")] == WHEELS[:1]
    assert calls[-1][-2:] == ("ml_collections==1.1.0", "promise==2.3")
    assert "--python-version=3.12" in calls[-1]


def test_errors_are_a_sentence(monkeypatch, tmp_path, capsys):
    text = "WARNING: slow\nERROR: no such version\nERROR: no network\n"
    failed = subprocess.CompletedProcess([], 1, "", text)
    monkeypatch.setattr(offline, "_pip", lambda *_: failed)
    listed, binary = tmp_path / "list.txt", tmp_path / "numpy.whl"
    listed.write_text("Package Version\n------- -------\n")
    binary.write_bytes(b"\xd0PK")
    of_pip = ": pass the output of pip list --format=freeze"
    for option, message in (
        ("--python=three", "--python=three: pass a version such as 3.12"),
        ("--also=", "pip failed: no network"),
        ("--also=jax, -r x", "--also=jax, -r x: -r x is not a package"),
        (
            f"--installed={listed}",
            f"--installed={listed}: 'Package Version' is not name==version{of_pip}",
        ),
        (f"--installed={binary}", f"codec can't decode byte 0xd0 in .*{of_pip}"),
    ):
        python = [] if option.startswith("--python") else ["--python=3.12"]
        with pytest.raises(SystemExit, match="2"):
            offline.main([option, *python, f"--output={tmp_path}"])
        assert re.search(f"{message}\n$", capsys.readouterr().err)


def test_an_unknown_extra_is_refused(monkeypatch, tmp_path, capsys):
    warning = "WARNING: relattn 0.1.0 does not provide the extra 'trian'"
    done = subprocess.CompletedProcess([], 0, '{"install": []}', warning)
    monkeypatch.setattr(offline, "_pip", lambda *_: done)
    with pytest.raises(SystemExit, match="2"):
        offline.main(["--python=3.12", "--extras=trian", f"--output={tmp_path}"])
    err = capsys.readouterr().err
    assert err == "error: --extras: relattn has no extra 'trian'\n"
