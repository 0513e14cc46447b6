"""Home directories that there are, and those that there are not."""

import pathlib

import pytest
from ml_collections import ConfigDict

from relattn.data import load_data, load_tokenizer
from relattn.data.paths import expand

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


def test_a_vocabulary_in_a_home_that_is_not_known():
    pytest.importorskip("tiktoken")
    with pytest.raises(ValueError, match=f"bpe_dir={NOBODY} begins with a home dir"):
        load_tokenizer("gpt2", NOBODY)
