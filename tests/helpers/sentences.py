"""Checks that an error is one sentence about the user's file."""

import pytest

from relattn.command import is_user_error


def assert_refused(call, *words):
    """Calls a function, which must raise a short error of the project on one line.

    Args:
        call: The function.
        *words: What the message must contain.
    """
    with pytest.raises((ValueError, OSError)) as raised:
        call()
    message = str(raised.value)
    assert is_user_error(raised.value), "raised by another package"
    assert message.isprintable(), "line breaks, or characters that are not printable"
    assert len(message) < 800, "too long"
    for word in words:
        assert word in message
