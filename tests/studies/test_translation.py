"""Measured translation errors of attentions with position encodings."""

import pytest

from studies.translation import translation_error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "position", "verdict"),
    [
        ("favor(features='relu')", "none", "exact"),
        ("banded(clip=4)", "none", "exact"),
        ("softmax", "learned + relative_key", "no"),
    ],
)
def test_verdict(attention, position, verdict):
    error = translation_error(attention, position)
    assert error.verdict == verdict, error


@pytest.mark.slow
def test_sincos_bias_is_exact_for_every_draw():
    exact, concatenated = (
        translation_error("favor", position, draws=16)
        for position in ("sincos_bias", "constrained_sincos")
    )
    # The largest error is at most sqrt(draws) times the root mean square.
    assert 16**0.5 * exact.single <= 1e-5
    assert concatenated.single > 0.01


def test_content_that_leaves_the_canvas_is_rejected():
    with pytest.raises(ValueError, match=r"shifted by \(9, 0\) does not fit"):
        translation_error("softmax", "none", shift=(9, 0))
