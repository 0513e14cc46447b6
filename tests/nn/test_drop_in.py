"""Tests every argument of `jax.nn.dot_product_attention` with every implementation.

The values come from float64 NumPy, pair by pair, or from jax.nn itself. docs/drop_in.md
has the table of what is supported (`SUPPORTED`); everything else raises.
"""

import functools
import inspect
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import kernels
from relattn.nn.compat import dot_product_attention
from tests.helpers.quick import quick_jit

BATCH, N, M, HEADS, HEAD_DIM = 3, 7, 11, 6, 5
RNG = np.random.default_rng(0)
PROJECTION = RNG.normal(size=(13, HEAD_DIM))
OFFSET_BIAS = RNG.normal(size=2 * N - 1)
WINDOW = 3


class Argument(NamedTuple):
    """Arguments of a call.

    Attributes:
        options: Arguments besides the arrays.
        named: What the error of an implementation without it names.
        n, m, key_heads, batch: Sizes of the arrays.
    """

    options: dict
    named: str = ""
    n: int = N
    m: int = N
    key_heads: int = HEADS
    batch: tuple[int, ...] = (BATCH,)


def random_mask(*shape):
    return jnp.asarray(np.random.default_rng(3).random(shape) < 0.6)


LENGTHS = jnp.array([N, 4, 0])
# They leave every query a key: without keys jax.nn gives the mean of the values.
LONG = jnp.array([M, 9, 7])
ARGUMENTS = {
    "`bias`": Argument(
        {"bias": jnp.asarray(RNG.normal(size=(1, HEADS, N, N)))}, "bias"
    ),
    "`mask` of keys, `[batch, 1, 1, m]`": Argument(
        {"mask": random_mask(BATCH, 1, 1, N)}
    ),
    "`mask` of queries, `[batch, 1, n, 1]`": Argument(
        {"mask": random_mask(BATCH, 1, N, 1)}
    ),
    "other `mask`": Argument({"mask": random_mask(BATCH, HEADS, N, N)}, "mask"),
    "`scale`": Argument({"scale": 0.3}),
    "`is_causal`": Argument({"is_causal": True}, "is_causal"),
    "`is_causal`, n < m": Argument({"is_causal": True}, "is_causal|same n", m=M),
    "`is_causal`, n > m": Argument({"is_causal": True}, "is_causal|same n", n=M),
    "`query_seq_lengths`": Argument({"query_seq_lengths": LENGTHS}),
    "`key_value_seq_lengths`": Argument({"key_value_seq_lengths": LENGTHS}),
    "`local_window_size`": Argument({"local_window_size": (2, 1)}, "local_window_size"),
    "`local_window_size`, causal without end": Argument(
        {"local_window_size": (N, 0)}, "is_causal"
    ),
    "`return_residual`": Argument({"return_residual": True}, "return_residual"),
    "fewer key heads": Argument({}, key_heads=2),
    "no batch axis": Argument({}, batch=()),
    "several batch axes": Argument({}, "at most one batch axis", batch=(2, BATCH)),
}


def exponential(q, k):
    return np.exp(q @ k.T / HEAD_DIM**0.5)


def of_features(features):
    return lambda q, k: features(q) @ features(k).T


def positive(x):
    x = x / HEAD_DIM**0.25
    return np.exp(x @ PROJECTION.T - (x * x).sum(axis=1, keepdims=True) / 2)


def relu(x):
    return np.maximum(x @ PROJECTION.T / HEAD_DIM**0.25, 0) + 1e-3


def with_offset_bias(weights):
    def biased(q, k):
        offset = np.arange(len(q))[:, None] - np.arange(len(k))
        return weights(q, k) * np.exp(OFFSET_BIAS[offset + N - 1])

    return biased


def windowed(q, k):
    offset = np.arange(len(q))[:, None] - np.arange(len(k))
    return np.where(abs(offset) <= WINDOW // 2, exponential(q, k), 0.0)


class Implementation(NamedTuple):
    """An implementation, and the weights that it gives pairs.

    Attributes:
        implementation: The argument of that name.
        weights: From queries and keys to ``[n, m]``; None for jax.nn's own.
        cannot: The arguments that it refuses.
        options: Its options.
    """

    implementation: object
    weights: object
    cannot: frozenset
    options: dict = {}


SCORES = {"`bias`", "other `mask`", "`local_window_size`", "`return_residual`"}
CAUSAL = {name for name, x in ARGUMENTS.items() if "is_causal" in x.named}
UNEQUAL = {"`is_causal`, n < m", "`is_causal`, n > m"}
WIDE = jnp.asarray(PROJECTION)
BIAS = jnp.asarray(OFFSET_BIAS)
IMPLEMENTATIONS = {
    'None, `"xla"`': Implementation("xla", None, frozenset({"several batch axes"})),
    '`"softmax"`': Implementation("softmax", exponential, frozenset()),
    '`"favor"`, `linear_attention`': Implementation(
        "favor", of_features(positive), frozenset(SCORES), {"projection": WIDE}
    ),
    '`"relu"`': Implementation(
        "relu", of_features(relu), frozenset(SCORES), {"projection": WIDE}
    ),
    "`relative_attention`": Implementation(
        functools.partial(kernels.relative_attention, grid=(N,), bias=BIAS),
        with_offset_bias(exponential),
        frozenset({"`bias`", "`return_residual`", *UNEQUAL}),
    ),
    "`toeplitz_linear_attention`": Implementation(
        functools.partial(
            kernels.toeplitz_linear_attention,
            feature_map=functools.partial(kernels.positive_features, projection=WIDE),
            grid=(N,),
            bias=BIAS,
        ),
        with_offset_bias(of_features(positive)),
        frozenset(SCORES | UNEQUAL),
    ),
    "`local_attention`": Implementation(
        functools.partial(kernels.local_attention, window=WINDOW),
        windowed,
        frozenset(SCORES | CAUSAL),
    ),
}
PAIRS = list(itertools.product(ARGUMENTS, IMPLEMENTATIONS))
SUPPORTED = [pair for pair in PAIRS if pair[0] not in IMPLEMENTATIONS[pair[1]].cannot]
REFUSED = [pair for pair in PAIRS if pair not in SUPPORTED]


def draw(argument):
    rng, dtype = np.random.default_rng(1), jnp.float32
    shape = (*argument.batch, argument.m, argument.key_heads, HEAD_DIM)
    query = rng.normal(size=(*argument.batch, argument.n, HEADS, HEAD_DIM))
    return [jnp.asarray(x, dtype) for x in (query, *rng.normal(size=(2, *shape)))]


def expected_output(query, key, value, weights, options):
    """Computes attention example by example, head by head, in float64."""
    query, key, value = (
        np.asarray(x, np.float64).reshape(-1, *x.shape[-3:])
        for x in (query, key, value)
    )
    (batch, n, heads, _), m = query.shape, key.shape[1]
    query = query * options.get("scale", HEAD_DIM**-0.5) * HEAD_DIM**0.5
    i, j = np.arange(n)[:, None], np.arange(m)
    left, right = options.get("local_window_size", (n, m))
    in_window = (j >= i - left) & (j <= i + right)
    if options.get("is_causal"):
        in_window = in_window & (j <= i)
    bias = np.broadcast_to(options.get("bias", 0.0), (batch, heads, n, m))
    mask = np.broadcast_to(options.get("mask", True), (batch, heads, n, m))
    num_queries = options.get("query_seq_lengths", [n] * batch)
    num_keys = options.get("key_value_seq_lengths", [m] * batch)
    out, residual = np.zeros(query.shape), np.zeros(query.shape[:3])
    for b, h in np.ndindex(batch, heads):
        group = h * key.shape[2] // heads
        w = weights(query[b, :, h], key[b, :, group]) * np.exp(bias[b, h])
        exists = (i < num_queries[b]) & (j < num_keys[b])
        w = np.where(mask[b, h] & in_window & exists, w, 0.0)
        total = w.sum(axis=1, keepdims=True)
        out[b, :, h] = w @ value[b, :, group] / np.where(total == 0, 1.0, total)
        residual[b, :, h] = np.log(np.where(total == 0, 1.0, total))[:, 0]
    return out, residual


def call(argument, implementation):
    """Returns a function of the arrays."""
    return functools.partial(
        dot_product_attention,
        implementation=implementation.implementation,
        **argument.options,
        **implementation.options,
    )


@pytest.mark.quick(
    '`bias`-`"softmax"`',
    '`mask` of keys, `[batch, 1, 1, m]`-`"softmax"`',
    '`mask` of queries, `[batch, 1, n, 1]`-`"softmax"`',
    'other `mask`-`"softmax"`',
    '`scale`-`"softmax"`',
    '`is_causal`-`"softmax"`',
    '`is_causal`, n < m-None, `"xla"`',
    '`is_causal`, n < m-`"softmax"`',
    '`is_causal`, n < m-`"favor"`, `linear_attention`',
    '`is_causal`, n < m-`"relu"`',
    '`is_causal`, n > m-`"softmax"`',
    '`query_seq_lengths`-`"softmax"`',
    '`key_value_seq_lengths`-`"softmax"`',
    '`local_window_size`-`"softmax"`',
    '`local_window_size`, causal without end-`"softmax"`',
    '`return_residual`-`"softmax"`',
    'fewer key heads-`"softmax"`',
    'no batch axis-`"softmax"`',
    'several batch axes-`"softmax"`',
)
@pytest.mark.parametrize(("argument", "implementation"), SUPPORTED)
def test_supported_argument_has_the_reference_value(argument, implementation):
    argument, implementation = ARGUMENTS[argument], IMPLEMENTATIONS[implementation]
    arrays, weights = draw(argument), implementation.weights
    # As jax.nn, also where JAX forbids operands of different ranks.
    with jax.numpy_rank_promotion("raise"):
        found = quick_jit(call(argument, implementation))(*arrays)
    out, residual = found if argument.options.get("return_residual") else (found, None)
    if weights is None:
        expected = jax.nn.dot_product_attention(*arrays, **argument.options)
        if residual is not None:
            expected, expected_residual = expected
    else:
        expected, expected_residual = expected_output(
            *arrays, weights, argument.options
        )
    np.testing.assert_allclose(out, expected.reshape(out.shape), rtol=1e-4, atol=1e-5)
    if residual is not None:
        np.testing.assert_allclose(residual, expected_residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("argument", "implementation"), REFUSED)
def test_other_argument_is_refused_by_name(argument, implementation):
    argument, implementation = ARGUMENTS[argument], IMPLEMENTATIONS[implementation]
    with pytest.raises(ValueError, match=argument.named):
        call(argument, implementation)(*draw(argument))


def test_arguments_are_those_of_jax_nn():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind
        assert ours[name].default == parameter.default


CASES = {
    "everything": {
        "bias": jnp.asarray(RNG.normal(size=(1, HEADS, N, M)), jnp.float32),
        "mask": random_mask(BATCH, 1, N, M).at[..., 0].set(True),
        "is_causal": True,
        "scale": 2.0,
        "query_seq_lengths": jnp.array([N, 5, 3]),
        "key_value_seq_lengths": jnp.array([M, 1, 6]),
        "return_residual": True,
    },
    "window": {"local_window_size": (3, 1), "query_seq_lengths": jnp.array([N, 1, 0])},
    "symmetric window": {
        "local_window_size": 2,
        "key_value_seq_lengths": jnp.array([M, 9, 7]),
    },
    "causal window": {"local_window_size": (2, 1), "is_causal": True},
    "causal without end": {"local_window_size": (M, 3), "is_causal": True},
    "residual": {
        "return_residual": True,
        "key_value_seq_lengths": jnp.array([M, 9, 7]),
    },
    "wide bias": {"bias": jnp.asarray(RNG.normal(size=(1, 1, 1, M)), jnp.float32)},
}


@pytest.mark.quick("everything-6-float32", "everything-2-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("case", CASES)
def test_softmax_equals_jax_nn(case, key_heads, dtype):
    """Values and gradients, also with more keys than queries."""
    arrays = draw(Argument({}, m=M, key_heads=key_heads))
    arrays = [x.astype(dtype) for x in arrays]
    options = CASES[case]

    def function(attend):
        def loss(*arrays):
            out = attend(*arrays, **options)
            out = out[0] if options.get("return_residual") else out
            return jnp.sum(jnp.cos(out.astype(jnp.float32))), out

        return attend(*arrays, **options), jax.grad(loss, (0, 1, 2), has_aux=True)(
            *arrays
        )[0]

    ours = functools.partial(dot_product_attention, implementation="softmax")
    found, expected = quick_jit(
        lambda: (function(ours), function(jax.nn.dot_product_attention))
    )()
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def test_batch_may_be_empty():
    query, keys = jnp.zeros((0, M, HEADS, 3)), jnp.zeros((0, M, 2, 3))
    attend = functools.partial(dot_product_attention, implementation="softmax")
    assert jax.eval_shape(attend, query, keys, keys).shape == query.shape


def test_scale_is_not_rounded_to_the_dtype_of_the_queries():
    arrays = [x.astype(jnp.bfloat16) for x in draw(Argument({}))]
    found, expected = (
        dot_product_attention(*x, scale=0.7, implementation="softmax")
        for x in (arrays, [x.astype(jnp.float32) for x in arrays])
    )
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("implementation", [None, "xla", "cudnn"])
def test_implementations_of_jax_nn_compute_what_it_does(implementation, monkeypatch):
    """A query without keys gives the mean, as in jax.nn; all arguments get there."""
    arrays = draw(Argument({}))
    options = {
        "mask": jnp.zeros((1, 1, N, N), bool).at[..., 3, 1].set(True),
        "key_value_seq_lengths": LENGTHS,
        "local_window_size": (2, 0),
    }
    if implementation == "cudnn":
        received = {}
        monkeypatch.setattr(
            jax.nn,
            "dot_product_attention",
            lambda *args, **kwargs: received.update(kwargs) or args[0],
        )
        dot_product_attention(*arrays, implementation="cudnn", **options)
        assert received["implementation"] == "cudnn"
        assert received["local_window_size"] == (2, 0)
        np.testing.assert_array_equal(received["key_value_seq_lengths"], LENGTHS)
        return
    out = dot_product_attention(*arrays, implementation=implementation, **options)
    expected = jax.nn.dot_product_attention(*arrays, **options)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query_seq_lengths": jnp.ones(2, int)}, r"query_seq_lengths must .* \(3,\)"),
        (
            {"key_value_seq_lengths": jnp.ones(BATCH)},
            "key_value_seq_lengths must hold an integer for each example",
        ),
        ({"key_mask": jnp.ones((BATCH, N), bool)}, "pass mask=key_mask"),
        ({"projection": WIDE}, "softmax_attention has no option 'projection'"),
        (
            {"implementation": "favor", "chunks": 2},
            "favor has no option 'chunks': did you mean 'chunk_size'",
        ),
        (
            {"implementation": "favor", "projecton": WIDE},
            "'projecton': did you mean 'projection'[?] Available: chunk_size, fea",
        ),
        (
            {"implementation": "relu", "num_features": 3},
            "relu has no option num_features: pass projection=relattn.draw_orthogonal",
        ),
        (
            {"implementation": "favor", "feature_map": jnp.exp},
            "favor has no option 'feature_map': did you mean 'features'",
        ),
        (
            {"implementation": "favor(num_features=3)"},
            r"'favor\(num_features=3\)' must be a name: pass its options as arguments",
        ),
        (
            {"implementation": "cuddn"},
            "unknown implementation 'cuddn': did you mean 'cudnn'",
        ),
        (
            {"local_window_size": (1, 2, 3)},
            r"must be a number or \(left, right\), got \(1, 2, 3\)",
        ),
        ({"implementation": "xla", "precision": "high"}, r"options \['precision'\]"),
        (
            {
                "implementation": kernels.relative_attention,
                "grid": (1, N),
                "is_causal": True,
            },
            r"needs a line of tokens without prefix, grid=\(7,\), got grid=\(1, 7\)",
        ),
        (
            {
                "implementation": kernels.linear_attention,
                "feature_map": jnp.exp,
                "return_normalizer": True,
            },
            "linear_attention must return its output alone",
        ),
    ],
)
def test_wrong_argument_raises(options, message):
    options = {"implementation": "softmax", **options}
    with pytest.raises(ValueError, match=message):
        dot_product_attention(*draw(Argument({})), **options)
