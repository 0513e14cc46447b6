"""Tests that a model's precision reaches every product, and what TF32 would cost."""

import functools
import types

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels import draw_orthogonal, positive_features, precision
from relattn.kernels.linear import linear_attention
from relattn.models import GPT, ResNet18, ViT
from relattn.nn import ATTENTIONS
from tests.helpers.specs import small

SIZES = {"dim": 6, "num_layers": 1, "num_heads": 2, "mlp_dim": 7}
MODELS = {
    "resnet18": (
        lambda **options: ResNet18(3, **options),
        np.zeros((1, 8, 8, 1), np.float32),
    ),
    "gpt": (
        lambda **options: GPT(11, 5, attention="translution", **SIZES, **options),
        np.zeros((1, 5), np.int32),
    ),
} | {
    name: (
        functools.partial(ViT, 3, patch_size=2, attention=small(name), **SIZES),
        np.zeros((1, 6, 10, 1), np.float32),
    )
    for name in ATTENTIONS
}


def products(jaxpr):
    """Yields the precision of every product of a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            given = equation.params["precision"]
            yield given[0] if isinstance(given, tuple) else given
        for jaxpr in jex.core.jaxprs_in_params(equation.params):
            yield from products(jaxpr)


@pytest.mark.quick("resnet18")
@pytest.mark.parametrize("name", MODELS)
def test_the_models_precision_reaches_every_product(name):
    make_model, inputs = MODELS[name]
    model = make_model(precision="high")
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def loss(params, variables, inputs):
        return model.apply({**variables, "params": params}, inputs).sum()

    gradient = jax.make_jaxpr(jax.grad(loss))(variables["params"], variables, inputs)
    found = list(products(gradient.jaxpr))
    # Some need the highest always.
    assert set(found) <= {jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST}
    assert found.count(jax.lax.Precision.HIGH) > len(found) / 2


def test_random_features_are_exact_whatever_the_default():
    x, w = np.ones((3, 5), np.float32), np.ones((7, 5), np.float32)
    with jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(positive_features)(x, w)
    assert list(products(program.jaxpr)) == [jax.lax.Precision.HIGHEST]


@pytest.mark.slow
def test_exact_random_features_keep_most_of_the_error_of_tf32_out(monkeypatch):
    def einsum(equation, *operands, precision, **options):
        if precision is not jax.lax.Precision.HIGHEST:
            # TF32 has the exponents of float32 and 10 bits of mantissa.
            operands = [jax.lax.reduce_precision(x, 8, 10) for x in operands]
        return jnp.einsum(equation, *operands, precision=precision, **options)

    def attend(feature_precision=None):
        k_q, k_k, k_v, k_w = jax.random.split(jax.random.key(0), 4)
        q, k = (2 * jax.random.normal(key, (257, 31)) for key in (k_q, k_k))
        v, w = jax.random.normal(k_v, (257, 31)), draw_orthogonal(k_w, 109, 31)

        def feature_map(x):
            return positive_features(x, w, precision=feature_precision)

        return linear_attention(q, k, v, feature_map)

    exact = attend()
    monkeypatch.setattr(precision, "jnp", types.SimpleNamespace(**vars(jnp)))
    monkeypatch.setattr(precision.jnp, "einsum", einsum)
    errors = [
        np.linalg.norm(attend(choice) - exact) / np.linalg.norm(exact)
        for choice in (None, "default")
    ]
    assert 1e-5 < errors[0] < errors[1] / 2
    assert errors[1] < 1e-2
