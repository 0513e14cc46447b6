"""`check_choice`: unknown values raise an error that lists the known ones."""

import pytest

from relattn.data.registry import check_choice


def test_known_value_passes():
    check_choice("data.name", "mnist", ["mnist", "cifar10"])


def test_unknown_value_raises_with_the_closest():
    message = (
        "^unknown data.name 'cifar' here: did you mean 'cifar10'. There are: cifar10, "
        "mnist$"
    )
    with pytest.raises(ValueError, match=message):
        check_choice("data.name", "cifar", ["mnist", "cifar10"], " here")


def test_dissimilar_value_raises_without_a_suggestion():
    with pytest.raises(ValueError, match="^unknown data.name 'xyz': there are: m"):
        check_choice("data.name", "xyz", {"mnist": 1})


def test_long_value_is_shortened_in_the_error():
    with pytest.raises(ValueError, match="^unknown data.name 'aaa") as raised:
        check_choice("data.name", "a" * 10**6, ["mnist"])
    assert len(str(raised.value)) < 200
