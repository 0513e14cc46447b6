"""Spec strings: what parses, and what is refused with a sentence."""

import pytest

from relattn import spec


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
    ],
)
def test_parse_refuses_what_is_not_a_literal_call(text):
    if text.startswith("a(x=["):
        text = text.replace("]", "", 1)
    with pytest.raises(ValueError, match="is not a spec: write a name"):
        spec.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", ["none"]),
        (" a(x=1) + b+c(y='+')", ["a(x=1)", "b", "c(y='+')"]),
        ("a(x=1 + 2)", ["a(x=1 + 2)"]),
        ("a + ", ["a + "]),
        ("a + " * 200 + "a", ["a + " * 200 + "a"]),
    ],
)
def test_terms_of_a_sum(text, expected):
    assert spec.terms(text) == expected


def test_resolve_names_the_closest():
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
