"""Tests spec strings: valid ones and error messages."""

import pytest

from relattn import spec
from tests.helpers.export import unchecked_annotations


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ("none", {})),
        ("favor()", ("favor", {})),
        (" banded( clip=6 ) ", ("banded", {"clip": 6})),
        ("a(x=-1.5, y='z', w=None, v=(1, 2))", None),
    ],
)
def test_parse(text, expected):
    if expected is None:
        expected = ("a", {"x": -1.5, "y": "z", "w": None, "v": (1, 2)})
    assert spec.parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "favor(",
        "favor(256)",
        "favor(**{})",
        "__import__('os').system('ls')",
        "favor(num_features=open('x'))",
        "favor(f=lambda: 1)",
        "a.b",
        "a;b",
        "(" * 400 + ")" * 400,
        "a" * 501,
        "a(x=" + "[" * 240 + "]" * 240 + ")",
        "a(x=" + "-" * 400 + "1)",
        "-" * 400 + "a",
        pytest.param("a(x=" + "[" * 10_000 + "]" * 10_000 + ")", id="nested"),
        pytest.param("a" * 1_000_000, id="long"),
        "a(x=1, x=2)",
        "a(x=f'{1}')",
        "a(x={[]: 1})",
        "a(x={**{}})",
        "a(x=1 is 1)",
        r"a(x='\d')",
        "a(x=1)(y=2)",
        "a\x00b",
        "a(x='\x00')",
        "\ud800",
        "½",
        "a\n+ b\r\n",
    ],
)
def test_parse_rejects_all_but_literal_calls(text):
    if text.startswith("a(x=["):
        text = text.replace("]", "", 1)
    with pytest.raises(ValueError, match="is not a spec: write a name") as raised:
        spec.parse(text)
    assert len(str(raised.value)) < 250
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ["none"]),
        (" a(x=1) + b+c(y='+')", ["a(x=1)", "b", "c(y='+')"]),
        ("a(x=1 + 2)", ["a(x=1 + 2)"]),
        ("a + ", ["a + "]),
        # `parse` says that it is not a spec.
        (3, [3]),
        ("a + " * 200 + "a", ["a + " * 200 + "a"]),
        ("a + " + "-" * 400 + "b", ["a + " + "-" * 400 + "b"]),
    ],
)
def test_terms_splits_sums(text, expected):
    with unchecked_annotations():
        assert spec.terms(text) == expected


def test_resolve_names_closest():
    def favor(num_features=0):
        return num_features

    table = {"favor": favor, "softmax": favor}
    assert spec.resolve("favor(num_features=3)", table, "attention")() == 3
    with pytest.raises(
        ValueError, match="unknown attention 'favour': did you mean 'favor'"
    ):
        spec.resolve("favour", table, "attention")
    with pytest.raises(ValueError, match="no option 'features': did you mean 'num_fea"):
        spec.resolve("favor(features=3)", table, "attention")
    with pytest.raises(ValueError, match="no option 'num_features': it takes none"):
        spec.resolve("favor(num_features=3)", table, "attention", ("num_features",))


def test_resolve_checks_types_of_options():
    def favor(num_features: int = 0, eps: float = 1e-3, *, exact: "bool | None" = None):
        return num_features, eps, exact

    def resolve(text):
        return spec.resolve(text, {"favor": favor}, "attention")

    result = resolve("favor(num_features=3, eps=1, exact=None)")()
    assert result == (3, 1, None) and isinstance(result[1], float)
    for text, needed in [
        ("num_features='3'", "num_features of type int, got '3'"),
        ("num_features=True", "num_features of type int, got True"),
        ("num_features=2.5", "num_features of type int, got 2.5"),
        ("eps=[1]", r"eps of type float, got \[1\]"),
        ("eps=1e999", "eps of type float, got inf"),
        (f"eps={10**400}", r"eps of type float, got 1000+\.\.\."),
        ("exact=1", r"exact of type bool \| None, got 1"),
    ]:
        with pytest.raises(ValueError, match=f"attention 'favor' needs {needed}$"):
            resolve(f"favor({text})")


@pytest.mark.parametrize("text", ["", "a b"])
def test_an_error_names_what_is_no_spec(text):
    message = f"data.augment={text!r} is not a spec: write a name"
    with pytest.raises(ValueError, match=message):
        spec.resolve(text, {"none": dict}, "data.augment")
