"""Tests packed sequences, also those whose ids come back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.models.gpt import GPT
from relattn.nn.registry import build
from tests.helpers.quick import normal, quick_jit, run

# Runs of equal ids: 0 and 5 come back.
IDS = np.array([0, 0, 5, 0, 0, 0, 5, 5, 2, 0])
RUNS = [(0, 2), (2, 3), (3, 6), (6, 8), (8, 9), (9, 10)]
N, DIM = len(IDS), 8


def test_mask_separates_runs():
    expected = np.zeros((N, N), bool)
    for start, stop in RUNS:
        expected[start:stop, start:stop] = True
    mask = run(kernels.segment_mask, np.stack([IDS, np.zeros(N, int)]))
    np.testing.assert_array_equal(mask, [expected, np.ones((N, N), bool)])


def packed_and_alone(module, x):
    """Returns the outputs of packed sequences, and of each sequence alone."""

    @quick_jit
    def outs(x):
        variables = module.init(jax.random.key(0), x)
        packed = module.apply(variables, x, segment_ids=jnp.asarray(IDS)[None])
        alone = [module.apply(variables, x[:, slice(*run)]) for run in RUNS]
        return packed, jnp.concatenate(alone, axis=1)

    return outs(x)


@pytest.mark.quick("softmax-False")
@pytest.mark.parametrize(
    ("attention", "causal"), [("softmax", False), ("softmax", True), ("favor", True)]
)
def test_layers_attend_within_runs(attention, causal):
    make, _ = build(
        attention, "none", dim=DIM, num_heads=2, num_layers=1, causal=causal
    )
    np.testing.assert_allclose(
        *packed_and_alone(make(layer=0), normal(1, 1, N, DIM)), atol=2e-6
    )


@pytest.mark.quick("4")
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_causal_linear_attention_attends_within_runs(chunk_size):
    q, k, v, w = normal(0, 4, N, DIM)
    attend = quick_jit(
        kernels.causal_linear_attention,
        feature_map=functools.partial(kernels.positive_features, projection=w),
        chunk_size=chunk_size,
    )
    packed = attend(q, k, v, segment_ids=IDS)
    alone = [attend(*(x[slice(*run)] for x in (q, k, v))) for run in RUNS]
    np.testing.assert_allclose(packed, np.concatenate(alone), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["softmax", "favor"])
def test_a_model_attends_within_runs(attention):
    model = GPT(
        vocab_size=11,
        context_length=N,
        dim=DIM,
        num_layers=2,
        num_heads=2,
        mlp_dim=16,
        attention=attention,
    )
    tokens = jnp.arange(N)[None] % 7
    np.testing.assert_allclose(*packed_and_alone(model, tokens), atol=2e-5)
