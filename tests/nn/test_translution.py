"""Tests the Translution modules: parameters, options, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.nn.positions.base import LayerPosition
from relattn.nn.positions.rotary import Rope2d
from relattn.nn.positions.sincos import ConstrainedSincosHeads
from relattn.nn.translution import LorTranslutionAttention, TranslutionAttention
from tests import reference
from tests.helpers import compare
from tests.helpers.quick import quick_jit

DIM, HEADS, GRID = 6, 2, (2, 3)
LENGTH, ROWS = 7, 3 * 5 + 3
CALL = {"grid": GRID, "num_prefix": 1}
MODULES = {"exact": TranslutionAttention, "low": LorTranslutionAttention}


def make(kind, call=CALL, **options):
    """Returns a module, parameters so large that every part matters, and tokens."""
    module = MODULES[kind](dim=DIM, num_heads=HEADS, **options)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, LENGTH, DIM)), jnp.float32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, **call))
    variables = jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype), shapes
    )
    return module, variables, x


def shapes_of(kind, call=CALL, **options):
    _, variables, _ = make(kind, call, **options)
    params = jax.tree_util.tree_leaves_with_path(variables["params"])
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in params}


def test_output_equals_the_kernel_and_a_linear_projection():
    module, variables, x = make("exact")
    params = variables["params"]
    tables = [params[f"{name}_table"] for name in "qkv"]
    attend = quick_jit(kernels.translution, index=kernels.Offsets(**CALL))
    heads = np.asarray(attend(x, *tables))
    heads = heads.swapaxes(1, 2).reshape(2, LENGTH, DIM)
    expected = heads @ params["out"]["kernel"] + params["out"]["bias"]
    out = jax.jit(lambda v: module.apply(v, x, **CALL))(variables)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_low_rank_with_zero_tables_equals_softmax_attention():
    module, variables, x = make("low", rank=3, qkv_bias=False)
    params = variables["params"]
    zero = {name: 0 * params[name] for name in ("q_table", "v_table")}
    q, k, v = (
        (x @ params[name]["kernel"]).reshape(2, LENGTH, HEADS, -1).swapaxes(1, 2)
        for name in "qkv"
    )
    heads = kernels.softmax_attention(q, k, v).swapaxes(1, 2).reshape(2, LENGTH, DIM)
    expected = heads @ params["out"]["kernel"] + params["out"]["bias"]
    apply = jax.jit(lambda params: module.apply({"params": params}, x, **CALL))
    np.testing.assert_allclose(apply(params | zero), expected, rtol=0, atol=1e-5)
    assert not np.allclose(apply(params), expected, atol=0.1)


@pytest.mark.quick("exact-options0-0.16666666666666666")
@pytest.mark.parametrize(
    ("kind", "options", "bound"), [("exact", {}, 1 / DIM), ("low", {"rank": 7}, 1 / 14)]
)
def test_tables_start_as_published(kind, options, bound):
    module, _, x = make(kind, **options)
    params = jax.jit(lambda key: module.init(key, x, **CALL))(jax.random.key(0))
    for name in "qkv":
        table = np.asarray(params["params"][f"{name}_table"])
        assert 0.97 * bound < np.abs(table).max() <= bound
        assert np.abs(table.mean()) < 4 * bound / np.sqrt(3 * table.size)


def test_a_single_matrix_starts_like_a_linear_layer():
    module, _, x = make("exact", relative="qk")
    params = jax.jit(lambda key: module.init(key, x, **CALL))(jax.random.key(0))
    matrix = np.asarray(params["params"]["v_matrix"])
    assert 0.9 * DIM**-0.5 < np.abs(matrix).max() <= DIM**-0.5


def test_options_determine_the_parameters():
    exact = shapes_of("exact", relative="qv")
    assert exact["['q_table']"] == exact["['v_table']"] == (ROWS, DIM, HEADS, 3)
    assert exact["['k_matrix']"] == (DIM, HEADS, 3) and "['k_table']" not in exact
    absolute = shapes_of("exact", absolute=True)
    assert absolute["['k_table']"] == (LENGTH, LENGTH, DIM, HEADS, 3)
    causal = shapes_of("exact", {"grid": (11,)}, causal=True)
    assert causal["['q_table']"] == (11, DIM, HEADS, 3)
    assert "['q']['kernel']" not in shapes_of("low", base=False)


@pytest.mark.parametrize("relative", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_a_subset_has_the_published_parameters(relative):
    found = shapes_of("low", rank=5, relative=relative, qkv_bias=False)
    expected = {f"['{name}']['kernel']": (DIM, DIM) for name in ("q", "k", "v", "out")}
    expected["['out']['bias']"] = (DIM,)
    # A score needs both queries and keys, even if only one has a table.
    low = ("q" in relative or "k" in relative) * "qk" + ("v" in relative) * "v"
    expected |= {f"['low_{name}']['kernel']": (DIM, 10) for name in low}
    expected |= {f"['{name}_table']": (ROWS, 10, HEADS, 5) for name in relative}
    if "v" in relative:
        expected["['low_out']['kernel']"] = (10, DIM)
    assert found == expected


@pytest.mark.quick("q-True")
@pytest.mark.parametrize(
    ("relative", "rotates"),
    [("q", True), ("v", True), ("kv", False)],
)
def test_subsets_and_rotations_equal_the_reference(relative, rotates):
    dim, rank, base = 8, 3, 10.0
    module = LorTranslutionAttention(
        dim, HEADS, rank=rank, relative=relative, average=True, qkv_bias=False
    )
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, LENGTH, dim)), jnp.float32)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), x, **CALL))
    leaves, tree = jax.tree.flatten(shapes)
    leaves = [jnp.asarray(rng.normal(size=(1, *s.shape)), jnp.float32) for s in leaves]
    position = None
    if rotates:
        rope = Rope2d(dim=dim, num_heads=HEADS, num_layers=1, base=base)
        position = rope.apply({}, GRID, 1)[0]
    positions = [(0, 0), *np.ndindex(*GRID)]

    def apply(x, *leaves):
        variables = jax.tree.unflatten(tree, leaves)
        return module.apply(variables, x[None], position=position, **CALL)[0]

    def naive(x, *leaves):
        params = jax.tree.unflatten(tree, leaves)["params"]

        def linear(name):
            return x @ params[name]["kernel"] if name in params else None

        q, k, v = (
            jnp.moveaxis(linear(name).reshape(LENGTH, HEADS, -1), 1, 0)
            for name in "qkv"
        )
        if rotates:
            q, k = (
                jnp.stack([reference.rotary(head, positions, base) for head in heads])
                for heads in (q, k)
            )
        # Without a table, each head takes its slice of the components.
        one = jnp.eye(HEADS * rank).reshape(-1, HEADS, rank)
        outs = reference.lor_translution(
            *(q, k, v),
            [linear(f"low_{name}") for name in "qkv"],
            [params.get(f"{name}_table", one) for name in "qkv"],
            reference.offset_rows(GRID, 1),
            np.ones((LENGTH, LENGTH), bool),
            (dim / HEADS) ** -0.5,
            average=True,
        )
        out, low_out = (
            None if heads is None else jnp.moveaxis(heads, 0, 1).reshape(LENGTH, -1)
            for heads in outs
        )
        if low_out is not None:
            out = out + low_out @ params["low_out"]["kernel"]
        return out @ params["out"]["kernel"] + params["out"]["bias"]

    compare.expect_equal(jax.vmap(apply), naive, [x, *leaves])


def test_sinusoids_widen_what_scores_are_divided_by():
    module, variables, x = make("low", rank=3)
    # Coefficients of zero add nothing to the products.
    position = ConstrainedSincosHeads(
        jnp.ones((LENGTH, 4)), jnp.zeros((HEADS, 2, 2)), None, None
    )
    params = dict(variables["params"])
    ratio = (3 / 7) ** 0.5
    scaled = {
        name: jax.tree.map(lambda leaf: ratio * leaf, params[name])
        for name in ("q", "low_q")
    }

    @quick_jit
    def outputs(x):
        options = (({}, position), (scaled, None))
        return [
            module.apply({"params": params | changes}, x, position=position, **CALL)
            for changes, position in options
        ]

    found, expected = outputs(x)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("exact", {"absolute": True}),
        ("low", {"rank": 2, "base": False}),
        ("low", {"rank": 2, "average": True, "absolute": True}),
    ],
)
def test_outputs_do_not_depend_on_masked_keys(kind, options):
    module, variables, x = make(kind, **options)
    mask = jnp.arange(LENGTH) != 4
    mask = jnp.stack([mask, jnp.ones(LENGTH, bool)])
    apply = jax.jit(lambda x: module.apply(variables, x, key_mask=mask, **CALL))
    out, changed = apply(x), apply(x.at[:, 4].set(9.0))
    others = jnp.arange(LENGTH) != 4
    np.testing.assert_array_equal(out[0, others], changed[0, others])
    assert not np.allclose(out[1, others], changed[1, others])


def test_average_changes_the_output():
    outs = []
    for average in (False, True):
        module, variables, x = make("low", average=average)
        outs.append(jax.jit(lambda v, m=module, x=x: m.apply(v, x, **CALL))(variables))
    assert not np.allclose(*outs, atol=0.1)


@pytest.mark.parametrize(
    ("kind", "options", "call", "message"),
    [
        (
            "exact",
            {},
            {"grid": (2, 4)},
            "grid 2x4 with num_prefix=0 holds 8 tokens, got 7",
        ),
        ("low", {}, {"grid": (7, 7)}, "grid 7x7 with num_prefix=0 holds 49 tokens"),
        ("exact", {}, {}, "pass grid="),
        (
            "low",
            {"base": False},
            {**CALL, "position": LayerPosition()},
            "has no plain queries, keys and values for the position to act on",
        ),
        ("low", {"causal": True}, CALL, "causal attention takes no prefix tokens"),
        ("exact", {"causal": True}, {"grid": (5,)}, "is longer than grid=(5,)"),
        (
            "low",
            {"causal": True, "absolute": True},
            {"grid": (7,)},
            "absolute=True has no causal form",
        ),
    ],
)
def test_invalid_calls_raise(kind, options, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(kind, call, **options)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("low", {"rank": 0}, "needs rank >= 1, got 0"),
        ("low", {"relative": "vq"}, "unknown relative 'vq': did you mean 'v'"),
        ("exact", {"relative": "kqv"}, "unknown relative 'kqv': "),
        ("low", {"relative": "v", "base": False}, "has no scores or no values: choose"),
        ("low", {"relative": "qk", "base": False}, "has no scores or no values"),
    ],
)
def test_invalid_options_raise(kind, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MODULES[kind](DIM, HEADS, **options)


@pytest.mark.quick("exact-2")
@pytest.mark.parametrize("clip", [1, 2])
@pytest.mark.parametrize("kind", MODULES)
def test_clipped_tables_share_the_matrix_of_far_offsets(kind, clip):
    module, variables, x = make(kind, clip=clip)
    side = 2 * clip + 1
    assert module.has_grid_tables is False
    params = {**variables["params"]}
    rows = reference.clip_rows([np.arange(ROWS)], GRID, clip)[0]
    assert params["q_table"].shape[0] == side**2 + 4
    for name in "qkv":
        params[f"{name}_table"] = params[f"{name}_table"][rows]
    full = MODULES[kind](dim=DIM, num_heads=HEADS)

    @quick_jit
    def outputs(variables, params):
        expected = full.apply({"params": params}, x, **CALL)
        # The same parameters fit another grid.
        larger = jnp.zeros((1, 21, DIM))
        module.apply(variables, larger, grid=(4, 5), num_prefix=1)
        return module.apply(variables, x, **CALL), expected

    found, expected = outputs(variables, params)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{"clip": -1}, {"clip": 2, "absolute": True}])
def test_an_invalid_clip_raises(options):
    with pytest.raises(ValueError, match="needs clip >= 0, .* or None, and None with"):
        make("exact", **options)
