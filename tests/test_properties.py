"""Property tests: any input is used, or rejected with a short one-line error."""

import contextlib
import inspect
import io
import json
import keyword
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from ml_collections import ConfigDict
from PIL import Image

from relattn import spec
from relattn.command import is_user_error
from relattn.data import ImageData, input_shape, load_data
from relattn.data.prepare_text import prepare_files
from relattn.data.tokenizers import load_tokenizer
from relattn.nn.registry import ATTENTIONS, POSITIONS, SET_BY_MODEL, build
from relattn.spec import read_arguments
from relattn.training import check_config, default_config
from relattn.training.config import flatten
from relattn.training.config_file import read_config

MAX_MESSAGE = 1500
names = st.from_regex(r"[a-zA-Z_]\w{0,11}", fullmatch=True).filter(
    # Python normalises non-ASCII identifiers.
    lambda name: name.isascii() and not keyword.iskeyword(name)
)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=20)
literals = st.recursive(
    scalars | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
values = scalars | st.floats() | st.lists(scalars) | st.dictionaries(names, scalars)
fragments = st.sampled_from(
    [
        "favor",
        "a",
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        "=",
        ",",
        "+",
        "-",
        ".",
        "'",
        "\\",
        "f'",
    ]
    + [
        "x=",
        "1",
        "1e999",
        "lambda: ",
        "__import__('os')",
        "**",
        ":=",
        "\n",
        "\x00",
        "²",
    ]
    + [" if ", " for x in ", "await ", "0x", "...", '"""', "#", ";", "\ud800", " "]
)
texts = st.text() | st.lists(fragments, max_size=12).map("".join)


@contextlib.contextmanager
def allow_user_error(*errors):
    """Allows user errors of the package; their message must be one short line."""
    raised = None
    try:
        yield
    except (ValueError, *errors) as error:
        raised = error
    if raised is not None:
        message = str(raised)
        assert 0 < len(message) < MAX_MESSAGE
        assert len(message.splitlines()) == 1
        assert is_user_error(raised)


def write_spec(name, options):
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"


@given(names, st.dictionaries(names, literals, max_size=3))
def test_parse_inverts_writing_a_spec(name, options):
    text = write_spec(name, options)
    assume(len(text) <= spec.MAX_LENGTH)
    assert spec.parse(text) == (name, options)
    assert spec.terms(text) == [text]
    assert spec.terms(f"{name} + {name}") == [name, name]


@given(texts)
@example("(" * 10_000 + ")" * 10_000)
@example("a" * 1_000_000)
def test_any_text_parses_or_raises(text):
    with allow_user_error():
        name, options = spec.parse(text)
        assert name.isidentifier() and all(key.isidentifier() for key in options)
    with allow_user_error():
        spec.resolve(text, ATTENTIONS, "attention")
    with allow_user_error():
        build("softmax", text, dim=6, num_heads=2, num_layers=1)
    with allow_user_error():
        read_arguments(text, "configs/x.py", {"size": ["A/7"]}, options={"n": int})
    with allow_user_error():
        read_arguments(f"n={text}", "configs/x.py", {}, options={"n": int})


@st.composite
def specs(draw, table):
    """Draws a spec: an entry of a table with one of its options, of any value."""
    name = draw(st.sampled_from(sorted(table)))
    known = sorted({"x", *inspect.signature(table[name]).parameters} - {*SET_BY_MODEL})
    keys = draw(st.lists(st.sampled_from(known), max_size=1))
    small = st.integers(1, 9) | st.sampled_from([0, -1.5, 1e30, "none", "qk", True])
    return write_spec(name, {key: draw(small | literals) for key in keys})


@given(specs(ATTENTIONS), specs(POSITIONS), st.booleans())
def test_any_options_build_or_raise(attention, position, causal):
    with allow_user_error():
        sizes = {"dim": 12, "num_heads": 2, "num_layers": 2}
        make, _ = build(attention, position, **sizes, causal=causal)
        assert make(layer=0).num_heads == 2


@given(
    st.dictionaries(
        st.sampled_from([*flatten(default_config()), "x.y"]),
        st.integers(1, 9) | st.sampled_from([0.5, "adam", True]) | values,
    )
)
@example({"optimizer.learning_rate": float("nan")})
@example({"seed": 10**5000})
@example({"optimizer.b1": -(10**400)})
def test_any_config_values_are_valid_or_raise(changes):
    config = default_config().to_dict()
    for key, value in changes.items():
        *path, last = key.split(".")
        section = config
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    with allow_user_error():
        check_config(ConfigDict(config))


KEYS = ["seed", "progress", "batch_size", "optimizer.name", "optimizer.learning_rate"]
KEYS += ["model.attention", "model.patch_size", "data.name", "model", "no.such.key"]


few = st.sampled_from(["1", "7", "0.5", "adam", "favor", "True", "(2, 2)", "{'a': 1}"])


@given(st.sampled_from(KEYS), few | texts | scalars.map(str))
def test_any_override_is_valid_or_raises(key, text):
    with allow_user_error():
        config = read_config("configs/demo.py", [f"--config.{key}={text}"])
        check_config(config)


def encode(size, mode, file_format):
    file = io.BytesIO()
    Image.new(mode, size, 100).save(file, file_format)
    return file.getvalue()


good_images = st.builds(
    encode, st.just((5, 3)), st.just("RGB"), st.sampled_from(["PNG", "JPEG"])
)
other_images = st.builds(
    encode,
    st.sampled_from([(5, 3), (3, 5), (1, 1)]),
    st.sampled_from(["L", "RGB", "P"]),
    st.sampled_from(["PNG", "GIF"]),
)


@st.composite
def damaged(draw, files):
    """Draws a file with changed, deleted or cut bytes."""
    content = bytearray(draw(files))
    for _ in range(draw(st.integers(0, 3))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, 2 * len(content)))
    return bytes(content[:cut] + content[cut + 1 :])


@given(
    st.lists(good_images, min_size=3, max_size=5),
    st.none() | other_images | damaged(good_images) | damaged(other_images),
    st.sampled_from(["a", "b", "c"]),
)
def test_any_files_load_as_images_or_raise(files, last, test_class):
    files = files if last is None else [*files, last]
    with tempfile.TemporaryDirectory() as folder, allow_user_error(OSError):
        for index, content in enumerate(files):
            subfolders = (f"test/{test_class}", "train/b", *["train/a"] * len(files))
            subfolder = subfolders[index]
            file = Path(folder, subfolder, f"{index}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        keys = {"name": "a", "source": "folder", "data_dir": folder}
        data = load_data(ConfigDict(keys))
        assert data.info.num_train + len(data.eval_splits["test"]) == len(files)
        # Images of several sizes are read during training.
        if isinstance(data, ImageData):
            assert data.train.images.shape[1:] == data.test.images.shape[1:]
            assert data.test.labels.max() < data.num_classes


whole = st.integers() | st.sampled_from([-(10**2000), 2**70, 10**2000])


@given(
    whole | st.integers(0, 2),
    whole,
    st.sampled_from([0, 4, 5, 9, -7, 10**6, 10**2000]),
    st.integers(max_value=99) | st.just(-(10**2000)),
    st.sampled_from(["", "static", "dynamic", "dynamic_once"]),
)
@example(1, -1, 5, 5, "")
@example(1, 0, 10**6, 5, "static")
@example(1, 0, 5, -4, "")
def test_any_image_settings_are_valid_or_raise(
    num_validation, split_seed, canvas, image_size, placement
):
    with tempfile.TemporaryDirectory() as folder, allow_user_error():
        for index, part in enumerate(["test/a", "train/a", "train/b", "train/a"]):
            file = Path(folder, part, f"{index}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encode((5, 3), "L", "PNG"))
        config = ConfigDict({"name": "a", "source": "folder", "data_dir": folder})
        config.update(num_validation=num_validation, split_seed=split_seed)
        config.update(canvas=canvas, image_size=image_size, placement=placement)
        data = load_data(config)
        assert len(data.validation) == num_validation
        assert input_shape(config, data.info) == (image_size, image_size, 1)


def as_file(tokens):
    return np.array(tokens, "<u2").tobytes()


good_tokens = st.lists(st.integers(0, 255), min_size=4, max_size=40).map(as_file)
other_tokens = st.lists(st.integers(0, 65535), max_size=9).map(as_file) | st.binary()
fields = st.fixed_dictionaries(
    {},
    optional={
        "tokenizer": st.sampled_from(["bytes", "gpt2"]) | values,
        "vocab_size": st.sampled_from([256, 50257]) | values,
        "num_tokens": st.dictionaries(st.sampled_from(["train.bin"]), values) | values,
        "origin": values,
    },
)
metas = (fields | values).map(lambda meta: json.dumps(meta).encode()) | st.binary()


@given(
    good_tokens,
    good_tokens | other_tokens,
    st.none() | st.just(b'{"tokenizer": "bytes", "vocab_size": 256}') | metas,
    st.sampled_from(["bytes", "bytes", ""]),
)
def test_any_files_load_as_tokens_or_raise(train, validation, meta, tokenizer):
    with tempfile.TemporaryDirectory() as folder, allow_user_error(OSError):
        files = {"train.bin": train, "val.bin": validation, "meta.json": meta}
        for name, content in files.items():
            if content is not None:
                Path(folder, name).write_bytes(content)
        keys = {"source": "text", "data_dir": folder, "context_length": 3}
        data = load_data(ConfigDict({**keys, "tokenizer": tokenizer}))
        batches = [data.train.draw(2, seed=0, step=0), *data.validation.batches(2)]
        for batch in batches:
            assert batch["tokens"].min() >= 0
            assert max(batch["tokens"].max(), batch["label"].max()) < 50257


@given(st.lists(st.binary() | st.text().map(str.encode), min_size=1, max_size=3))
def test_any_files_are_tokenized_or_raise(contents):
    with tempfile.TemporaryDirectory() as folder, allow_user_error(OSError):
        files = [Path(folder, f"{index}.txt") for index in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        tokenizer = load_tokenizer("bytes")
        meta = prepare_files(files, Path(folder), tokenizer, val_fraction=0.3)
        tokens = [
            np.fromfile(Path(folder, name), "<u2") for name in ("train.bin", "val.bin")
        ]
        assert [len(part) for part in tokens] == list(meta.num_tokens.values())
        text = b"".join(contents).decode()
        assert tokenizer.decode(np.concatenate(tokens)) == text


def test_allow_user_error_checks_message_and_origin():
    with pytest.raises(AssertionError, match="assert 2 == 1"), allow_user_error():
        raise ValueError("two\nlines")
    with (
        pytest.raises(AssertionError, match=f"{MAX_MESSAGE} < {MAX_MESSAGE}"),
        allow_user_error(),
    ):
        raise ValueError("a" * MAX_MESSAGE)
    with pytest.raises(AssertionError, match="is_user_error"), allow_user_error():
        raise ValueError("of a test")
