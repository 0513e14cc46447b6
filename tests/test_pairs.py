"""Tests every attention with every position encoding, in the ViT and the causal GPT.

test_contracts.py tests the kernels alone.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.kernels.platform import use_platform
from relattn.models import build_model
from studies.translation import (
    VARIANTS,
    all_pairs,
    torus_error,
    translation_error,
)
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import quick_jit
from tests.helpers.specs import CAUSAL, ON_PLANES, small

SIZES = {"dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 5}
IMAGE, PATCH, CLASSES = (4, 6, 1), 2, 3
LENGTH, VOCAB = 7, 11
BATCH = 3
# Exact, none and in expectation.
ONE_A_VERDICT = [
    ("softmax", "relative_key"),
    ("softmax", "learned"),
    ("favor", "constrained_sincos"),
]
DOCUMENT = (Path(__file__).parents[1] / "docs" / "contracts.md").read_text("utf-8")


class Results(NamedTuple):
    """Results of one program.

    Attributes:
        logits: Logits of the batch.
        gradients: Gradients of a loss with respect to the parameters.
        half: Logits of the model in bfloat16.
    """

    logits: jax.Array
    gradients: dict
    half: jax.Array


class Model(NamedTuple):
    """A small model and how to call it.

    Attributes:
        names: Names of the model, its attention and its position.
        apply: Maps parameters and inputs to logits, float32.
        evaluate: Maps parameters and inputs to `Results`; compiled.
        params: Parameters so large that every part matters.
        inputs: A batch.
    """

    names: tuple[str, str, str]
    apply: callable
    evaluate: callable
    params: dict
    inputs: np.ndarray


def build(model, attention, position, dtype):
    config = {"name": model, "attention": small(attention)}
    config |= {"position": position, "dtype": dtype, **SIZES}
    if model == "gpt":
        return build_model(config, vocab_size=VOCAB, context_length=LENGTH)
    config |= {"patch_size": PATCH, "embedding_norms": False}
    return build_model(config, num_classes=CLASSES, image_shape=IMAGE)


IN_VIT = [("vit", *pair) for pair in all_pairs()]
IN_GPT = [
    ("gpt", attention, position)
    for attention, position in all_pairs()
    if attention in CAUSAL and position not in ON_PLANES
]


# What `make test` has: kernels and sites of positions, once.
QUICK = {
    ("gpt", "softmax", "rope1d"),
    ("vit", "softmax", "learned"),
    ("vit", "softmax", "relative_key"),
    ("vit", "softmax", "rope2d_mixed"),
    ("vit", "favor", "relative_bias"),
    ("vit", "softmax", "fourier_values"),
    ("vit", "banded", "none"),
    ("vit", "lor_translution", "none"),
}


def each(pairs):
    """Parametrizes a test by pairs; all tests of a model run in succession."""
    parametrize = pytest.mark.parametrize("model", pairs, ids="-".join, indirect=True)
    mark = pytest.mark.quick(model=[pair for pair in pairs if pair in QUICK])
    return lambda test: mark(parametrize(test))


# Causal pairs come first in both: pytest groups tests by the index in these lists.
every_pair, every_causal_pair = each([*IN_GPT, *IN_VIT]), each(IN_GPT)


@pytest.fixture(scope="module")
def model(request):
    # Released after its tests: a program takes some 500 of a process's 65,530 memory
    # maps.
    return make(request.param)


def make(names):
    rng = np.random.default_rng(0)
    if names[0] == "gpt":
        inputs = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    else:
        inputs = rng.random((BATCH, *IMAGE)).astype(np.float32)
    full, half = (build(*names, dtype) for dtype in ("float32", "bfloat16"))
    with jax.numpy_rank_promotion("raise"):
        shapes = jax.eval_shape(full.init, jax.random.key(0), inputs)
    variables = jax.tree.map(
        lambda leaf: (0.5 * rng.normal(size=leaf.shape)).astype(leaf.dtype), shapes
    )
    params = variables.pop("params")

    def apply(module, params, inputs):
        return module.apply({"params": params, **variables}, inputs)

    @quick_jit
    def evaluate(params, inputs):
        def loss(params):
            logits = apply(full, params, inputs)
            return jnp.square(logits - 1.0).sum(), logits

        gradients, logits = jax.grad(loss, has_aux=True)(params)
        return Results(logits, gradients, apply(half, params, inputs))

    def evaluate_on_host(params, inputs):
        return jax.device_get(evaluate(params, inputs))

    apply_full = functools.partial(apply, full)
    return Model(names, apply_full, evaluate_on_host, params, inputs)


@every_pair
def test_every_parameter_has_a_gradient(model):
    gradients = model.evaluate(model.params, model.inputs).gradients
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        # The head reads only CLS, which is at the same distance from all tokens.
        if not re.search(r"block_1.*\['table'\]", name):
            assert np.abs(leaf).max() > 1e-6, name


# Cheap: it only traces.
@pytest.mark.quick("vit-favor-sincos_bias", "vit-softmax-fourier_values")
@each([*IN_GPT, *IN_VIT])
def test_numpy_parameters_stay_as_they_are(model):
    """An update in place raises, since the arrays are read-only."""

    def read_only(leaf):
        leaf = np.array(leaf)
        leaf.flags.writeable = False
        return leaf

    params = jax.tree.map(read_only, model.params)
    with unchecked_annotations():
        logits = jax.eval_shape(lambda x: model.apply(params, x), model.inputs)
    assert logits.dtype == np.float32


@pytest.mark.parametrize("position", ON_PLANES)
def test_positions_on_planes_raise_for_text(position):
    with pytest.raises(ValueError, match="needs tokens on a grid of two axes or more"):
        make(("gpt", "softmax", position))


@every_pair
def test_an_example_does_not_depend_on_its_batch(model):
    logits = model.evaluate(model.params, model.inputs).logits
    others = np.concatenate([model.inputs[:1], model.inputs[:-1]])
    changed = model.evaluate(model.params, others).logits
    np.testing.assert_array_equal(changed[0], logits[0])
    assert (changed[1:] != logits[1:]).any()


@pytest.mark.quick("gpt-softmax-rope1d", "vit-favor-relative_bias", "vit-routing-none")
@each([*IN_GPT, *IN_VIT])
def test_vmap_over_examples_equals_the_batch(model):
    @quick_jit
    def one_by_one(params, inputs):
        return jax.vmap(lambda one: model.apply(params, one[None])[0])(inputs)

    logits = model.evaluate(model.params, model.inputs).logits
    found = one_by_one(model.params, model.inputs)
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-5)


# Cheap: it only traces.
@pytest.mark.quick(
    "gpt-hedgehog-none", "gpt-softmax-rope1d", "vit-lor_translution-none"
)
@each([*IN_GPT, *IN_VIT])
def test_batch_may_be_empty(model):
    def gradients(params, inputs):
        return jax.vjp(lambda params: model.apply(params, inputs), params)

    # Also where JAX forbids operands of different ranks.
    with jax.numpy_rank_promotion("raise"):
        logits, _ = jax.eval_shape(gradients, model.params, model.inputs[:0])
    sizes = (LENGTH, VOCAB) if model.names[0] == "gpt" else (CLASSES,)
    assert logits.shape == (0, *sizes)


@every_pair
def test_outputs_are_finite_for_large_tokens(model):
    def scale(path, leaf):
        name = jax.tree_util.keystr(path)
        return (
            np.float32(20) * leaf if re.search(r"attention_norm.*scale", name) else leaf
        )

    loud = jax.tree_util.tree_map_with_path(scale, model.params)
    for leaf in jax.tree.leaves(model.evaluate(loud, model.inputs)):
        assert np.isfinite(leaf).all()
    half = model.evaluate(model.params, model.inputs).half
    assert half.dtype == np.float32 and np.isfinite(half).all()


@every_causal_pair
def test_earlier_outputs_do_not_depend_on_later_tokens(model):
    logits = model.evaluate(model.params, model.inputs).logits
    seen = np.where(np.arange(LENGTH) < 4, model.inputs, 0)
    changed = model.evaluate(model.params, seen).logits
    np.testing.assert_array_equal(changed[:, :4], logits[:, :4])
    assert (changed[:, 4:] != logits[:, 4:]).any()


@pytest.mark.quick("vit-softmax-relative_key", "vit-softmax-rope2d_mixed")
@each([names for names in IN_VIT if names[1] == "softmax" or names[2] == "none"])
def test_lowers_for_cuda_and_tpu_without_a_scatter(model):
    """Tests the ViT; test_contracts.py tests the causal kernels."""

    def gradients(params, inputs):
        return jax.grad(lambda params: model.apply(params, inputs).sum())(params)

    platforms = ("cuda", "tpu")
    arguments = jax.eval_shape(lambda: (model.params, model.inputs))
    with use_platform("gpu"):
        export = jax.export.export(jax.jit(gradients), platforms=platforms)
        exported = export(*arguments)
    assert exported.platforms == platforms
    # tests/mechanisms says why routing has one.
    found = "stablehlo.scatter" in exported.mlir_module()
    assert found == (model.names[1] == "routing")


@pytest.mark.quick(*map("-".join, ONE_A_VERDICT))
@pytest.mark.parametrize(("attention", "position"), [*all_pairs(), *VARIANTS])
def test_translation_error_equals_the_documented_one(attention, position):
    row = re.search(
        rf"^\| `{re.escape(attention)}` \| `{position}` "
        r"\| ([a-z ]+) \| (\S+) \| (\S+) ± \S+ \| ([a-z ]+|–) \|$",
        DOCUMENT,
        re.M,
    )
    error = translation_error(attention, position)
    assert row and row[1] == error.verdict, error
    torus = torus_error(attention, position)
    assert row[4] == (torus.verdict if torus else "–"), torus
    if error.verdict != "exact":
        # The document states one digit.
        stated = [float(row[2]), float(row[3])]
        np.testing.assert_allclose([error.single, error.mean], stated, rtol=0.5)
    if error.verdict == "in expectation":
        # A single draw has a far larger error.
        assert error.single > 4 * error.mean
