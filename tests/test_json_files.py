"""JSON that others wrote is read within limits, and refused in one sentence."""

import os

import pytest

from relattn.json_files import MAX_DEPTH, Range, check_json, parse_json, read_json

SCHEMA = {
    "model": {"dim": Range(1, 100), "name?": str},
    "std?": [Range(1e-6, 10, float)],
    "seed?": (int, None),
    "sums?": {"*": str},
}


@pytest.mark.parametrize(
    "data",
    [
        b'{"model": {"dim": 8}}',
        b'{"model": {"dim": 100, "name": "vit", "other": [1, {"a": null}]}}',
        b'{"model": {"dim": 1}, "std": [0.5, 1], "seed": null, "sums": {"a": "b"}}',
        '{"model": {"dim": 1, "name": "größe \\ud800"}, "seed": -3}'.encode(),
    ],
)
def test_json_that_fits_is_read(data, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    assert read_json(path, SCHEMA) == parse_json(data.decode(), "a", SCHEMA)


NOT_JSON = {
    "empty": b"",
    "cut": b'{"model": {"dim": 8}',
    "more": b'{"model": {"dim": 8}} 3',
    "binary": bytes(range(256)),
    "latin-1": '{"model": {"dim": 8, "name": "größe"}}'.encode("latin-1"),
    "utf-16": '{"model": {"dim": 8}}'.encode("utf-16"),
    "bom": b'\xef\xbb\xbf{"model": {"dim": 8}}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "rather deep": b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    "deep objects": b'{"a":' * 900 + b"1" + b"}" * 900,
    "digits": b'{"model": {"dim": 1' + b"0" * 5000 + b"}}",
    "some digits": b'{"model": {"dim": 1' + b"0" * 30 + b"}}",
    "twice": b'{"model": {"dim": 8, "dim": 9}}',
    "long key twice": b'{"%s": 1, "%s": 2}' % (b"a" * 10_000, b"a" * 10_000),
    "line break twice": b'{"a\\nb": 1, "a\\nb": 2}',
    "NaN": b'{"model": {"dim": NaN}}',
    "infinity": b'{"model": {"dim": -Infinity}}',
    "large": b'{"model": {"dim": 1e999}}',
    "tab": b'{"model\t": {"dim": 8}}',
}
OTHER_VALUES = {
    "list": b"[]",
    "null": b"null",
    "string": b'"model"',
    "no model": b"{}",
    "model null": b'{"model": null}',
    "model list": b'{"model": [["dim", 8]]}',
    "no dim": b'{"model": {}}',
    "dim true": b'{"model": {"dim": true}}',
    "dim float": b'{"model": {"dim": 8.0}}',
    "dim string": b'{"model": {"dim": "8"}}',
    "dim zero": b'{"model": {"dim": 0}}',
    "dim large": b'{"model": {"dim": 101}}',
    "name number": b'{"model": {"dim": 8, "name": 3}}',
    "name long": b'{"model": {"dim": 8, "name": [%s]}}' % b",".join([b"1"] * 10_000),
    "std zero": b'{"model": {"dim": 8}, "std": [0.5, 0]}',
    "std number": b'{"model": {"dim": 8}, "std": 0.5}',
    "std string": b'{"model": {"dim": 8}, "std": "aa"}',
    "seed": b'{"model": {"dim": 8}, "seed": 0.5}',
    "sums": b'{"model": {"dim": 8}, "sums": {"a\\nb": 3}}',
    "sums long": b'{"model": {"dim": 8}, "sums": {"%s": 3}}' % (b"a" * 10_000),
    "sums surrogate": b'{"model": {"dim": 8}, "sums": {"\\ud800": 3}}',
}


@pytest.mark.parametrize("name", [*NOT_JSON, *OTHER_VALUES])
def test_other_json_is_refused_in_one_sentence(name, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes({**NOT_JSON, **OTHER_VALUES}[name])
    expected = "is not JSON" if name in NOT_JSON else "(has|must be)"
    with pytest.raises(ValueError, match=f"^{path} {expected}") as raised:
        read_json(path, SCHEMA)
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < len(str(path)) + 300


@pytest.mark.parametrize(
    "data, message",
    [
        (b'{"model": {}}', "has no model.dim, which must be an integer from 1 to 100"),
        (
            b'{"model": {"dim": 8}, "std": [1, 0]}',
            r"has std\[1\]=0, which must be a number from 1e-06 to 10",
        ),
        (
            b'{"model": {"dim": 8}, "seed": true}',
            "has seed=True, which must be an integer or null",
        ),
        (b"[3]", r"has \[3\], which must be an object"),
        (b'{"a": 1,\n "b" 2}', r"is not JSON \(Expecting ':' .*line 2, column 6\)"),
        (b'"\xff"', "byte 1 is not UTF-8"),
    ],
)
def test_message_names_the_key(data, message):
    with pytest.raises(ValueError, match=message):
        parse_json(data, "a.json", SCHEMA)


def test_nan_is_read_where_it_is_allowed():
    values = parse_json("[NaN, -Infinity, 1e999]", "a", [float], allow_nan=True)
    assert [str(value) for value in values] == ["nan", "-inf", "inf"]


def test_alternatives_are_checked_by_their_type():
    check_json([1, 2], (int, [int]), "a")
    with pytest.raises(ValueError, match=r"a has \[1\]='b', which must be an integer"):
        check_json([1, "b"], (int, [int]), "a")


@pytest.mark.parametrize("value", [[4, 4], [4, 4, 1, 1], [4, "4", 1], [4, 0, 1], 4, []])
def test_lists_of_one_length(value):
    schema = {"image_shape": [Range(1, 9)] * 3}
    check_json({"image_shape": [4, 6, 1]}, schema, "a")
    message = r"a has image_shape(\[1\])?=.* must be (a list of 3|an integer)"
    with pytest.raises(ValueError, match=message):
        check_json({"image_shape": value}, schema, "a")


def test_file_that_is_too_large_or_none_is_refused(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"[" + b" " * 100 + b"]")
    with pytest.raises(ValueError, match=f"{path} has more than 50 bytes"):
        read_json(path, max_bytes=50)
    assert read_json(path) == []
    with pytest.raises(FileNotFoundError, match="b does not exist"):
        read_json(tmp_path / "b")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_json(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError, match="is not a file"):
        read_json(tmp_path / "a.json")
