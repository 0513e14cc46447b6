"""The measured translation error of attentions with position encodings."""

import pytest

from relattn.evaluation.translation import translation_error


@pytest.mark.parametrize(
    ("attention", "position", "verdict"),
    [
        ("softmax", "none", "exact"),
        ("softmax", "learnable_sincos", "no"),
        ("softmax", "constrained_sincos", "exact"),
        ("favor", "none", "exact"),
        ("favor", "learnable_sincos", "no"),
        ("favor", "constrained_sincos", "in expectation"),
        ("favor(features='relu')", "none", "exact"),
        ("favor(features='trigonometric')", "constrained_sincos", "too noisy to tell"),
        ("banded(clip=4)", "none", "exact"),
        ("banded(clip=4)", "learnable_sincos", "no"),
        ("softmax", "learned + relative_key", "no"),
        ("softmax", "relative_value", "exact"),
        ("softmax", "relative_bias", "exact"),
        ("favor", "t5_bias", "exact"),
        # The prefix token does not turn: its scores tell places apart.
        ("softmax", "rope2d", "no"),
        ("softmax", "cayley_string", "no"),
        ("softmax", "circulant_string", "no"),
        ("relu", "none", "exact"),
        ("relu", "string_gate", "no"),
        ("favor", "irpe_gate", "too noisy to tell"),
        ("gated_positional", "none", "exact"),
        ("lor_translution", "none", "exact"),
        ("routing", "none", "exact"),
    ],
)
def test_verdict(attention, position, verdict):
    error = translation_error(attention, position)
    assert error.verdict == verdict, error
    if verdict == "in expectation":
        # The point of the distinction: one draw alone errs by far more.
        assert error.single > 4 * error.mean


def test_strategy_1_as_a_bias_is_exact_for_every_draw():
    exact, concatenated = (
        translation_error("favor", position, draws=16)
        for position in ("sincos_bias", "constrained_sincos")
    )
    # No draw's error is more than the root of their number times the mean square's.
    assert 16**0.5 * exact.single <= 1e-5
    assert concatenated.single > 0.01


def test_content_must_stay_on_the_canvas():
    with pytest.raises(ValueError, match=r"moved by \(9, 0\) does not fit"):
        translation_error("softmax", "none", shift=(9, 0))
