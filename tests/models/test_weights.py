"""Attention weights of models: outputs are their sums of values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import GPT, AlexNet, ViT, attention_weights
from relattn.nn import ATTENTIONS
from tests.helpers.quick import normal, quick_jit, run
from tests.helpers.specs import with_others

IMAGES = normal(0, 2, 6, 9, 1)


def make(attention, position="none", num_layers=1):
    model = ViT(
        5,
        patch_size=3,
        dim=16,
        num_layers=num_layers,
        num_heads=2,
        mlp_dim=7,
        attention=attention,
        position=position,
    )
    variables = run(model.init, jax.random.key(1), IMAGES)
    assert "attention_weights" not in variables
    # Tables that start at zero would hide which weight is whose.
    noise = 0.3 * np.random.default_rng(2).normal(size=997).astype(np.float32)
    variables["params"] = jax.tree.map(
        lambda x: np.asarray(x) + np.resize(noise, x.shape), variables["params"]
    )
    return model, variables


def weigh(model, variables, inputs):
    """Returns `attention_weights`, compiled."""
    return quick_jit(lambda *x: attention_weights(model, *x))(variables, inputs)


def captured(model, variables):
    """What the one layer's methods return, by name."""
    apply = quick_jit(
        model.apply,
        capture_intermediates=lambda _, name: name in ("mix", "project", "__call__"),
        mutable=["intermediates"],
    )
    _, state = apply(variables, IMAGES)
    ((name, block),) = [
        item for item in state["intermediates"].items() if item[0].startswith("block")
    ]
    return jax.tree.map(lambda x: x[0], block) if name == "blocks_0" else block


# Values of Translution depend on the offset.
PLAIN_VALUES = [name for name in ATTENTIONS if "translution" not in name]
ON_IMAGES = with_others(
    [
        ("softmax", "none"),
        ("softmax", "relative_key"),
        ("favor", "rope2d"),
        ("favor", "relative_bias"),
        ("relu", "constrained_sincos"),
    ],
    PLAIN_VALUES,
)


@pytest.mark.quick("favor-relative_bias")
@pytest.mark.parametrize(("attention", "position"), ON_IMAGES)
def test_outputs_are_the_weighted_sums_of_values(attention, position):
    model, variables = make(attention, position)
    found = captured(model, variables)["attention"]
    values = found["project"][-1]
    (weights,) = weigh(model, variables, IMAGES)
    assert weights.shape == (2, 2, 7, 7)
    np.testing.assert_allclose(weights @ values, found["mix"][0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_softmax_weights_are_those_of_queries_and_keys():
    model, variables = make("softmax")
    q, k, _ = captured(model, variables)["attention"]["project"]
    expected = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8**0.5)
    (weights,) = weigh(model, variables, IMAGES)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_relative_values_do_not_change_the_weights():
    model, variables = make("softmax", "relative_value")
    q, k, _ = captured(model, variables)["attention"]["project"]
    expected = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8**0.5)
    (weights,) = weigh(model, variables, IMAGES)
    np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("relative", ["qk", "k"])
def test_translution_with_plain_values(relative):
    model, variables = make(f"translution(relative='{relative}')")
    block = captured(model, variables)
    params = variables["params"]["blocks_0"]["attention"]
    (x,) = block["attention_norm"]["__call__"]
    values = jnp.einsum("bnc,chd->bhnd", x, params["v_matrix"][0])
    (weights,) = weigh(model, variables, IMAGES)
    out = block["attention"]["mix"][0]
    np.testing.assert_allclose(weights @ values, out, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("average", [False, True])
def test_lor_translution_with_plain_values(average):
    model, variables = make(
        f"lor_translution(rank=2, relative='qk', average={average})"
    )
    found = captured(model, variables)["attention"]
    (weights,) = weigh(model, variables, IMAGES)
    values = found["project"][-1]
    np.testing.assert_allclose(weights @ values, found["mix"][0], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_weight_for_each_layer_in_order():
    model, variables = make("translution", num_layers=11)
    layers = weigh(model, variables, IMAGES)
    assert len(layers) == 11
    first, first_variables = make("translution", num_layers=1)
    params = jax.tree.map(lambda x: x[:1], variables["params"]["blocks_0"])
    first_variables["params"] = variables["params"] | {"blocks_0": params}
    (expected,) = weigh(first, first_variables, IMAGES)
    np.testing.assert_allclose(layers[0], expected, rtol=1e-4, atol=1e-6)
    assert not np.allclose(layers[10], expected, atol=1e-3)


@pytest.mark.slow
def test_causal_weights_do_not_see_the_future():
    model = GPT(
        vocab_size=13,
        context_length=7,
        dim=12,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        mlp_dim=7,
        attention="favor",
    )
    tokens = jnp.arange(7)[None]
    variables = quick_jit(model.init)(jax.random.key(0), tokens)
    for weights in weigh(model, variables, tokens):
        assert weights.shape == (1, 2, 7, 7)
        np.testing.assert_array_equal(np.triu(weights[0, 0], 1), 0)
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-4)


def test_a_network_without_attention_has_none():
    model = AlexNet(num_classes=5)
    images = np.zeros((1, 32, 32, 1), np.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), variables)
    with pytest.raises(ValueError, match="AlexNet has no attention, so no weights"):
        attention_weights(model, variables, jax.device_put(images))
