"""Home directories that there are, and those that there are not."""

import pathlib

import pytest
from ml_collections import ConfigDict

from relattn.command import is_user_error
from relattn.data import load_data, load_tokenizer
from relattn.data.paths import expand
from tests.unprivileged import public_folder, without_privileges

NOBODY = "~no.such.user/x"


def test_a_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/a/home")
    assert expand("~/x", "data_dir") == pathlib.Path("/a/home/x")
    assert expand("x/~", "data_dir") == pathlib.Path("x/~")


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "a", "source": "folder"},
        {"name": "mnist", "source": "tfds"},
        {"source": "text", "context_length": 3},
    ],
)
def test_a_home_that_is_not_known(keys):
    with pytest.raises(ValueError, match=f"data_dir={NOBODY} begins with a home dir"):
        load_data(ConfigDict({**keys, "data_dir": NOBODY}))


@pytest.mark.parametrize("inside", [True, False])
def test_data_that_may_not_be_read(inside):
    keys = {"source": "text", "context_length": 3}
    with public_folder() as folder:
        data = folder / "data"
        data.mkdir()
        (data / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 256}')
        (data / "train.bin").write_bytes(bytes(100))
        closed = data / "train.bin" if inside else data
        closed.chmod(0)
        problem = r"data/\w+\.\w+ cannot be read \(Permission denied\): make it"
        with without_privileges(), pytest.raises(OSError, match=problem) as error:
            load_data(ConfigDict({**keys, "data_dir": str(data)}))
        assert is_user_error(error.value)


def test_a_vocabulary_in_a_home_that_is_not_known():
    pytest.importorskip("tiktoken")
    with pytest.raises(ValueError, match=f"bpe_dir={NOBODY} begins with a home dir"):
        load_tokenizer("gpt2", NOBODY)
