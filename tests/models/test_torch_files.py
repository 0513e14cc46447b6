"""Files of PyTorch are read, or refused in one sentence."""

import json
import warnings

import numpy as np
import pytest

from relattn.convert import read_checkpoint
from tests.helpers.sentences import assert_refused

# An option.
torch = pytest.importorskip("torch")
# Sparse and quantized tensors may change in later versions.
warnings.filterwarnings("ignore")
pytestmark = pytest.mark.filterwarnings("ignore")
ONE = torch.ones(2, 3)


def quantized():
    return torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8)


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


REFUSED = {
    "list": [ONE],
    "tensor": ONE,
    "number": 3,
    "none": None,
    "text": "state_dict",
    "nested list": {"a": [ONE]},
    "value number": {"a": ONE, "b": 3},
    "value text": {"a": ONE, "b": "\x1b[31m\n"},
    "value none": {"a": None},
    "integer key": {3: ONE},
    "tuple key": {("a", 1): ONE},
    "none key": {None: ONE},
    "long key": {"x" * 10_000: 3},
    "two models": {"model": {"a": ONE}, "model_ema": {"a": ONE}},
    "state list": {"state_dict": [ONE], "a": 3},
    "state of lists": {"state_dict": {"a": [ONE]}},
    "sparse": {"a": ONE.to_sparse()},
    "csr": {"a": ONE.to_sparse_csr()},
    "quantized": {"a": quantized()},
    "meta": {"a": torch.ones(2, device="meta")},
    "complex": {"a": ONE.to(torch.complex64)},
    "conjugate": {"a": ONE.to(torch.complex64).conj()},
    "expanded": {"a": torch.ones(1).expand(10**12)},
    "expanded double": {"a": torch.ones(1, dtype=torch.float64).expand(10**12)},
    "nested tensor": {"a": nested()},
    **{
        name: {"a": ONE.to(getattr(torch, name))}
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")
        if hasattr(torch, name)
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused(name, tmp_path):
    path = tmp_path / "model.pt"
    torch.save(REFUSED[name], path)
    assert_refused(lambda: read_checkpoint(path), str(path))


@pytest.mark.parametrize("keep", [0, 1, 100, 500])
def test_truncated_files_are_refused(keep, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": ONE}, path)
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(lambda: read_checkpoint(path), str(path))


@pytest.mark.parametrize(
    "tensor, dtype",
    [
        (ONE, "float32"),
        (ONE.T, "float32"),
        (ONE[:, 1:], "float32"),
        (torch.nn.Parameter(ONE), "float32"),
        (ONE.double(), "float64"),
        (ONE.half(), "float32"),
        (ONE.bfloat16(), "float32"),
        (ONE.bool(), "bool"),
        (ONE.int(), "int32"),
        (torch.ones(0, 3), "float32"),
    ],
)
def test_tensors_are_read(tensor, dtype, tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"state_dict": {"a": tensor}, "epoch": 3}, path)
    found = read_checkpoint(path)["a"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.ones(tuple(tensor.shape)))


def test_files_in_parts_are_read(tmp_path):
    names = {"a": "pytorch_model-00001-of-00002.bin"}
    names["b"] = "pytorch_model-00002-of-00002.bin"
    for value, (name, file) in enumerate(names.items()):
        torch.save({name: value * ONE}, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    found = read_checkpoint(index)
    assert {name: x.sum() for name, x in found.items()} == {"a": 0, "b": 6}
    (tmp_path / names["b"]).unlink()
    assert_refused(lambda: read_checkpoint(index), names["b"])
