"""Unknown names are answered with the known ones."""

import pytest

from relattn.data.registry import check_choice


def test_known():
    check_choice("data.name", "mnist", ["mnist", "cifar10"])


def test_unknown():
    message = (
        "^unknown data.name 'cifar' here: did you mean 'cifar10'. There are: cifar10, "
        "mnist$"
    )
    with pytest.raises(ValueError, match=message):
        check_choice("data.name", "cifar", ["mnist", "cifar10"], " here")


def test_nothing_alike():
    with pytest.raises(ValueError, match="^unknown data.name 'xyz': there are: m"):
        check_choice("data.name", "xyz", {"mnist": 1})


def test_a_huge_value_is_cut():
    with pytest.raises(ValueError, match="^unknown data.name 'aaa") as raised:
        check_choice("data.name", "a" * 10**6, ["mnist"])
    assert len(str(raised.value)) < 200
