"""Tests the NNX models against the Linen models on the same variables."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util

import relattn
from relattn.nn.blocks import Dropout
from relattn.nn.nnx import GPT, Model, RandomFeatures, ViT, generate, redraw
from tests.helpers.quick import normal, normal_like, run

SIZES = {"dim": 12, "num_layers": 2, "num_heads": 3, "mlp_dim": 17}
CLASSES, SHAPE, PATCHES = 7, (6, 10, 1), 15
VOCAB, LENGTH = 13, 7
IMAGES = jax.device_put(normal(1, 3, *SHAPE))
TOKENS = np.random.default_rng(2).integers(0, VOCAB, (3, LENGTH), np.int32)
TOKENS = jax.device_put(TOKENS)


def vit(**options):
    return {"num_classes": CLASSES, "patch_size": 2, **SIZES, **options}


def gpt(**options):
    return {"vocab_size": VOCAB, "context_length": LENGTH, **SIZES, **options}


def draw_variables(linen, inputs):
    """Returns variables so large that every part matters."""
    shapes = jax.eval_shape(linen.init, jax.random.key(0), inputs)
    variables = normal_like(shapes, scale=0.3)
    return jax.device_put(variables)


def pair(options):
    """Returns an NNX model, the Linen model, and the variables of both."""
    if "vocab_size" in options:
        make, linen, inputs = GPT, relattn.GPT(**options), TOKENS
    else:
        make = functools.partial(ViT, image_shape=SHAPE)
        linen, inputs = relattn.ViT(**options), IMAGES
    variables = draw_variables(linen, inputs)
    # Without drawing variables.
    model = nnx.eval_shape(lambda: make(**options, rngs=nnx.Rngs(0)))
    model.update_from_linen(variables)
    return model, linen, variables


def values_and_gradients(model, linen, variables, inputs, **masks):
    """Returns outputs and gradients of both models, computed in one program."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    shape = jax.eval_shape(linen.apply, variables, inputs, **masks).shape
    weights = normal(3, *shape)

    def ours(params):
        out = nnx.merge(graph, params, rest)(inputs, **masks)
        return (out * weights).sum(), out

    def theirs(params):
        out = linen.apply({**variables, "params": params}, inputs, **masks)
        return (out * weights).sum(), out

    def both(params, linen_params):
        grad = functools.partial(jax.grad, has_aux=True)
        return grad(ours)(params), grad(theirs)(linen_params)

    (found, out), (expected, linen_out) = run(both, params, variables["params"])
    return (out, nnx.to_pure_dict(found)), (linen_out, expected)


@pytest.mark.quick("favor(num_features=5)-rope2d")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "learned + relative_bias"),
        ("softmax", "relative_key + fourier_values"),
        ("softmax", "cayley_string"),
        ("favor(num_features=5)", "rope2d"),
        ("relu(num_features=5)", "sincos_bias"),
        ("banded(clip=2, num_features=5, position_heads=1)", "learnable_sincos"),
        ("translution", "none"),
        ("linformer(k=5, sharing='layers')", "none"),
        ("gated_positional", "sincos"),
        ("hedgehog", "constrained_sincos"),
    ],
)
def test_vit_equals_linen(attention, position):
    options = vit(attention=attention, position=position, pool="cls_mean")
    mask = jax.device_put(np.arange(PATCHES) < np.array([[15], [11], [7]]))
    found, expected = values_and_gradients(*pair(options), IMAGES, key_mask=mask)
    chex.assert_trees_all_equal(found, expected)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(found))


MODERN = {
    "num_kv_heads": 1,
    "norm_type": "rms_norm",
    "activation": "swiglu",
    "out_bias": False,
    "mlp_bias": False,
}
LLAMA = {**MODERN, "head_norm": False}


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "favor(num_features=5)", "hedgehog"])
def test_vit_with_parts_of_llama_equals_linen(attention):
    options = vit(attention=attention, position="rope2d", pool="attention", **MODERN)
    found, expected = values_and_gradients(*pair(options), IMAGES)
    chex.assert_trees_all_equal(found, expected)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "position", "options"),
    [
        ("softmax", "learned + t5_bias", {}),
        ("favor(num_features=5)", "rope1d", {}),
        ("favor(num_features=5)", "sincos_bias", {}),
        ("lor_translution(rank=2)", "learnable_sincos", {}),
        ("softmax", "learned + relative_value", {}),
        ("softmax", "rope1d", LLAMA),
    ],
)
def test_gpt_equals_linen_and_decodes(attention, position, options):
    """Prefill and single tokens have the logits of the whole sequence."""
    options = gpt(attention=attention, position=position, **options)
    model, linen, variables = pair(options)
    masks = {}
    if position in ("rope1d", "learned + t5_bias"):
        segment_ids = np.array([[0, 0, 0, 1, 1, 2, 2]] * 3, np.int32)
        masks["segment_ids"] = jax.device_put(segment_ids)
    found, expected = values_and_gradients(model, linen, variables, TOKENS, **masks)
    chex.assert_trees_all_equal(found, expected)
    graph, state = nnx.split(model)

    def decode(state, variables, tokens):
        model = nnx.merge(graph, state)
        # The cache of another batch is forgotten.
        model(tokens[:1, :2], index=1)
        rows = [model(tokens, index=2)]
        for i in range(3, LENGTH):
            rows.append(model(tokens[:, i : i + 1], index=jnp.int32(i)))
        return jnp.concatenate(rows, axis=1), linen.apply(variables, tokens)[:, 2:]

    found, expected = run(decode, state, variables, TOKENS)
    np.testing.assert_allclose(found, expected, atol=2e-5)


class Drop(nn.Module):
    """Drops inputs."""

    dropout: float = 0.5

    @nn.compact
    def __call__(self, x, *, deterministic):
        return Dropout(self.dropout)(x, deterministic=deterministic)


def test_dropout_draws_from_the_stream_of_the_model():
    model = Model(Drop(), {}, rngs=nnx.Rngs(dropout=11))
    x = jax.device_put(np.ones((3, 37), np.float32))
    assert not model.deterministic
    assert nnx.view(model, deterministic=True).deterministic
    graph, state = nnx.split(model)

    def ours(state):
        model, given = nnx.merge(graph, state), nnx.Rngs(dropout=5)
        outs = [model(x), model(x), model(x, rngs=given)]
        model.eval()
        outs += [model(x), model(x, deterministic=False)]
        model.train()
        return [*outs, model(x, deterministic=True)]

    def theirs(keys):
        apply = functools.partial(Drop().apply, {}, x, deterministic=False)
        return [apply(rngs={"dropout": key}) for key in keys]

    # A stream like that of the model; evaluation draws nothing.
    stream = nnx.Rngs(dropout=11)["dropout"].fork()
    given = nnx.Rngs(dropout=5)["dropout"]()
    keys = [stream(), stream(), given, stream()]
    first, second, other, third = run(theirs, keys)
    assert len(np.unique([first, second, other, third], axis=0)) == 4
    expected = [first, second, other, x, third, x]
    np.testing.assert_array_equal(run(ours, state), expected)


def test_tabulate_shows_models_with_attributes_of_their_users():
    model = Model(Drop(), {}, rngs=nnx.Rngs(dropout=11))
    model.label = "drop"
    assert "float32[3,7]" in nnx.tabulate(
        model, np.ones((3, 7), np.float32), console_kwargs={"force_terminal": False}
    )
    assert model.label == "drop"


def test_dropout_without_random_numbers_raises():
    with pytest.raises(ValueError, match=r"the model has dropout but no random num"):
        Model(Drop(), {})(np.ones((1, 7)))


@pytest.mark.slow
def test_centroids_move_in_training_only():
    model, linen, variables = pair(vit(attention="routing(clusters=2)"))
    call = nnx.jit(lambda model: model(IMAGES))
    model.eval()
    call(model)
    chex.assert_trees_all_equal(model.to_linen(), variables)
    model.train()

    # Batch statistics are written through `nnx.grad` too.
    nnx.jit(nnx.grad(lambda model: model(IMAGES).sum()))(model)
    apply = functools.partial(linen.apply, mutable=["batch_stats"])
    _, updates = run(apply, variables, IMAGES)
    moved = model.to_linen()
    chex.assert_trees_all_close(moved["batch_stats"], updates["batch_stats"], rtol=1e-5)
    chex.assert_trees_all_equal(moved["params"], variables["params"])


@pytest.mark.slow
def test_training_equals_that_of_linen_with_optax():
    options = vit(attention="favor(num_features=5)", position="learned + rope2d")
    model, linen, variables = pair(options)
    transform, labels = optax.adam(1e-2), jnp.array([0, 5, 2])
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

    def mean_loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @nnx.jit
    def train_step(model, optimizer):
        loss, gradients = nnx.value_and_grad(lambda m: mean_loss(m(IMAGES)))(model)
        optimizer.update(model, gradients)
        return loss

    @jax.jit
    def linen_step(variables, state):
        params, rest = variables["params"], {**variables}
        loss, gradients = jax.value_and_grad(
            lambda params: mean_loss(linen.apply({**rest, "params": params}, IMAGES))
        )(params)
        updates, state = transform.update(gradients, state)
        params = optax.apply_updates(params, updates)
        return loss, {**rest, "params": params}, state

    key, state = jax.random.key(5), transform.init(variables["params"])
    for step in range(5):
        if step == 2:
            redraw(model, key, 1)
            drawn = relattn.redraw(variables["random_features"], key, 1)
            variables = {**variables, "random_features": drawn}
        loss, variables, state = linen_step(variables, state)
        np.testing.assert_allclose(train_step(model, optimizer), loss, rtol=1e-4)
    assert len(jax.tree.leaves(nnx.state(model, RandomFeatures))) == 2
    chex.assert_trees_all_close(model.to_linen(), variables, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_orbax_restores_the_state_into_an_abstract_model(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")

    def make():
        options = vit(attention="favor(num_features=5)", dropout=0.5)
        return ViT(image_shape=SHAPE, rngs=nnx.Rngs(3), **options)

    model, call = make(), nnx.jit(lambda model: model(IMAGES))
    first = call(model)
    with checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(model))
    second = call(model)
    restored = nnx.eval_shape(make)
    with checkpoint.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "state", nnx.state(restored))
    nnx.update(restored, state)
    chex.assert_trees_all_equal(restored.to_linen(), model.to_linen())
    # The random numbers continue too.
    np.testing.assert_array_equal(call(restored), second)
    assert not np.allclose(first, second)


@pytest.mark.slow
def test_generate_equals_that_of_linen():
    model, linen, variables = pair(gpt(attention="favor(num_features=5)"))
    # A cache of the model's own does not matter.
    model(TOKENS, index=4)
    args = ([[3, 5, 1], [2]], 9)
    out = generate(model, *args, key=jax.random.key(1), top_k=5)
    expected = relattn.generate(linen, variables, *args, key=jax.random.key(1), top_k=5)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.slow
def test_new_models_differ_by_seed_and_fit_linen():
    options = vit(attention="favor(num_features=5)", head="mlp")
    models = [ViT(image_shape=SHAPE, rngs=nnx.Rngs(i), **options) for i in (0, 0, 1)]
    flat = [traverse_util.flatten_dict(model.to_linen()) for model in models]
    first, same, other = (jax.tree.leaves(tree) for tree in flat)
    chex.assert_trees_all_equal(first, same)
    # Biases of LayerNorms start at zero.
    drawn = [np.std(leaf) > 0 for leaf in first]
    equal = [np.allclose(a, b) for a, b in zip(first, other, strict=True)]
    assert equal == [not random for random in drawn]
    out = run(relattn.ViT(**options).apply, models[0].to_linen(), IMAGES)
    found = nnx.jit(lambda model: model(IMAGES))(models[0])
    np.testing.assert_allclose(found, out, atol=1e-5)


def test_variables_of_another_model_raise():
    model, _, variables = pair(vit())
    params = {**variables["params"], "head": {"kernel": np.zeros((5, 7))}}
    with pytest.raises(ValueError, match=r"at params/head/bias it has \(7,\), got no"):
        model.update_from_linen({"params": params})
