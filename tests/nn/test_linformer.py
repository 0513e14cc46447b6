"""Tests Linformer's projections: sharing, initial values, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import build_model
from relattn.nn.linformer import SHARINGS, LinformerAttention
from relattn.nn.registry import build
from tests import reference

N, GRID, K = 7, (2, 3), 3
SIZES = {"dim": 6, "num_heads": 2, "num_layers": 3}


def make(sharing, **options):
    config = {"name": "vit", "mlp_dim": 5, "patch_size": 1, **SIZES, **options}
    config["attention"] = f"linformer(k={K}, sharing={sharing!r})"
    images = jax.random.normal(jax.random.key(1), (2, *GRID, 1))
    return build_model(config, num_classes=3, image_shape=images.shape[1:]), images


@pytest.mark.parametrize(
    ("sharing", "count"),
    [("none", 3 * 2 * 2), ("heads", 3 * 2), ("key_value", 3), ("layers", 1)],
)
def test_parameters_are_shared_as_documented(sharing, count):
    model, images = make(sharing)
    params = jax.eval_shape(model.init, jax.random.key(0), images)["params"]
    sizes = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if "projection" in jax.tree_util.keystr(path)
    ]
    assert sum(sizes) == count * K * N
    assert len(SHARINGS) == 4


@pytest.mark.quick("3")
@pytest.mark.parametrize("k", [K, N + 4])
def test_output_equals_the_reference_with_linear_projections(k):
    module = LinformerAttention(dim=6, num_heads=2, k=k)
    x = jax.random.normal(jax.random.key(1), (1, N, 6))
    out, variables = jax.jit(module.init_with_output)(jax.random.key(0), x)

    @jax.jit
    def expected(params):
        def project(name):
            y = x[0] @ params[name]["kernel"] + params[name]["bias"]
            return y.reshape(N, 2, 3).swapaxes(0, 1)

        matrices = [params[f"{name}_projection"] for name in ("key", "value")]
        heads = [
            reference.linformer_attention(*inputs, np.ones(N, bool))
            for inputs in zip(*map(project, "qkv"), *matrices, strict=True)
        ]
        merged = jnp.stack(heads, axis=1).reshape(N, 6)
        return merged @ params["out"]["kernel"] + params["out"]["bias"]

    params = variables["params"]
    np.testing.assert_allclose(out[0], expected(params), atol=1e-5)
    # Uniform in +-1/sqrt(k) for any number of heads.
    assert 0.8 * k**-0.5 < np.abs(params["key_projection"]).max() <= k**-0.5


@pytest.mark.parametrize(
    ("attention", "causal", "message"),
    [
        ("linformer(k=0)", False, "needs k >= 1, got 0"),
        ("linformer(sharing='head')", False, "'head' of attention 'linformer': did"),
        ("linformer", True, "attention 'linformer' has no causal form: choose from"),
    ],
)
def test_invalid_options_raise(attention, causal, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(attention, "none", **SIZES, causal=causal)


def test_sharing_over_layers_needs_a_model():
    module = LinformerAttention(dim=6, num_heads=2, k=K, sharing="layers")
    with pytest.raises(ValueError, match="needs the model's projection: pass shared="):
        module.init(jax.random.key(0), jnp.ones((1, N, 6)))
