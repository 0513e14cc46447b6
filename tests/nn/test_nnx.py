"""Tests the NNX modules against the Linen modules."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from relattn import kernels
from relattn.kernels import draw_random_features
from relattn.nn import ATTENTIONS, build
from relattn.nn.nnx import MultiHeadAttention, Position, RandomFeatures, redraw
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, quick_jit
from tests.helpers.specs import small

GRID, N, DIM, HEADS, LAYERS = (2, 3), 7, 8, 2, 3
SIZES = {"dim": DIM, "num_heads": HEADS}


def draw(*shape, seed=0):
    return jax.device_put(normal(seed, *shape))


@pytest.mark.quick("favor")
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_equals_linen_with_its_variables(name):
    spec = small(name)
    ours = MultiHeadAttention(
        spec, **SIZES, layer=1, grid=GRID, num_prefix=1, rngs=nnx.Rngs(0)
    )
    make, _ = build(spec, "none", num_layers=LAYERS, **SIZES)
    linen, x = make(layer=1), draw(2, N, DIM)
    call = {"grid": GRID, "num_prefix": 1}
    init = functools.partial(linen.init, **call)
    variables = quick_jit(init)(jax.random.key(3), x)
    assert jax.tree.structure(ours.to_linen()) == jax.tree.structure(variables)
    ours.update_from_linen(variables)
    chex.assert_trees_all_equal(ours.to_linen(), variables)
    ours.eval()
    np.testing.assert_array_equal(ours(x), linen.apply(variables, x, **call))
    with pytest.raises(ValueError, match="the variables do not fit the module"):
        ours.update_from_linen({"params": variables["params"]["out"]})


@unchecked_annotations()
@pytest.mark.parametrize("rngs", [0, jax.random.key(0), nnx.Rngs(params=0)])
def test_other_random_numbers_than_those_of_a_layer_are_refused(rngs):
    with pytest.raises(ValueError, match=r"such as nnx.Rngs\(0\), got"):
        MultiHeadAttention("favor", **SIZES, rngs=rngs)


@pytest.mark.quick("favor-learned + rope2d", "softmax-relative_key")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "none"),
        ("favor", "learned + rope2d"),
        ("softmax", "relative_key"),
        ("favor", "sincos_bias"),
        ("linformer(k=5)", "fourier_values"),
    ],
)
def test_position_equals_linen_with_its_variables(attention, position):
    ours = Position(
        position,
        attention,
        **SIZES,
        num_layers=LAYERS,
        grid=GRID,
        num_prefix=1,
        rngs=nnx.Rngs(0),
    )
    _, make = build(attention, position, num_layers=LAYERS, **SIZES)
    linen, variables, x = make(), ours.to_linen(), draw(2, N - 1, DIM)
    added = linen.apply(variables, x, GRID, method="add_to_tokens")
    np.testing.assert_array_equal(ours.add_to_tokens(x), added)
    layers = linen.apply(variables, GRID, 1, method="per_layer") or [None] * LAYERS
    chex.assert_trees_all_equal(ours.per_layer(), layers)


def test_points_equal_linen_with_its_variables():
    position = Position(
        "fourier_values(rank=2)",
        "favor",
        **SIZES,
        num_layers=LAYERS,
        grid=(1, 1, 1),
        rngs=nnx.Rngs(0),
    )
    attention = MultiHeadAttention("favor", **SIZES, rngs=nnx.Rngs(1))
    points, x = 5 * draw(2, N, 3, seed=1), draw(2, N, DIM)
    layers = position.linen.apply(position.to_linen(), points, 0, method="per_layer")
    chex.assert_trees_all_equal(position.per_layer(points), layers)
    out = attention(x, position=layers[1])
    expected = attention.linen.apply(attention.to_linen(), x, position=layers[1])
    np.testing.assert_array_equal(out, expected)


def test_tokens_from_a_position_on_get_their_rows():
    position = Position(
        "learned", "softmax", **SIZES, num_layers=1, grid=(N,), rngs=nnx.Rngs(0)
    )
    x = draw(2, N, DIM)
    whole = position.add_to_tokens(x)
    assert not np.allclose(whole[:, :3], whole[:, 2:5])
    part = position.add_to_tokens(x[:, 2:5], jnp.int32(2))
    np.testing.assert_allclose(part, whole[:, 2:5], atol=1e-6)
    for start, tokens in ((N - 2, x[:, :3]), (1, x), (-1, x[:, :3])):
        with pytest.raises(ValueError, match=f"index={start} must be the position"):
            position.add_to_tokens(tokens, start)
    with pytest.raises(ValueError, match=f"holds {N} tokens, got {N + 1}"):
        position.add_to_tokens(draw(2, N + 1, DIM))


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention", ["softmax", "favor(num_features=5)", "relu(num_features=5)"]
)
def test_memory_and_segments_equal_linen(attention):
    memory, mask = draw(2, 11, 5, seed=1), np.arange(11) < np.array([[11], [5]])
    segment_ids = np.array([[0, 0, 1, 1, 1, 0, 0], [3, 3, 3, 3, 5, 5, 5]])
    calls = [
        ({"memory_dim": 5, "num_kv_heads": 1}, {"memory": memory, "key_mask": mask}),
        (
            {"head_dim": 3, "causal": True, "out_bias": False},
            {"segment_ids": segment_ids},
        ),
    ]
    x = draw(2, N, DIM)
    for options, inputs in calls:
        ours = MultiHeadAttention(attention, **SIZES, **options, rngs=nnx.Rngs(0))
        shared = {key: options[key] for key in options if key != "memory_dim"}
        make, _ = build(attention, "none", num_layers=1, **SIZES, **shared)
        linen = make(layer=0)

        @quick_jit
        def both(x, inputs, ours=ours, linen=linen):
            return ours(x, **inputs), linen.apply(ours.to_linen(), x, **inputs)

        np.testing.assert_array_equal(*both(x, inputs))


@pytest.mark.quick("softmax-relative_value")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "relative_value"),
        ("favor(num_features=5)", "rope1d"),
        ("relu(num_features=5)", "sincos_bias"),
        ("lor_translution(rank=2)", "none"),
        ("gated_positional", "none"),
        ("softmax(window=3)", "rope1d"),
    ],
)
def test_decoding_equals_the_whole_sequence(attention, position):
    options = {**SIZES, "causal": True, "grid": (N,), "rngs": nnx.Rngs(0)}
    ours = MultiHeadAttention(attention, **options)
    graph, state = nnx.split(
        (ours, Position(position, attention, **options, num_layers=1))
    )

    @quick_jit
    def decode(state, x):
        ours, encoding = nnx.merge(graph, state)
        (layer,) = encoding.per_layer()

        def steps(start):
            return [
                ours(x[:, i : i + 1], position=layer, index=jnp.int32(i))
                for i in range(start, N)
            ]

        prefill = ours(x[:, :3], position=layer, index=2)
        filled = jnp.concatenate([prefill, *steps(3)], axis=1)
        return ours(x, position=layer), filled, jnp.concatenate(steps(0), axis=1)

    whole, filled, stepwise = decode(state, draw(2, N, DIM))
    np.testing.assert_allclose(filled, whole, atol=2e-6)
    np.testing.assert_allclose(stepwise, whole, atol=2e-6)


def test_decoding_works_in_control_flow_of_nnx():
    """Loops and branches need the same variables before and after."""
    options = {**SIZES, "causal": True, "grid": (N,), "rngs": nnx.Rngs(0)}
    ours, x = MultiHeadAttention("softmax", **options), draw(2, N, DIM)

    @nnx.jit
    def decode(ours, x):
        whole = ours(x)
        # A cache of another batch, which the prompt replaces.
        ours(x[:1, :2], index=1)
        prefill = ours(x[:, :3], index=2)

        def step(carry):
            ours, i, out = carry
            token = jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)
            y = nnx.cond(
                i < N,
                lambda ours: ours(token, index=i),
                lambda ours: jnp.zeros_like(token),
                ours,
            )
            return ours, i + 1, jax.lax.dynamic_update_slice_in_dim(out, y, i, axis=1)

        out = jnp.pad(prefill, [(0, 0), (0, N - 3), (0, 0)])
        carry = (ours, jnp.int32(3), out)
        return whole, nnx.while_loop(lambda carry: carry[1] < N, step, carry)[2]

    whole, out = decode(ours, x)
    np.testing.assert_allclose(out, whole, atol=2e-6)


@pytest.mark.parametrize(
    ("attention", "position", "options", "message"),
    [
        ("favor", "relative_key", {}, "position 'relative_key' acts at the site"),
        ("softmax(window=3)", "rope1d", {}, "attention 'softmax' takes a window of .*"),
        (
            "softmax",
            "rope2d_mixed",
            {"num_kv_heads": 1},
            "position 'rope2d_mixed' encodes the keys or values of each head",
        ),
    ],
)
def test_attention_that_does_not_support_the_position_raises(
    attention, position, options, message
):
    options = {**SIZES, **options, "num_layers": 1, "grid": GRID, "rngs": nnx.Rngs(0)}
    with pytest.raises(ValueError, match=message):
        Position(position, attention, **options)


class Model(nnx.Module):
    """Two layers of FAVOR+ attention with rotary positions, and a head."""

    def __init__(self, rngs):
        self.position = Position(
            "learned + rope2d", "favor", **SIZES, num_layers=2, grid=GRID, rngs=rngs
        )
        self.attentions = nnx.List(
            [
                MultiHeadAttention("favor", **SIZES, layer=i, grid=GRID, rngs=rngs)
                for i in range(2)
            ]
        )
        self.head = nnx.Linear(DIM, 5, rngs=rngs)

    def __call__(self, x):
        x = self.position.add_to_tokens(x)
        layers = self.position.per_layer()
        for attention, layer in zip(self.attentions, layers, strict=True):
            x = x + attention(x, position=layer)
        return self.head(x.mean(axis=1))


@pytest.mark.slow
def test_training_updates_parameters_and_redraws_features():
    model, key = Model(nnx.Rngs(0)), jax.random.key(5)
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    x, labels = draw(11, N - 1, DIM), jnp.arange(11) % 5

    @nnx.jit
    def train_step(model, optimizer, x, labels):
        def loss_fn(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), labels)
            return losses.mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    before = nnx.state(model, RandomFeatures)
    losses = []
    for step in range(60):
        if step == 30:
            redrawn = nnx.jit(redraw)
            redrawn(model, key, 1)
        losses.append(float(train_step(model, optimizer, x, labels)))
    assert losses[29] < 0.7 * losses[0] and losses[-1] < losses[29]
    first, second = model.attentions
    for layer, attention in enumerate((first, second)):
        features = attention.projection.get_value()
        expected = draw_random_features(
            key,
            layer=layer,
            index=1,
            num_features=features.projection.shape[0],
            head_dim=features.projection.shape[1],
        )
        chex.assert_trees_all_close(features, expected, atol=1e-6)
    assert len(jax.tree.leaves(before)) == 2


def test_layers_share_no_random_features():
    first, second = Model(nnx.Rngs(0)).attentions
    features = [m.projection.get_value().projection for m in (first, second)]
    assert not np.allclose(*features)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["favor", "banded(separate_projections=True)"])
def test_stacked_layers_redraw_different_features(attention):
    """Stacks of NNX and of Linen get what the layers alone get."""
    key, num_layers = jax.random.key(5), 3

    def make(rngs, layer=0):
        return MultiHeadAttention(attention, **SIZES, layer=layer, grid=GRID, rngs=rngs)

    make_stack = nnx.split_rngs(splits=num_layers)(nnx.vmap(lambda rngs: make(rngs)))
    stack = make_stack(nnx.Rngs(0))
    drawn = jax.tree.leaves(nnx.state(stack, RandomFeatures))
    nnx.jit(redraw)(stack, key, 2)
    redrawn = jax.tree.leaves(nnx.state(stack, RandomFeatures))
    assert len(drawn) == len(redrawn) == 1 + ("banded" in attention)
    for before, after in zip(drawn, redrawn, strict=True):
        for x in (before, after):
            assert len(np.unique(x[:, 0, 0])) == num_layers
    for i in range(num_layers):
        layer = make(nnx.Rngs(0), layer=i)
        redraw(layer, key, 2)
        alone = jax.tree.leaves(nnx.state(layer, RandomFeatures))
        for x, expected in zip(redrawn, alone, strict=True):
            np.testing.assert_array_equal(x[i], expected)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def apply(layer, x):
        return layer(x)

    assert np.isfinite(apply(stack, draw(1, N - 1, DIM))).all()

    build_layer, _ = build(attention, "none", dim=DIM, num_heads=2, num_layers=1)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            def body(layer, x, _):
                return layer(x, grid=GRID), None

            scan = nn.scan(
                body,
                variable_axes={"params": 0, "random_features": 0},
                split_rngs={"params": True, "random_features": True},
                length=num_layers,
            )
            return scan(build_layer(layer=0, name="layer"), x, None)[0]

    features = Stack().init(jax.random.key(0), draw(1, N - 1, DIM))["random_features"]
    for x in jax.tree.leaves(features):
        assert len(np.unique(x[:, 0, 0])) == num_layers
    features = jax.tree.leaves(kernels.redraw(features, key, 2))
    for x, expected in zip(features, redrawn, strict=True):
        np.testing.assert_array_equal(x, expected)
