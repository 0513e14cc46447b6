"""NaN in a masked token reaches no output of layers and models, and no gradient."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models.gpt import GPT
from relattn.models.vit import ViT
from relattn.nn.blocks import TransformerBlock
from relattn.nn.registry import ATTENTIONS, build
from tests.helpers.quick import normal, quick_jit
from tests.helpers.specs import CAUSAL, small

GRID, N, DIM = (2, 3), 7, 8
EXISTS = np.arange(2 * N).reshape(2, N) % 5 != 2


def value_and_gradients(apply, rows):
    """Compiles the rows' outputs, and the gradients of the parameters."""

    @quick_jit
    def compute(variables, *arguments):
        def loss(params):
            out = apply({**variables, "params": params}, *arguments)
            out = jnp.where(rows, out, 0.0)
            return jnp.sin(out).sum(), out

        (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(
            variables["params"]
        )
        return out, gradients

    return compute


def expect_no_effect(apply, variables, x, exists, rows):
    """Compares NaN and inf with zeros where tokens do not exist."""
    exists = exists.reshape(*exists.shape, *[1] * (x.ndim - exists.ndim))
    compute = value_and_gradients(apply, rows)
    expected, *results = (
        jax.device_get(compute(variables, np.where(exists, x, np.float32(value))))
        for value in (0, np.nan, np.inf)
    )
    chex.assert_tree_all_finite(expected)
    for result in results:
        chex.assert_trees_all_equal(result, expected)


@pytest.mark.quick("favor-True")
@pytest.mark.parametrize(
    ("attention", "causal"),
    [*((name, False) for name in ATTENTIONS), *((name, True) for name in CAUSAL)],
)
def test_block(attention, causal):
    make, _ = build(
        small(attention), "none", dim=DIM, num_heads=2, num_layers=1, causal=causal
    )
    block = TransformerBlock(make, dim=DIM, mlp_dim=11)
    grid, num_prefix = ((N,), 0) if causal else (GRID, 1)
    x = normal(1, 2, N, DIM)
    options = {"grid": grid, "num_prefix": num_prefix}
    options["key_mask"] = jax.device_put(EXISTS)
    variables = quick_jit(functools.partial(block.init, **options))(
        jax.random.key(0), x
    )
    apply = functools.partial(block.apply, **options)
    expect_no_effect(apply, variables, x, EXISTS, EXISTS[..., None])


@pytest.mark.slow
def test_memory():
    make, _ = build("favor", "none", dim=DIM, num_heads=2, num_layers=1)
    module, x = make(layer=0), jnp.ones((2, 3, DIM))
    memory = jax.device_put(normal(1, 2, N, DIM))
    variables = module.init(jax.random.key(0), x, memory=memory)

    def apply(variables, memory):
        return module.apply(
            variables, x, memory=memory, key_mask=jax.device_put(EXISTS)
        )

    expect_no_effect(apply, variables, memory, EXISTS, np.ones((2, 3, 1), bool))


@pytest.mark.quick(options=[{}])
@pytest.mark.parametrize("options", [{}, {"patch_overlap": 1, "pool": "mean"}])
def test_images(options):
    model = ViT(
        num_classes=3, patch_size=2, dim=DIM, num_layers=1, num_heads=2, mlp_dim=11,
        **options,
    )  # fmt: skip
    images = normal(1, 2, 4, 6, 1)
    exists = EXISTS[:, : N - 1]
    variables = quick_jit(model.init)(jax.random.key(0), images)
    pixels = exists.reshape(2, *GRID).repeat(2, axis=1).repeat(2, axis=2)

    def apply(variables, images):
        return model.apply(variables, images, key_mask=jax.device_put(exists))

    expect_no_effect(apply, variables, images, pixels, np.ones((2, 1), bool))


@pytest.mark.slow
def test_tokens_out_of_range():
    model = GPT(
        vocab_size=11, context_length=N, dim=DIM, num_layers=1, num_heads=2, mlp_dim=11
    )
    tokens = np.arange(2 * N).reshape(2, N) % 11
    variables = quick_jit(model.init)(jax.random.key(0), tokens)

    def apply(variables, tokens):
        return model.apply(variables, tokens, key_mask=jax.device_put(EXISTS))

    compute = value_and_gradients(apply, EXISTS[..., None])
    expected = compute(variables, tokens)
    chex.assert_tree_all_finite(expected)
    for padding in (-100, 10**6):
        found = compute(variables, np.where(EXISTS, tokens, padding))
        np.testing.assert_array_equal(found[0], expected[0])
        chex.assert_tree_all_finite(found)
