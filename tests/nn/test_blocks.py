"""Tests linear layers, Transformer blocks, and scanned layers."""

import functools
import math
import operator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels.platform import use_platform
from relattn.nn.blocks import (
    Dropout,
    DropPath,
    FeedForward,
    Linear,
    TransformerBlock,
    make_norm,
    transformer_blocks,
)
from relattn.nn.registry import build
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import normal, normal_like, quick_jit, run


def test_weights_and_biases_start_uniform_within_the_bound():
    layer = Linear(401)
    params = run(layer.init, jax.random.key(0), np.zeros((1, 25)))["params"]
    kernel = np.asarray(params["kernel"])
    assert np.abs(kernel).max() <= 0.2
    # The standard deviation of a uniform distribution, within 4 standard errors.
    np.testing.assert_allclose(kernel.std(), 0.2 / 3**0.5, rtol=4 * 0.45 / 10025**0.5)
    bias = np.asarray(params["bias"])
    assert np.abs(bias).max() <= 0.2
    np.testing.assert_allclose(bias.std(), 0.2 / 3**0.5, rtol=4 * 0.45 / 401**0.5)


def test_linear_equals_its_formula_in_the_compute_dtype():
    rng = np.random.default_rng(0)
    x, kernel = rng.normal(size=(2, 3, 5)), rng.normal(size=(5, 7))
    params = {"kernel": kernel.astype(np.float32), "bias": np.float32(np.arange(7))}
    single = x.astype(np.float32)
    out = run(Linear(7).apply, {"params": params}, single)
    np.testing.assert_allclose(out, x @ kernel + np.arange(7), rtol=1e-5, atol=1e-5)
    half = Linear(7, dtype=jnp.bfloat16).apply
    assert jax.eval_shape(half, {"params": params}, single).dtype == jnp.bfloat16
    del params["bias"]
    out = run(Linear(7, use_bias=False).apply, {"params": params}, single)
    np.testing.assert_allclose(out, x @ kernel, rtol=1e-5, atol=1e-5)


def test_rms_norm_equals_its_formula():
    def naive(x, scale):
        return reference.rms_norm(x, scale, eps=0.01)

    # The last example is so small that the epsilon matters.
    x = normal(0, 3, 5, 7) * np.float32([1, 20, 1e-2])[:, None, None]
    for double in (False, True):
        dtype = jnp.float64 if double else jnp.float32
        module = make_norm("rms_norm", 0.01, dtype)()

        def apply(x, scale, module=module):
            return module.apply({"params": {"scale": scale}}, x)

        inputs = (x, normal(1, 3, 7))
        compare.expect_equal(jax.vmap(apply), naive, inputs, double=double)
    with pytest.raises(ValueError, match="norm_type 'rmsnorm'.*'rms_norm'"):
        make_norm("rmsnorm", 0.01, jnp.float32)


def test_half_precision_norms_sum_squares_in_float32():
    # In bfloat16 the sum of 4,099 ones would be 256.
    x = np.ones((1, 4099), jnp.bfloat16)
    half = make_norm("rms_norm", 0.0, jnp.bfloat16)()
    out = run(half.apply, {"params": {"scale": np.full(4099, 3, np.float32)}}, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, np.float32(3))


def test_swiglu_equals_its_formula():
    shapes = {"gate": (7, 11), "hidden": (7, 11), "out": (11, 7)}

    def params(*kernels):
        named = zip(shapes, kernels, strict=True)
        return {name: {"kernel": kernel} for name, kernel in named}

    def naive(x, *kernels):
        return reference.swiglu(x, params(*kernels))

    kernels = [normal(i, 2, *shape) for i, shape in enumerate(shapes.values())]
    for double in (False, True):
        dtype = jnp.float64 if double else jnp.float32
        module = FeedForward(7, 11, dtype=dtype, activation="swiglu", use_bias=False)

        def apply(x, *kernels, module=module):
            return module.apply({"params": params(*kernels)}, x[None])[0]

        inputs = (normal(9, 2, 5, 7), *kernels)
        compare.expect_equal(jax.vmap(apply), naive, inputs, double=double)


def test_dropout_zeroes_independent_elements_and_keeps_the_mean():
    # Three tokens more than a multiple of four, the elements of a random word.
    x, rngs = normal(0, 997, 23), {"dropout": jax.random.key(0)}

    @jax.jit
    def value_and_gradient(x):
        def apply(x):
            return Dropout(0.1).apply({}, x, deterministic=False, rngs=rngs)

        out, pullback = jax.vjp(apply, x)
        return out, *pullback(jnp.ones_like(out))

    out, gradient = jax.device_get(value_and_gradient(x))
    rate = 26 / 256
    kept = out != 0
    np.testing.assert_allclose(out, np.where(kept, x / (1 - rate), 0.0), rtol=1e-6)
    np.testing.assert_allclose(gradient, kept / (1 - rate), rtol=1e-6)
    deviations = (kept - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    # Each column, and each product of two columns, within 4.5 standard errors.
    assert np.abs(deviations.mean(axis=0)).max() < 4.5 / 997**0.5
    products = deviations.T @ deviations / 997
    assert np.abs(products - np.diag(np.diag(products))).max() < 4.5 / 997**0.5


def test_all_may_be_dropped_and_no_other_rate_is_taken():
    def drop(x, rate):
        rngs = {"dropout": jax.random.key(0)}
        return DropPath().apply({}, x, rate, deterministic=False, rngs=rngs).sum()

    np.testing.assert_array_equal(jax.grad(drop)(X, 1.0), np.zeros_like(X))
    part = functools.partial(dict)
    for rate in (-0.1, 1.1):
        with pytest.raises(ValueError, match="a dropout rate must be from 0 to 1"):
            Dropout(rate).apply({}, X)
        with pytest.raises(ValueError, match="drop_path must be from 0 to 1, got"):
            transformer_blocks(X, [part], part, drop_path=rate)


def test_dropout_is_off_where_it_should_be():
    rngs = {"dropout": jax.random.key(0)}
    assert Dropout(0.5).apply({}, X) is X
    assert Dropout(0.0).apply({}, X, deterministic=False, rngs=rngs) is X
    assert not Dropout(1.0).apply({}, X, deterministic=False, rngs=rngs).any()
    drop = functools.partial(Dropout(0.5).apply, deterministic=False, rngs=rngs)
    half = jax.eval_shape(drop, {}, X.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    assert jax.eval_shape(drop, {}, X[:0]).shape == (0, 7, 6)


def test_dropout_drops_the_same_elements_if_float64_is_enabled():
    x, rngs = jnp.asarray(normal(0, 3, 23)), {"dropout": jax.random.key(0)}
    drop = functools.partial(Dropout(0.5).apply, {}, deterministic=False, rngs=rngs)
    expected = np.asarray(drop(x))
    with jax.enable_x64(True):
        found = drop(x)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)


SIZES = {"dim": 6, "num_heads": 2, "num_layers": 2}
X = jax.device_put(normal(0, 2, 7, 6))


class Model(nn.Module):
    attention: str
    position: str = "none"
    scan: bool = True
    dropout: float = 0.0
    dtype: str = "float32"
    remat: bool = False
    drop_path: float = 0.0
    num_layers: int = 2

    @nn.compact
    def __call__(self, x, deterministic=True):
        sizes = SIZES | {"num_layers": self.num_layers}
        attention, position = build(self.attention, self.position, **sizes)
        block = functools.partial(
            TransformerBlock,
            dim=6,
            mlp_dim=11,
            dropout=self.dropout,
            dtype=jnp.dtype(self.dtype),
        )
        return transformer_blocks(
            x.astype(self.dtype),
            [attention] * self.num_layers,
            block,
            positions=position(name="position").per_layer((2, 3), 1),
            scan=self.scan,
            remat=self.remat,
            drop_path=self.drop_path,
            grid=(2, 3),
            num_prefix=1,
            deterministic=deterministic,
        )


def random_variables(model):
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    return normal_like(shapes, scale=0.4, seed=1)


@pytest.mark.quick("softmax-constrained_sincos")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("translution", "none"),
        ("softmax", "constrained_sincos"),
        ("linformer(k=3, sharing='layers')", "none"),
    ],
)
def test_scanned_layers_equal_unrolled_layers(attention, position):
    scanned = Model(attention, position)
    params = random_variables(scanned)["params"]
    layers = {key: params[key] for key in params if key != "blocks_0"}
    for layer in range(2):
        take = lambda leaf, layer=layer: leaf[layer]  # noqa: E731
        layers[f"block_{layer}"] = jax.tree.map(take, params["blocks_0"])

    def loss(model, params):
        return jnp.sin(model.apply({"params": params}, X)).sum()

    def differentiate(model, params):
        gradient = jax.jit(jax.value_and_grad(functools.partial(loss, model)))
        return jax.device_get(gradient(params))

    value, gradients = differentiate(scanned, params)
    expected, unrolled = differentiate(Model(attention, position, scan=False), layers)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    stacked = jax.tree.map(
        lambda *leaves: np.stack(leaves), *(unrolled.pop(f"block_{i}") for i in (0, 1))
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4),
        gradients,
        {**unrolled, "blocks_0": stacked},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_keeps_the_tables_once(dtype):
    model = Model("translution", dtype=dtype)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    tables = variables["params"]["blocks_0"]["attention"]

    def pull_back(variables):
        return jax.vjp(lambda variables: model.apply(variables, X), variables)[1]

    kept = jax.tree.leaves(jax.eval_shape(pull_back, variables))
    large = [leaf for leaf in kept if leaf.size >= tables["q_table"].size]
    assert [leaf.shape for leaf in large] == [tables["q_table"].shape] * 3
    assert {leaf.dtype for leaf in large} == {jnp.dtype(dtype)}


def test_blocks_equal_the_reference():
    model = Model("softmax")
    variables = random_variables(model)
    # So small that the epsilon of the norms matters.
    x = 0.01 * X
    out = jax.jit(model.apply)(variables, x)

    def naive(tokens, layers):
        for layer in range(2):
            params = jax.tree.map(operator.itemgetter(layer), layers)
            allowed = np.ones((7, 7), bool)
            tokens = reference.transformer_block(tokens, params, 2, allowed)
        return tokens

    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (x, variables["params"]["blocks_0"]))
        expected = quick_jit(jax.vmap(naive, (0, None)))(*wide)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_dropout_differs_by_layer_and_key():
    model = Model("softmax", dropout=0.5)
    params = jax.tree.map(np.zeros_like, random_variables(model))["params"]
    # Each layer adds 1 to each component of a token, then dropout acts.
    feed_forward = params["blocks_0"]["feed_forward"]
    feed_forward["hidden"]["bias"] += 1.0
    gelu = 0.5 * (1 + math.erf(0.5**0.5))
    feed_forward["out"]["kernel"] += np.eye(11, 6, dtype=np.float32) / gelu
    apply = jax.jit(
        lambda seed: (
            model.apply(
                {"params": params},
                X,
                deterministic=False,
                rngs={"dropout": jax.random.key(seed)},
            )
            - X
        )
    )
    first = np.asarray(apply(0))
    np.testing.assert_array_equal(apply(0), first)
    assert not np.allclose(apply(1), first)
    # No layer, one layer, or both layers keep the component, scaled by 1 / 0.5.
    assert np.unique(np.round(first, 3)).tolist() == [0, 2, 4]


@pytest.mark.quick("attention")
@pytest.mark.parametrize("part", ["attention", "feed_forward"])
def test_each_part_has_its_own_dropout_rate(part):
    x = jax.device_put(normal(2, 4, 50, 6))
    attention, _ = build("softmax", "none", dim=6, num_heads=2, num_layers=1)
    rates = {"attention": 0.25, "feed_forward": 0.625}
    block = TransformerBlock(
        functools.partial(attention, layer=0),
        dim=6,
        mlp_dim=6,
        attention_dropout=rates["attention"],
        dropout=rates["feed_forward"],
    )
    options = {"grid": (50,), "num_prefix": 0}
    init = functools.partial(block.init, **options)
    params = run(init, jax.random.key(0), x)["params"]
    # The other part adds nothing; this part adds its activations or heads' outputs.
    other = "feed_forward" if part == "attention" else "attention"
    params[other] = jax.tree.map(np.zeros_like, params[other])
    eye = np.eye(6, dtype=np.float32)
    params[part]["out"] = {"kernel": eye, "bias": np.zeros(6, np.float32)}
    options |= {"rngs": {"dropout": jax.random.key(1)}}

    def outputs(params):
        return [
            block.apply({"params": params}, x, deterministic=deterministic, **options)
            - x
            for deterministic in (True, False)
        ]

    plain, dropped = run(outputs, params)
    rate = rates[part]
    kept = np.abs(dropped) > 1e-6
    expected = np.where(kept, plain / (1 - rate), 0.0)
    np.testing.assert_allclose(dropped, expected, atol=1e-5)
    # Within four standard errors.
    error = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs(1 - kept.mean() - rate) < 4 * error


@pytest.mark.quick("True-True")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("scan", [False, True])
def test_examples_skip_branches_at_the_rate_of_the_layer(scan, remat):
    model = Model("softmax", scan=scan, remat=remat, drop_path=0.5, num_layers=3)
    params = jax.tree.map(np.zeros_like, random_variables(model))["params"]
    # The feed-forward branches of the layers add 1, 10 and 100, the others 0.
    for layer in range(3):
        bias = np.full((6,), 10.0**layer, np.float32)
        block = params["blocks_0" if scan else f"block_{layer}"]
        bias_there = block["feed_forward"]["out"]["bias"]
        (bias_there[layer] if scan else bias_there)[:] = bias
    x = normal(3, 997, 7, 6)

    def apply(x):
        rngs = {"dropout": jax.random.key(0)}
        out = model.apply({"params": params}, x, deterministic=False, rngs=rngs)
        return out - x, model.apply({"params": params}, x) - x

    added, evaluated = run(apply, x)
    np.testing.assert_allclose(evaluated, 111, rtol=1e-4)
    # Whole examples skip a branch; the rates are 0, 0.25 and 0.5.
    np.testing.assert_allclose(added, np.broadcast_to(added[:, :1, :1], x.shape), 1e-4)
    added = added[:, 0, 0]
    kept = [added % 100 > 5, added > 100]
    expected = 1 + kept[0] * 10 / 0.75 + kept[1] * 100 / 0.5
    np.testing.assert_allclose(added, expected, rtol=1e-4)
    for share, rate in ((kept[0].mean(), 0.25), (kept[1].mean(), 0.5)):
        assert abs(share - (1 - rate)) < 4 * (rate * (1 - rate) / 997) ** 0.5
    both = (kept[0] & kept[1]).mean()
    assert abs(both - 0.375) < 4 * (0.375 * 0.625 / 997) ** 0.5


def test_layers_start_differently():
    params = run(Model("softmax").init, jax.random.key(0), X)["params"]["blocks_0"]
    for kernel in (params["attention"]["q"], params["feed_forward"]["out"]):
        assert not np.allclose(*kernel["kernel"])
    # Uniform in +-1/sqrt(fan_in) of one layer, not of all layers.
    assert 0.9 * 6**-0.5 < np.abs(params["attention"]["q"]["kernel"]).max() <= 6**-0.5


def test_layers_with_random_features_are_not_scanned():
    for attention, scan, names in (
        ("softmax", True, {"blocks_0"}),
        ("softmax", False, {"block_0", "block_1"}),
        ("favor", True, {"block_0", "block_1"}),
    ):
        shapes = jax.eval_shape(Model(attention, scan=scan).init, jax.random.key(0), X)
        assert set(shapes["params"]) == names


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["translution", "favor(num_features=3)"])
def test_remat_gives_equal_gradients_and_keeps_less(attention):
    variables = random_variables(Model(attention))
    params = variables.pop("params")

    def differentiate(remat):
        model = Model(attention, remat=remat, dropout=0.3)

        @quick_jit
        def apply(params):
            def loss(params):
                rngs = {"dropout": jax.random.key(5)}
                out = model.apply(
                    {"params": params, **variables}, X, deterministic=False, rngs=rngs
                )
                return jnp.sin(out).sum()

            value, pullback = jax.vjp(loss, params)
            return value, pullback(1.0), pullback

        *result, pullback = apply(params)
        return result, sum(leaf.size for leaf in jax.tree.leaves(pullback))

    (plain, kept), (remat, kept_remat) = differentiate(False), differentiate(True)
    for expected, found in zip(
        jax.tree.leaves(plain), jax.tree.leaves(remat), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert kept_remat < kept


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["translution", "lor_translution"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_scanned_layers_keep_no_more_than_unrolled_ones(attention, platform):
    def kept(scan):
        model = Model(attention, scan=scan)
        params = jax.eval_shape(model.init, jax.random.key(0), X)["params"]

        def pullback(params):
            return jax.vjp(lambda p: model.apply({"params": p}, X), params)[1]

        with use_platform(platform):
            leaves = jax.tree.leaves(jax.eval_shape(pullback, params))
        return sum(leaf.size for leaf in leaves)

    # A scan keeps some small arrays for every layer that unrolled layers share.
    assert kept(scan=True) <= 1.1 * kept(scan=False)


@pytest.mark.parametrize(
    ("platform", "unrolled"), [("cpu", False), ("gpu", True), ("tpu", False)]
)
def test_layers_are_unrolled_where_they_compile_fast(platform, unrolled):
    model, x = Model("lor_translution"), X
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    with use_platform(platform):
        jaxpr = jax.make_jaxpr(lambda p: model.apply({"params": p}, x))(params)
    # Both layers are steps of one scan.
    (layers,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    assert layers.params["length"] == 2
    assert (layers.params["unroll"] == 2) == unrolled
