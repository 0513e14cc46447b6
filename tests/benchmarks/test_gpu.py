"""The benchmark of GPUs, small and on a CPU."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import device_time, gpu
from benchmarks.hlo import count_executed

KERNEL = "causal_linear@4096x16, float32"
ACCURACY = "accuracy:causal linear, positive features"
STEP = "step:gpt_a160_self_attention"


def run(folder, *rows, minutes=9):
    only = ";".join(rows)
    gpu.main([f"--output={folder}", f"--only={only}", f"--minutes={minutes}"])
    return json.loads((folder / "gpu.json").read_text())


def test_every_call_is_executed():
    def executed(calls):
        function = device_time.repeat(lambda x: jnp.sin(x @ x), calls)
        compiled = jax.jit(function).lower(jnp.ones((17, 17))).compile()
        return count_executed(compiled.as_text())[0]

    one, eleven = executed(1), executed(11)
    assert eleven >= 11 * max(1, one - 2)


@pytest.mark.slow
def test_rows_are_measured_once_and_failures_again(tmp_path, capsys, monkeypatch):
    def refuse(card):
        raise NotImplementedError("not on this card")

    refused = "accuracy:routing"
    monkeypatch.setitem(gpu.ROWS, refused, refuse)
    rows = run(tmp_path, KERNEL, refused)["rows"]
    assert rows[KERNEL]["forward_backward_ms"] > 0
    assert rows[KERNEL]["forward_share"] > 0
    assert rows[refused] == {"failed": "NotImplementedError: not on this card"}
    capsys.readouterr()
    assert run(tmp_path, KERNEL, refused)["rows"][KERNEL] == rows[KERNEL]
    out = capsys.readouterr().out
    assert f"{refused}: failed" in out
    assert KERNEL not in out


@pytest.mark.slow
def test_errors_are_those_of_the_dtype(tmp_path):
    errors = run(tmp_path, ACCURACY)["rows"][ACCURACY]
    assert errors["float32, highest precision"]["gradients"] < 2e-5
    assert 2e-5 < errors["bfloat16"]["values"] < 2e-2


@pytest.mark.slow
def test_training_steps(tmp_path):
    filled = f"{STEP}, filled"
    rows = run(tmp_path, STEP, filled)["rows"]
    assert rows[STEP]["examples_per_s"] > 0
    # At first the published batch had not been measured.
    rows = run(tmp_path, STEP, filled)["rows"]
    assert rows[filled]["batch_size"] >= rows[STEP]["batch_size"]


def test_stops_in_time_and_keeps_to_one_machine(tmp_path, capsys):
    record = run(tmp_path, minutes=0)
    assert record["rows"] == {}
    assert set(record["ceilings"]) == {"copy", "float32", "tf32", "bfloat16"}
    record["machine"]["device"] = "another"
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path)
    assert capsys.readouterr().err == (
        f"error: {path} was measured on another machine or with other versions: "
        "choose another --output\n"
    )


def test_a_damaged_file_is_refused(tmp_path, capsys):
    record, path = run(tmp_path, minutes=0), tmp_path / "gpu.json"
    ceilings = record["ceilings"]
    for damaged, message in (
        (json.dumps(record)[:-9], "is not JSON ("),
        (record | {"rows": {"accuracy:routing": None}}, "has rows.accuracy:routing="),
        (record | {"ceilings": {"copy": 1e9}}, "has no ceilings.float32"),
        (record | {"ceilings": ceilings | {"copy": 0}}, "has ceilings.copy=0"),
    ):
        path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
        with pytest.raises(SystemExit, match="2"):
            run(tmp_path)
        err = capsys.readouterr().err
        assert err.startswith(f"error: {path} {message}")
        assert err.endswith(": delete it, or choose another --output\n")
    # A kernel may have given NaN.
    errors = {"bfloat16": {"values": float("nan"), "gradients": float("inf")}}
    path.write_text(json.dumps(record | {"rows": {ACCURACY: errors}}))
    rows = run(tmp_path, minutes=0)["rows"]
    assert np.isnan(rows[ACCURACY]["bfloat16"]["values"])
    run(tmp_path, ACCURACY)
    out = capsys.readouterr().out
    assert out.endswith(
        "has these rows: choose another --output to measure them again\n"
    )


def test_names_of_rows_are_unique():
    assert len(list(gpu._rows())) == len(gpu.ROWS)
