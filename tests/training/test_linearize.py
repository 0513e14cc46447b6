"""Tests linear attention that learns to imitate the softmax attention of a model."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from relattn.models import GPT, PointTransformer, ViT, attention_weights
from relattn.nn import registry
from relattn.nn.linear_attention import LinearAttention
from relattn.training import linearize
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, normal_like, quick_jit, run

IMAGES = normal(0, 2, 4, 6, 1)
# The second set has five points.
POINTS = np.where(np.arange(7)[:, None] < [[[7]], [[5]]], normal(0, 2, 7, 3), np.nan)
TOKENS = np.array([[1, 4, 2, 0, 3, 3, 1], [0, 1, 2, 3, 4, 0, 1]], np.int32)
SIZES = {"dim": 8, "num_heads": 2, "num_layers": 2, "mlp_dim": 5}


def trained(name, **options):
    """Returns a model with softmax attention, its variables and inputs."""
    if name == "gpt":
        # Both heads share keys and values.
        model, inputs = GPT(5, 7, **SIZES, num_kv_heads=1, **options), TOKENS
    elif name == "points":
        model, inputs = PointTransformer(3, 2, **SIZES, **options), POINTS
    else:
        options = {"position": "learned", **options}
        model, inputs = ViT(3, patch_size=2, **SIZES, **options), IMAGES
    shapes = jax.eval_shape(model.init, jax.random.key(0), inputs)
    variables = normal_like(shapes, scale=0.5, seed=1)
    return model, variables, inputs


@functools.cache
def swapped(name, attention, position):
    model, variables, inputs = trained(name, position=position)
    key = jax.random.key(3)
    return linearize.swap_attention(model, variables, attention, inputs, key), inputs


def test_swapped_model_keeps_every_parameter_in_its_layer():
    model, variables, inputs = trained("vit")
    linear, new = linearize.swap_attention(
        model, variables, "favor(num_features=5)", inputs, jax.random.key(3)
    )
    assert linear == model.clone(attention="favor(num_features=5)")
    found = flatten_dict(new["params"])
    # Layers with softmax are stacked, those with favor are not.
    for path, leaf in flatten_dict(variables["params"]).items():
        if path[0] == "blocks_0":
            for layer in range(2):
                kept = found.pop((f"block_{layer}", *path[1:]))
                np.testing.assert_array_equal(kept, leaf[layer])
        else:
            np.testing.assert_array_equal(found.pop(path), leaf)
    assert not found and len(jax.tree.leaves(new["random_features"])) > 1


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [("relu(num_features=5)", "favor", "bias"), ("softmax", "banded", "k.kernel")],
)
def test_swapping_an_attention_with_other_parameters_raises(old, new, lost):
    """Position heads of `banded` have no keys, so its kernel is of another shape."""
    model, variables, inputs = trained("vit", attention=old)
    message = rf"'{new}' does not keep the parameters of attention '{old[:4]}.*{lost}"
    with pytest.raises(ValueError, match=message):
        linearize.swap_attention(model, variables, new, inputs, jax.random.key(0))


def test_swapping_a_window_for_all_tokens_raises():
    """Else the feature maps would imitate weights that the model does not have."""
    model, variables, inputs = trained("gpt", attention="softmax(window=3)")
    swap = functools.partial(linearize.swap_attention, model, variables)
    message = "'softmax(window=3)' attends to a window, and 'hedgehog' to all earl"
    with pytest.raises(ValueError, match=re.escape(message)):
        swap("hedgehog", inputs, jax.random.key(0))
    other, same = swap("softmax(window=0)", inputs, jax.random.key(0))
    assert other.attention == "softmax(window=0)"
    jax.tree.map(np.testing.assert_array_equal, same["params"], variables["params"])


@pytest.mark.quick("vit-hedgehog-learned", "points-hedgehog-fourier_values")
@pytest.mark.parametrize(
    ("name", "attention", "position"),
    [
        ("vit", "hedgehog", "learned"),
        ("vit", "relu(num_features=5)", "fourier_bias"),
        ("vit", "favor(num_features=5)", "constrained_sincos"),
        ("gpt", "hedgehog", "rope1d"),
        ("gpt", "hedgehog", "relative_bias"),
        ("points", "hedgehog", "fourier_values"),
    ],
)
def test_divergence_is_that_of_the_weights_of_both_models(name, attention, position):
    """The first layer sees the same tokens in both models, the others do not."""
    model, old, _ = trained(name, position=position)
    (linear, new), inputs = swapped(name, attention, position)

    def compute(old, new, inputs):
        first, *_ = attention_weights(model, old, inputs)
        linear_first, *_ = attention_weights(linear, new, inputs)
        return first, linear_first, linearize.softmax_divergences(linear, new, inputs)

    a, b, found = run(compute, old, new, inputs)
    logs = np.log(np.where(a > 0, a, 1) / np.where(a > 0, b, 1))
    # Not those of points that do not exist.
    exists = ~np.isnan(inputs).any(-1)[:, None] if name == "points" else True
    expected = np.float64(a * logs).sum(-1).mean(where=exists)
    assert found.shape == (2,) and expected > 1e-3
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


class Exact(LinearAttention):
    """An attention that has the weights of softmax, by its own computation."""

    def attend(self, q, k, v, context):
        scores = jnp.einsum("...id,...jd->...ij", q, k) / q.shape[-1] ** 0.5
        return jax.nn.softmax(scores, axis=-1) @ v


def test_divergence_from_equal_weights_is_zero(monkeypatch):
    monkeypatch.setitem(registry.ATTENTIONS, "exact", Exact)
    linear, variables, inputs = trained("vit", attention="exact")
    divergences = functools.partial(linearize.softmax_divergences, linear)
    np.testing.assert_allclose(run(divergences, variables, inputs), 0, atol=1e-6)


def test_every_layer_sees_the_tokens_of_the_model_with_softmax():
    """A layer's divergence does not depend on the feature maps before it."""
    (linear, variables), inputs = swapped("vit", "hedgehog", "learned")
    divergences = quick_jit(functools.partial(linearize.softmax_divergences, linear))
    before = divergences(variables, inputs)
    path = ("blocks_0", "attention", "query_projection")
    leaf = flatten_dict(variables["params"])[path].at[0].mul(-3)
    params = linearize.replace_params(variables["params"], {path: leaf})
    after = divergences({**variables, "params": params}, inputs)
    assert after[0] != before[0] and after[1] == before[1]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("softmax", "ViT has no linear attention: give it one by swap_attention("),
        ("banded(clip=2)", "BandedAttention has heads without keys, which cannot"),
    ],
)
def test_attention_that_is_not_linear_raises(attention, message):
    model, variables, inputs = trained("vit", attention=attention)
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(
            functools.partial(linearize.softmax_divergences, model), variables, inputs
        )


@pytest.mark.quick("vit-hedgehog")
@pytest.mark.parametrize(
    ("name", "attention"),
    [("vit", "hedgehog"), ("vit", "relu(num_features=5)"), ("gpt", "hedgehog")],
)
def test_imitation_lowers_the_divergence_and_changes_feature_maps_only(name, attention):
    position = {"vit": "learned", "gpt": "rope1d"}[name]
    (linear, variables), inputs = swapped(name, attention, position)
    steps = []
    # Decay would change parameters that have no gradient.
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    new, divergences = linearize.imitate_softmax(
        linear, variables, [inputs] * 20, optimizer, on_step=steps.append
    )
    assert steps == list(range(1, 21)) and divergences.shape == (20, 2)
    assert (divergences[-1] < 0.9 * divergences[0]).all()
    old, new = (flatten_dict(tree["params"]) for tree in (variables, new))
    changed = {path for path, leaf in old.items() if (leaf != new[path]).any()}
    kept = {path for path in old if len(path) == 3 and path[1] == "attention"}
    assert changed == kept and len(changed) == 2


def test_attention_without_learned_features_raises():
    linear, variables, inputs = trained("vit", attention="favor(num_features=5)")
    message = "ViT with attention 'favor(num_features=5)' has no learned feature maps"
    with pytest.raises(ValueError, match=re.escape(message)):
        linearize.imitate_softmax(linear, variables, [inputs], optax.adam(1e-2))
    with pytest.raises(ValueError, match="batches is empty: pass a batch of inputs"):
        linearize.imitate_softmax(linear, variables, [], optax.adam(1e-2))
    message = "optimizer must be one of optax, .* got 0.1"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        linearize.imitate_softmax(linear, variables, [inputs], 0.1)
    messages = {"of inputs, not an array": inputs, "without labels, got dict": [{}]}
    for message, batches in messages.items():
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            linearize.imitate_softmax(linear, variables, batches, optax.adam(1e-2))


def test_parameters_in_place_of_variables_and_other_models_raise():
    model, variables, inputs = trained("vit")
    swap, args = linearize.swap_attention, ("favor", inputs, jax.random.key(0))
    with pytest.raises(ValueError, match="pass {'params': params}, got the names blo"):
        swap(model, variables["params"], *args)
    with pytest.raises(ValueError, match="Dense has no attention to swap: pass a ViT"):
        swap(nn.Dense(3), variables, *args)


def test_lora_changes_the_projections_of_all_layers_and_nothing_else():
    _, variables, _ = trained("vit")
    params = variables["params"]

    def compute(key):
        lora = linearize.init_lora(params, key, rank=3)
        changed = jax.tree.map(lambda leaf: leaf + 0.5, lora)
        merged = [linearize.merge_lora(params, change) for change in (lora, changed)]
        return changed, *map(flatten_dict, merged)

    changed, at_start, merged = run(compute, jax.random.key(0))
    assert {path[2] for path in changed} == {"q", "k", "v", "out"}
    for path, leaf in flatten_dict(params).items():
        np.testing.assert_array_equal(at_start[path], leaf)
        if path in changed:
            a, b = (np.float64(changed[path][name]) for name in "ab")
            assert a.shape == (2, leaf.shape[1], 3)
            # Each layer has its own change.
            leaf = leaf + 2.0 * np.stack([x @ y for x, y in zip(a, b, strict=True)])
        np.testing.assert_allclose(merged[path], leaf, rtol=1e-5, atol=1e-6)


def test_invalid_lora_raises():
    _, variables, _ = trained("vit")
    params, key = variables["params"], jax.random.key(0)
    for rank in (0, 2.5):
        message = f"rank must be a whole number of at least 1, got {rank}"
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            linearize.init_lora(params, key, rank=rank)
    with pytest.raises(ValueError, match="pattern='atention' finds none of .*blocks_0"):
        linearize.init_lora(params, key, pattern="atention")
    with pytest.raises(ValueError, match=r"pattern='\(q' is not a regular expression"):
        linearize.init_lora(params, key, pattern="(q")
    lora = linearize.init_lora(params, key)
    with pytest.raises(ValueError, match="params lack the matrices of .*q/kernel"):
        linearize.merge_lora({"w": jnp.eye(2)}, lora)
