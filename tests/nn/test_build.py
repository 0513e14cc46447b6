"""The look-up of attentions and positions, and what it refuses."""

import re

import pytest

from relattn.nn.build import build

SIZES = {"dim": 24, "heads": 4, "num_layers": 1}


@pytest.mark.parametrize(
    ("attention", "position", "sizes", "message"),
    [
        ("favour", "none", {}, "unknown attention 'favour': did you mean 'favor'?"),
        ("favor", "sincos", {}, "unknown position 'sincos': did you mean"),
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
            "'banded' does not honour; it takes position none, learnable_sincos",
        ),
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
