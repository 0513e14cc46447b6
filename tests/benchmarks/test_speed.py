"""The speed benchmark: kernels, rows, figure and errors."""

import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import measure, speed, steps
from benchmarks.speed_cases import CASES, Case, Sizes
from relattn.data import load_data
from relattn.training.config_file import read_config
from relattn.training.seeds import make_task

SIZES = {
    "length": 15,
    "batch": 1,
    "num_heads": 2,
    "head_dim": 5,
    "clip": 2,
    "num_features": 7,
}


def _output(kernel):
    function, inputs = CASES[kernel].make(Sizes(**SIZES))
    return np.asarray(jax.jit(function)(*inputs))


@pytest.mark.quick("softmax-dense_softmax", "causal_linear-scan_per_token")
@pytest.mark.parametrize(
    ("kernel", "alternative"),
    [
        ("softmax", "dense_softmax"),
        ("causal_linear", "scan_per_token"),
        ("toeplitz", "pairwise_toeplitz"),
        ("toeplitz_by_fft", "toeplitz_by_pairs"),
        ("causal_toeplitz", "causal_pairwise_toeplitz"),
        ("banded", "gather_band"),
        ("translution", "gather_translution"),
        ("causal_translution", "gather_causal_translution"),
        ("lor_translution", "gather_lor_translution"),
        ("causal_lor_translution", "gather_causal_lor_translution"),
    ],
)
def test_alternatives_equal_the_kernels(kernel, alternative):
    np.testing.assert_allclose(_output(kernel), _output(alternative), atol=1e-5)


def test_grids_are_nearly_square():
    assert Sizes(length=1024).grid == (32, 32)
    assert Sizes(length=35).grid == (5, 7)
    assert Sizes(length=13).grid == (1, 13)


IN_JAX = [
    name
    for name, case in CASES.items()
    if case.framework == "jax" and not case.requires
]


@pytest.mark.quick("linear", "causal_toeplitz")
@pytest.mark.parametrize("kernel", IN_JAX)
def test_all_kernels_are_measured(kernel):
    row = measure.measure(kernel, SIZES, repeats=2)
    for kind in ("forward", "forward_backward"):
        assert 0 < row[f"{kind}_fastest_ms"] <= row[f"{kind}_ms"]
        assert row[f"{kind}_repeats"] == 2
    assert row["machine"]["cores"] >= 1
    assert {"cpu", "platform", "device", "jax", "python"} <= set(row["machine"])


def test_memory_is_the_peak_beyond_the_use_before(monkeypatch):
    peaks = iter([12e6, 4e6])
    run = (lambda: None, 9_000_000)
    runs = dict.fromkeys(("forward", "forward_backward"), run)
    monkeypatch.setattr(measure, "_prepare_jax", lambda *_: runs)
    monkeypatch.setattr(measure, "_start_peak", lambda *_: 5_000_000)
    monkeypatch.setattr(measure, "peak_memory", lambda *_: int(next(peaks)))
    row = measure.measure("linear", SIZES, repeats=1)
    assert row["forward_memory_mb"] == 7.0
    # Memory is never negative, even if the system did not reset the peak.
    assert row["forward_backward_memory_mb"] == 0
    # A GPU's peak cannot be reset, and has the compiler's tests.
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=dict, device_kind="H200")
    monkeypatch.setattr(measure, "peak_memory", lambda *_: 12_000_000)
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    row = measure.measure("linear", SIZES, repeats=1)
    assert row["forward_memory_mb"] == row["forward_backward_memory_mb"] == 9.0


def test_pytorch_is_measured_on_the_device_of_jax(monkeypatch):
    placed = []
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: 1_000_000,
        max_memory_allocated=lambda: 4_000_000,
    )
    torch = types.SimpleNamespace(
        float32="float32",
        cuda=cuda,
        tensor=lambda x, *, device, **_: placed.append(device),
        nn=types.SimpleNamespace(
            functional=types.SimpleNamespace(scaled_dot_product_attention=print)
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    CASES["softmax_pytorch"].make(Sizes(**SIZES))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    CASES["softmax_pytorch"].make(Sizes(**SIZES))
    assert placed == ["cpu"] * 3 + ["cuda"] * 3
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"a": 0})
    base = measure._start_peak(gpu, "torch")
    assert measure.peak_memory(gpu, "torch") - base == 3_000_000


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the system cannot reset peaks"
)
def test_peak_counts_from_the_start():
    device = jax.devices("cpu")[0]
    largest = np.ones(8_000_000)
    del largest
    base = measure._start_peak(device)
    smaller = np.ones(4_000_000)
    # A few pages may be reused.
    peak = measure.peak_memory(device) - base
    assert 0.99 * smaller.nbytes <= peak < 1.5 * smaller.nbytes


def test_measure_without_backward():
    row = measure.measure("linear", SIZES, repeats=1, backward=False)
    assert row["forward_ms"] > 0
    assert "forward_backward_ms" not in row


def test_kernel_that_exceeds_memory_is_skipped():
    row = measure.measure("dense_softmax", SIZES | {"length": 10**7})
    assert "GB for pairs do not fit in the" in row["skipped"]
    assert "forward_ms" not in row


def test_missing_modules_are_named(monkeypatch):
    case = Case(CASES["linear"].make, requires=("no_such_module",))
    monkeypatch.setitem(CASES, "absent", case)
    row = measure.measure("absent", SIZES)
    assert row["skipped"] == "no_such_module not installed"


@pytest.mark.slow
def test_measure_apart_returns_a_row_or_a_reason():
    row = speed.measure_apart("banded", Sizes(**SIZES), repeats=1)
    assert row["kernel"] == "banded"
    assert row["length"] == 15
    assert row["forward_backward_ms"] > 0
    row = speed.measure_apart("banded", Sizes(**SIZES | {"dtype": "float7"}))
    assert "float7" in row["skipped"]


@pytest.fixture
def measured(monkeypatch):
    """Replaces measurements and lists the requests."""
    asked = []

    def measure_apart(kernel, sizes, *, repeats, backward):
        asked.append((kernel, sizes, repeats, backward))
        row = {"kernel": kernel, "length": sizes.length}
        if kernel == "softmax" and sizes.length > 100:
            return row | {"skipped": "too long"}
        time = 1.0 + len(kernel) * sizes.length
        row |= {"forward_ms": time, "forward_memory_mb": 3.0}
        if backward:
            row |= {"forward_backward_ms": 3 * time, "forward_backward_memory_mb": 5.0}
        return row

    monkeypatch.setattr(speed, "measure_apart", measure_apart)
    return asked


def test_command_writes_files_and_prints_a_table(tmp_path, capsys, measured):
    speed.main(
        [
            "--kernel=linear,banded",
            "--against=softmax",
            "--lengths=128,64",
            "--batch=3",
            "--dtype=bfloat16",
            "--repeats=7",
            f"--output={tmp_path / 'new'}",
        ]
    )
    assert [(name, sizes.length) for name, sizes, *_ in measured] == [
        (name, length)
        for length in (64, 128)
        for name in ("linear", "banded", "softmax")
    ]
    assert measured[0][1:] == (Sizes(length=64, batch=3, dtype="bfloat16"), 7, True)
    lines = (tmp_path / "new" / "speed.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    expected = (1 + 7 * 64) / (1 + 6 * 64)
    assert rows[0]["ratios"]["softmax"]["forward"] == pytest.approx(expected)
    assert rows[2]["ratios"] == rows[3]["ratios"] == {}
    assert (tmp_path / "new" / "speed.png").stat().st_size > 1000
    out = capsys.readouterr().out
    assert "softmax 1.17x" in out
    assert "skipped: too long" in out


def test_command_without_backward(tmp_path, capsys, measured):
    speed.main(
        ["--kernel=linear", "--lengths=64", "--no-backward", f"--output={tmp_path}"]
    )
    assert not measured[0][3]
    assert (tmp_path / "speed.png").exists()
    assert "softmax 1.17x" in capsys.readouterr().out


def test_measurements_of_another_command_are_kept(tmp_path, capsys, measured):
    (tmp_path / "speed.jsonl").write_text("{}\n")
    with pytest.raises(SystemExit, match="2"):
        speed.main([f"--output={tmp_path}"])
    assert "has other measurements: delete it, or" in capsys.readouterr().err
    assert (tmp_path / "speed.jsonl").read_text() == "{}\n"
    assert not measured


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--kernel=linaer", "no kernel 'linaer': did you mean 'linear'?"),
        ("--against=softmx", "did you mean 'softmax'?"),
        ("--lengths=64,-1", "expected a positive integer, got '-1'"),
        ("--batch=0", "expected a positive integer, got '0'"),
        ("--dtype=float64", "invalid choice: 'float64'"),
        ("--model=vti", "no model 'vti': did you mean 'vit'?"),
        ("--model=vit", "--model and --against=torch belong together"),
        ("--against=torch", "--model and --against=torch belong together"),
        ("--model=vit --against=torch --batch=64", "--batch is for kernels: leave it"),
    ],
)
def test_invalid_arguments_are_rejected(argument, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        speed.main(argument.split())
    assert message in capsys.readouterr().err


def test_command_compares_training_steps_with_pytorch(tmp_path, capsys, monkeypatch):
    asked = []

    def run_apart(module, *, model, cores):
        asked.append((module, model, cores))
        if model == "performer":
            return {"skipped": "no torch"}
        return {"relattn_ms": 1234.5, "torch_ms": 1028.75, "ratio": 1.2}

    monkeypatch.setattr(speed, "_run_apart", run_apart)
    monkeypatch.setattr(speed, "describe_cpu", lambda: {"cores": 3})
    output = f"--output={tmp_path}"
    speed.main(["--model=vit,performer", "--against=torch", output])
    assert asked == [
        ("benchmarks.steps", model, cores)
        for model in ("vit", "performer")
        for cores in (1, 3)
    ]
    lines = (tmp_path / "speed.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["cores"] for row in rows] == [1, 3, 1, 3]
    out = capsys.readouterr().out
    assert "1,234.5     1,028.8  1.20" in out
    assert "skipped: no torch" in out


@pytest.mark.parametrize("model", steps.MODELS)
def test_models_in_pytorch_have_as_many_parameters(model):
    pytest.importorskip("torch")
    config = read_config(steps.MODELS[model], [])
    side = config.data.image_size // config.model.patch_size
    network = steps.make_torch_model(config.model, (side, side))
    task = make_task(config, load_data(config.data).info)
    params = jax.eval_shape(task.create_state).params
    # A sum, because equal layers of relattn's ViT share one array.
    expected = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert sum(leaf.numel() for leaf in network.parameters()) == expected
