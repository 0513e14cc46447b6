"""Unknown names are answered with the known ones."""

import pytest

from relattn.data.choices import check_choice


def test_known():
    check_choice("data.name", "mnist", ["mnist", "cifar10"])


def test_unknown():
    message = "^Unknown data.name='cifar' here. Did you mean 'cifar10'. Known: 'mnist',"
    with pytest.raises(ValueError, match=message):
        check_choice("data.name", "cifar", ["mnist", "cifar10"], " here")


def test_nothing_alike():
    with pytest.raises(ValueError, match=r"^Unknown data.name='xyz'. Known: 'mnist'.$"):
        check_choice("data.name", "xyz", {"mnist": 1})
