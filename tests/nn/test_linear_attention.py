"""Tests linear attention with learned features, and the storage of drawn ones."""

import functools
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.nn.registry import build
from tests import reference
from tests.helpers.quick import normal, run

N, DIM, HEADS, HEAD_DIM = 7, 8, 2, 4


def expect_reference(attention, set_params, feature_maps):
    """Compares a layer with the reference of linear attention, head by head.

    Args:
        attention: Spec of the attention.
        set_params: Changes parameters in place.
        feature_maps: Maps parameters to the feature map of each head.
    """
    make, _ = build(attention, "none", dim=DIM, num_heads=HEADS, num_layers=1)
    module = make(layer=0)
    x = normal(1, 2, N, DIM)
    params = dict(run(module.init, jax.random.key(0), x)["params"])
    set_params(params)
    out = run(module.apply, {"params": params}, x)

    def project(name):
        y = x[1] @ params[name]["kernel"] + params[name]["bias"]
        return y.reshape(N, HEADS, HEAD_DIM).swapaxes(0, 1)

    def heads():
        return [
            reference.linear_attention(*inputs, np.ones((N, N), bool))
            for inputs in zip(*map(project, "qkv"), feature_maps(params), strict=True)
        ]

    expected = np.stack(run(heads), axis=1).reshape(N, DIM)
    expected = expected @ params["out"]["kernel"] + params["out"]["bias"]
    np.testing.assert_allclose(out[1], expected, atol=1e-5)


def test_learned_relu_equals_the_reference_with_linear_projections():
    def set_params(params):
        assert np.abs(params["projection"]).max() <= HEAD_DIM**-0.5
        params["bias"] = normal(2, 5, scale=0.3)

    def feature_maps(params):
        learned = (params["projection"], params["bias"])
        phi = functools.partial(reference.relu_features, eps=0.02)
        return [lambda x: phi(x, *learned)] * HEADS

    expect_reference("relu(num_features=5, eps=0.02)", set_params, feature_maps)


def test_hedgehog_equals_the_reference_with_projections_of_each_head():
    names = ("query_projection", "key_projection")

    def set_params(params):
        identities = np.broadcast_to(np.eye(HEAD_DIM), (HEADS, HEAD_DIM, HEAD_DIM))
        for seed, name in enumerate(names):
            np.testing.assert_array_equal(params[name], identities)
            params[name] = normal(seed, HEADS, HEAD_DIM, HEAD_DIM)

    def feature_maps(params):
        return [
            tuple(
                functools.partial(reference.hedgehog_features, projection=projection)
                for projection in pair
            )
            for pair in zip(*(params[name] for name in names), strict=True)
        ]

    expect_reference("hedgehog", set_params, feature_maps)


@pytest.mark.slow
def test_random_features_survive_serialization_by_flax():
    make, _ = build(
        "favor(num_features=5)", "none", dim=DIM, num_heads=HEADS, num_layers=4
    )
    module, x = make(layer=3), jnp.ones((1, N, DIM))
    variables, other = (module.init(jax.random.key(i), x) for i in (0, 1))
    stored = flax.serialization.to_bytes(variables)
    restored = flax.serialization.from_bytes(other, stored)
    assert jax.tree.structure(restored) == jax.tree.structure(variables)
    for ours, theirs, before in zip(
        *map(jax.tree.leaves, (variables, restored, other)), strict=True
    ):
        np.testing.assert_array_equal(theirs, ours)
        assert not ours.any() or np.any(np.asarray(before) != ours)


def test_random_features_restored_without_a_template_raise():
    make, _ = build("favor", "none", dim=DIM, num_heads=HEADS, num_layers=1)
    x = jax.ShapeDtypeStruct((1, N, DIM), jnp.float32)
    variables = jax.eval_shape(make(layer=0).init, jax.random.key(0), x)
    state = flax.serialization.to_state_dict(variables)
    with pytest.raises(ValueError, match="are a dict, expected RandomFeatures: rest"):
        jax.eval_shape(make(layer=0).apply, state, x)


def test_a_state_restored_without_a_template_raises():
    make, _ = build("relu", "none", dim=DIM, num_heads=HEADS, num_layers=1, causal=True)
    apply = functools.partial(make(layer=0).apply, grid=(N,), mutable=["cache"])

    def decode(x):
        x = x[:, :1]
        variables = make(layer=0).init(jax.random.key(0), x)
        _, cache = apply(variables, x, index=0)
        return apply(
            {**variables, **flax.serialization.to_state_dict(cache)}, x, index=1
        )

    with pytest.raises(ValueError, match="state is a dict, expected LinearState: rest"):
        jax.eval_shape(decode, jax.ShapeDtypeStruct((1, N, DIM), jnp.float32))


def test_default_num_features_is_d_ln_d_and_layers_are_scannable():
    make, _ = build("relu", "none", dim=32, num_heads=2, num_layers=1)
    x = np.ones((1, N, 32), np.float32)
    variables = run(make(layer=0).init, jax.random.key(0), x)
    assert set(variables) == {"params"}
    shapes = {"projection": (44, 16), "bias": (44,)}
    for name, shape in shapes.items():
        start = variables["params"][name]
        assert start.shape == shape
        # Uniform in +-1/sqrt(fan_in), with fan_in = head_dim = 16.
        assert 0.9 * 16**-0.5 < np.abs(start).max() <= 16**-0.5
    assert make.func.scannable


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("relu(num_features=-1)", "'relu' needs num_features >= 1, or 0 for int("),
        ("relu(eps=0.0)", "'relu' needs eps > 0, without which"),
        ("relu(norms='fixed')", "attention 'relu' has no option 'norms'"),
    ],
)
def test_invalid_options_raise(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(spec, "none", dim=DIM, num_heads=HEADS, num_layers=1)
