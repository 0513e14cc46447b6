"""The look-up of attentions and positions, and what it refuses."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.nn.build import build

SIZES = {"dim": 24, "heads": 4, "num_layers": 1}


@pytest.mark.parametrize(
    ("attention", "position", "sizes", "message"),
    [
        ("favour", "none", {}, "unknown attention 'favour': did you mean 'favor'?"),
        ("favor", "sincoz", {}, "unknown position 'sincoz': did you mean"),
        ("favor(num_feature=3)", "none", {}, "did you mean 'num_features'?"),
        ("favor(dim=3)", "none", {}, "attention 'favor' has no option 'dim'"),
        ("favor(features='relo')", "none", {}, "features 'relo': did you mean 'relu'"),
        ("favor(norms='ch')", "none", {}, "unknown norms 'ch': did you mean 'chi'?"),
        ("favor(num_features=-1)", "none", {}, "num_features must be positive"),
        ("favor", "none(x=1)", {}, "position 'none' has no option 'x': it takes none"),
        (
            "banded",
            "constrained_sincos",
            {},
            "position 'constrained_sincos' acts at the site 'heads', which attention "
            "'banded' does not honour; it takes position none, learned, sincos",
        ),
        (
            "favor",
            "learned + relative_key",
            {},
            "position 'relative_key' acts at the site 'pairs', which attention 'favor'",
        ),
        (
            "softmax",
            "rope2d(base=10.0) + learned + relative_bias",
            {},
            "has 2 terms that reach the attention; a sum takes one",
        ),
        ("softmax", "learned + ropes", {}, "unknown position 'ropes': did you mean"),
        ("softmax", "none", {"heads": 5}, "heads must divide config.model.dim, got"),
        ("banded", "none", {"heads": 3}, "heads must be even, got 3"),
        ("banded(clip=0)", "none", {}, "needs clip >= 1, got 0"),
        (
            "banded",
            "none",
            {"causal": True},
            "attention 'banded' has no causal form; choose from softmax, favor",
        ),
        ("banded(position_heads=5)", "none", {}, "has 4 heads, got position_heads=5"),
    ],
)
def test_refuses_with_a_sentence(attention, position, sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(attention, position, **{**SIZES, **sizes})


def test_options_reach_the_modules():
    attention, position = build(
        "favor(num_features=7, norms='fixed')",
        "constrained_sincos(num_scales=2)",
        **SIZES,
    )
    module = attention(layer=3)
    assert (module.num_features, module.norms, module.layer) == (7, "fixed", 3)
    assert position().num_scales == 2 and position().heads == 4


def test_a_sum_adds_to_the_tokens_and_reaches_the_layers():
    _, position = build(
        "softmax",
        "learned + rope2d(base=7.0) + sincos",
        **{**SIZES, "heads": 2},
    )
    module = position()
    learned, rope, sincos = module.makers
    assert rope.keywords == {"base": 7.0}
    tokens = jnp.zeros((1, 6, 24))
    variables = module.init(jax.random.key(0), tokens, (2, 3), method="of_tokens")
    out = module.apply(variables, tokens, (2, 3), method="of_tokens")
    table = variables["params"]["terms_0"]["table"]
    expected = sincos(dim=24).apply({}, tokens, (2, 3)) + table
    np.testing.assert_allclose(out, expected, atol=1e-6)
    (layer,) = module.apply(variables, (2, 3), 1, method="of_layers")
    assert layer.angles.shape == (7, 6)
