"""Error messages: the closest name, shortened values, checks of choices."""

import pytest

from relattn import spec
from relattn.messages import check_choice, shorten


def test_known_value_passes():
    check_choice("data.name", "mnist", ["mnist", "cifar10"])


def test_unknown_value_raises_with_the_closest():
    message = (
        "^unknown data.name 'cifar' here: did you mean 'cifar10'. Available: cifar10, "
        "mnist$"
    )
    with pytest.raises(ValueError, match=message):
        check_choice("data.name", "cifar", ["mnist", "cifar10"], " here")


def test_dissimilar_value_raises_without_a_suggestion():
    with pytest.raises(ValueError, match="^unknown data.name 'xyz': available: m"):
        check_choice("data.name", "xyz", {"mnist": 1})


def test_long_value_is_shortened_in_the_error():
    with pytest.raises(ValueError, match="^unknown data.name 'aaa") as raised:
        check_choice("data.name", "a" * 10**6, ["mnist"])
    assert len(str(raised.value)) < 200


def test_messages_cut_long_values():
    assert shorten("a" * 80) == "'" + "a" * 79 + "..."
    assert shorten({"a": 1}) == "{'a': 1}"
    assert shorten(10**5000) == "a huge int"
    with pytest.raises(ValueError, match=r"^unknown attention 'aaa.*\.\.\.: available"):
        spec.resolve("a" * 400, {"favor": dict}, "attention")
