"""Fetching wheels, with a pip that fetches nothing."""

import json
import subprocess

import pytest

from tools import offline

RESOLVED = [("jax", "0.12.0"), ("ml_collections", "1.1.0"), ("promise", "2.3")]


@pytest.fixture
def calls(monkeypatch):
    """Records the calls of pip, which has no wheel of promise until it builds one."""
    calls = []

    def pip(command, *arguments):
        calls.append((command, *arguments))
        built = any(call[0] == "wheel" for call in calls)
        if command == "install" and not built:
            text = "ERROR: No matching distribution found for promise"
            return subprocess.CompletedProcess([], 1, "", text)
        metadata = [{"metadata": {"name": n, "version": v}} for n, v in RESOLVED]
        report = json.dumps({"install": metadata})
        return subprocess.CompletedProcess([], 0, report, "")

    monkeypatch.setattr(offline, "_pip", pip)
    return calls


def test_fetches_what_the_machine_lacks_and_builds_what_has_no_wheel(calls, tmp_path):
    listed = tmp_path / "packages.txt"
    listed.write_text("jax==0.11.2\nnumpy==2.5.0\n")
    offline.main(["--python=3.12", f"--installed={listed}", f"--output={tmp_path}"])
    assert [call[0] for call in calls] == ["install", "wheel", "install", "download"]
    assert calls[1][-1] == "promise"
    assert calls[-1][-2:] == ("ml_collections==1.1.0", "promise==2.3")
    assert "--python-version=3.12" in calls[-1]


def test_errors_are_a_sentence(monkeypatch, tmp_path, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR:\n no network")
    monkeypatch.setattr(offline, "_pip", lambda *_: failed)
    for option, message in (
        ("--python=three", "--python=three: give a version such as 3.12"),
        ("--python=3.12", "pip failed: ERROR: no network"),
    ):
        with pytest.raises(SystemExit, match="2"):
            offline.main([option, f"--output={tmp_path}"])
        assert capsys.readouterr().err == f"error: {message}\n"
