"""Tests that every kernel rejects arguments that do not fit, and names their shapes.

`KERNELS` lists the arrays of every kernel that takes tokens, without batch axes.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float

from relattn import kernels, offsets
from relattn.kernels import checks
from relattn.kernels.platform import use_platform
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, quick_jit, run

# Equal sizes: a mask without the heads axis would broadcast silently.
BATCH = HEADS = 2
N, M, HEAD_DIM, VALUE_DIM, INNER, RANK = 7, 5, 6, 3, 4, 2

SELF = {"q": (N, HEAD_DIM), "k": (N, HEAD_DIM), "v": (N, VALUE_DIM)}
CROSS = {"q": (N, HEAD_DIM), "k": (M, HEAD_DIM), "v": (M, VALUE_DIM)}
STEP = {"q_i": (HEAD_DIM,), "k": (N, HEAD_DIM), "v": (N, VALUE_DIM)}
TOKENS = {"x": (N, HEAD_DIM)}
LOW_RANK = {
    **dict.fromkeys(("q", "k", "v"), (HEADS, N, HEAD_DIM)),
    **dict.fromkeys(("low_q", "low_k", "low_v"), (N, INNER)),
}
LOW_RANK_STEP = {
    "q_i": (HEADS, HEAD_DIM),
    **{name: LOW_RANK[name] for name in ("k", "v", "low_k", "low_v")},
    "low_q_i": (INNER,),
}
# Arguments that are tuples, and what their members are called here.
TUPLES = {
    "qkv": (("q", "q_i"), ("k",), ("v",)),
    "low": (("low_q", "low_q_i"), ("low_k",), ("low_v",)),
    "tables": (("t_q",), ("t_k",), ("t_v",)),
}


def matrices(names, *shape):
    return dict.fromkeys(names, np.ones(shape, np.float32))


LINE = {"grid": (N,)}
OFFSETS = {"bias": np.zeros(2 * N - 1, np.float32)}
POSITIVE = {"feature_map": jax.nn.softplus}
GATE = {"gate": np.zeros((), np.float32), "coefficients": np.zeros(2, np.float32)}
WEIGHTS = matrices(("w_q", "w_k", "w_v"), HEAD_DIM, HEADS, HEAD_DIM)
LOW_WEIGHTS = matrices(("t_q", "t_k", "t_v"), INNER, HEADS, RANK)
INDEX = {"index": kernels.Offsets((N,))}

# For every kernel: the shapes of its tokens, and its other arguments.
KERNELS = {
    "softmax_attention": (CROSS, {}),
    "causal_softmax_attention": (SELF, {}),
    "linear_attention": (CROSS, POSITIVE),
    "causal_linear_attention": (SELF, POSITIVE),
    "toeplitz_linear_attention": (SELF, POSITIVE | OFFSETS | LINE),
    "causal_toeplitz_linear_attention": (SELF, POSITIVE | OFFSETS),
    "causal_toeplitz_linear_attention_step": (STEP, POSITIVE | OFFSETS | {"index": 3}),
    "banded_attention": (
        {name: SELF[name] for name in ("q", "v")},
        POSITIVE | LINE | {"table": np.zeros((3, HEAD_DIM), np.float32)},
    ),
    "relative_attention": (SELF, OFFSETS | LINE),
    "causal_relative_attention": (SELF, OFFSETS),
    "causal_relative_attention_step": (STEP, OFFSETS | {"index": 3}),
    "gated_positional_attention": (SELF, GATE | LINE),
    "causal_gated_positional_attention": (SELF, GATE),
    "causal_gated_positional_attention_step": (STEP, GATE | {"index": 3}),
    "linformer_attention": (
        CROSS,
        matrices(("key_projection", "value_projection"), 2, M),
    ),
    "local_attention": (SELF, {"window": 3}),
    "routing_attention": (SELF, {"window": 3, **matrices(("centroids",), 2, HEAD_DIM)}),
    "general_translution": (
        TOKENS,
        {
            "positions": np.zeros((N, 2), np.float32),
            "weight_fn": lambda offset, query, key: (query * key).sum(-1),
            "value_fn": lambda offset, key: key,
        },
    ),
    "translution": (TOKENS, WEIGHTS | INDEX),
    "causal_translution_step": (TOKENS, WEIGHTS | {"index": 3}),
    "lor_translution": (LOW_RANK, LOW_WEIGHTS | INDEX),
    "causal_lor_translution_step": (LOW_RANK_STEP, LOW_WEIGHTS | {"index": 3}),
    "cluster_sums": (TOKENS, matrices(("centroids",), 2, HEAD_DIM)),
    "rotate": (TOKENS, matrices(("angles",), N, HEAD_DIM // 2)),
    "apply_gate": (TOKENS, matrices(("exponents",), N, HEAD_DIM)),
    "cayley_string": (
        TOKENS,
        matrices(("angles",), N, HEAD_DIM // 2) | {"matrix": np.eye(HEAD_DIM)},
    ),
    "circulant_string": (TOKENS, matrices(("angles",), N, HEAD_DIM // 2 + 1)),
    "widen_queries": (
        {"q": SELF["q"]},
        matrices(("projections",), N, 3, 2, HEAD_DIM) | matrices(("waves",), N, 3, 2),
    ),
    "append_waves": (
        {name: SELF[name] for name in ("q", "k")},
        matrices(("coefficients",), 3, 2) | matrices(("waves",), N, 3, 2),
    ),
    "unit_norm": (TOKENS, {}),
    "positive_features": (TOKENS, matrices(("projection",), 3, HEAD_DIM)),
    "trigonometric_features": (TOKENS, matrices(("projection",), 3, HEAD_DIM)),
    "relu_features": (TOKENS, matrices(("projection",), 3, HEAD_DIM)),
    "hedgehog_features": (TOKENS, matrices(("projection",), 3, HEAD_DIM)),
}


def _parameters(function):
    return inspect.signature(function).parameters if inspect.isroutine(function) else ()


def draw(name, *leading, dtype=np.float32):
    """Draws the tokens of a kernel."""
    shapes, _ = KERNELS[name]
    random = np.random.default_rng(0)
    return {
        key: random.integers(-3, 4, (*leading, *shape)).astype(dtype)
        for key, shape in shapes.items()
    }


def call(name, tokens, **changes):
    kernel = getattr(kernels, name)
    arguments = {**KERNELS[name][1], **tokens, **changes}
    for argument in TUPLES.keys() & _parameters(kernel):
        arguments[argument] = tuple(
            arguments.pop(next(member for member in members if member in arguments))
            for members in TUPLES[argument]
        )
    return kernel(**arguments)


def kernels_with(*arguments):
    """Parametrizes a test by the kernels that take all of some arguments."""
    return pytest.mark.parametrize(
        "name",
        [
            name
            for name in KERNELS
            if set(arguments)
            <= {*KERNELS[name][0], *_parameters(getattr(kernels, name))}
        ],
    )


def num_keys(tokens):
    return next(tokens[name] for name in ("k", "v", "x") if name in tokens).shape[-2]


def shape_pattern(x):
    """Returns the shape of an array as a regular expression."""
    return str(x.shape).replace("(", r"\(").replace(")", r"\)")


def test_table_lists_every_kernel_that_takes_tokens():
    names = {
        name
        for name, kernel in vars(kernels).items()
        if inspect.isfunction(kernel)
        and {"q", "q_i", "x", "qkv"} & set(_parameters(kernel))
    }
    assert names == set(KERNELS)


@kernels_with("key_mask")
def test_mask_without_heads_axis_raises(name):
    tokens = draw(name, BATCH, HEADS)
    mask = jnp.ones((BATCH, num_keys(tokens)), bool)
    message = rf"key_mask of shape {shape_pattern(mask)} .*with key_mask\[:, None\]"
    with pytest.raises(ValueError, match=message):
        call(name, tokens, key_mask=mask)
    with pytest.raises(ValueError, match=r"expected .*, got|does not fit|same"):
        call(name, tokens, key_mask=mask[:, :-1])


@kernels_with("key_mask")
@pytest.mark.parametrize(
    "mask",
    [np.zeros(N), np.full(N, -np.inf, np.float32), np.ones(N, np.int32)],
    ids=["zeros", "minus infinity", "ones"],
)
def test_non_boolean_mask_raises(name, mask):
    tokens = draw(name)
    mask = mask[: num_keys(tokens)]
    message = r"key_mask must be boolean, .* key_mask == 0 .* key_mask.astype\(bool\)"
    with pytest.raises(ValueError, match=message):
        call(name, tokens, key_mask=mask)


def test_lists_are_arrays():
    q, k, v = (x.tolist() for x in np.ones((3, N, HEAD_DIM), np.float32))
    allowed, ids = [True] * (N - 1) + [False], list(range(N))
    with unchecked_annotations():
        out = kernels.softmax_attention(q, k, v, key_mask=allowed, segment_ids=ids)
        within = kernels.segment_mask([4, 4, 1])
        buckets = kernels.offset_buckets([1, -1])
    np.testing.assert_array_equal(out[:, 0], allowed)
    np.testing.assert_array_equal(within[1], [True, True, False])
    np.testing.assert_array_equal(buckets, [1, 17])


@pytest.mark.quick(
    "int32-softmax_attention",
    "int32-causal_linear_attention",
    "int32-banded_attention",
    "int32-relative_attention",
    "int32-translution",
    "bool-linear_attention",
)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [np.int32, bool])
def test_integers_and_booleans_become_float32(name, dtype):
    tokens = draw(name, dtype=dtype)

    def shapes(tokens):
        return jax.eval_shape(lambda: call(name, tokens))

    expected = shapes({key: x.astype(jnp.float32) for key, x in tokens.items()})
    assert shapes(tokens) == expected
    assert {x.dtype for x in jax.tree.leaves(expected)} == {np.dtype(np.float32)}


def extend(x, axis=-1):
    """Makes an axis one longer."""
    return jnp.concatenate([x, x[..., :1, :] if axis == -2 else x[..., :1]], axis)


@kernels_with("k")
def test_different_head_dims_of_queries_and_keys_raise(name):
    tokens = draw(name)
    q = "q" if "q" in tokens else "q_i"
    changed = {"k": extend(tokens["k"])}
    names = (r"qkv\[0\]", r"qkv\[1\]") if "low_k" in tokens else (q, "k")
    message = rf"{names[0]} .*{names[1]} .* the same head_dim, got shapes "
    message += rf"{shape_pattern(tokens[q])} and"
    with pytest.raises(ValueError, match=message):
        call(name, {**tokens, **changed})


@kernels_with("k", "v")
@pytest.mark.parametrize("length", [1, N + 1])
def test_different_lengths_of_keys_and_values_raise(name, length):
    tokens = draw(name)
    v = jnp.ones((*tokens["v"].shape[:-2], length, tokens["v"].shape[-1]))
    message = rf"must have the same (n|m|length), got shapes .* and {shape_pattern(v)}"
    with pytest.raises(ValueError, match=message):
        call(name, {**tokens, "v": v})


@kernels_with("q", "v")
def test_different_lengths_of_queries_and_keys_raise_in_self_attention(name):
    tokens = draw(name)
    if KERNELS[name][0] is CROSS:
        return
    q = extend(tokens["q"], -2)
    with pytest.raises(
        ValueError, match=rf"must have the same n, got .*{shape_pattern(q)}"
    ):
        call(name, {**tokens, "q": q})


@kernels_with("v")
def test_leading_axes_that_do_not_broadcast_raise(name):
    tokens = {**draw(name, 3), "v": draw(name, 2)["v"]}
    shapes = shape_pattern(tokens["v"])
    message = rf"batch axes \*batch of .* must be the same or broadcast, .*{shapes}"
    with pytest.raises(ValueError, match=message):
        call(name, tokens)


@pytest.mark.quick(
    "softmax_attention",
    "causal_softmax_attention",
    "toeplitz_linear_attention",
    "causal_toeplitz_linear_attention",
    "causal_toeplitz_linear_attention_step",
)
@pytest.mark.parametrize(
    "name", [name for name, row in KERNELS.items() if row[0] in (SELF, CROSS, STEP)]
)
def test_leading_axes_broadcast(name):
    tokens = draw(name, BATCH, HEADS)
    first = next(iter(tokens))
    tokens = {
        first: tokens[first],
        "k": tokens["k"][:1],
        "v": tokens["v"][0],
    }
    shapes = KERNELS[name][0]
    whole = {
        key: jnp.broadcast_to(x, (BATCH, HEADS, *shapes[key]))
        for key, x in tokens.items()
    }
    # Only the values have the whole batch.
    shared = {**tokens, first: tokens[first][0], "v": whole["v"]}
    repeated = {**whole, first: jnp.broadcast_to(shared[first], whole[first].shape)}
    cases = [tokens, shared, whole, repeated]
    results = quick_jit(lambda cases: [call(name, case) for case in cases])(cases)
    np.testing.assert_allclose(results[:2], results[2:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("causal_linear_attention", "feature_map"),
        ("causal_toeplitz_linear_attention", "bias"),
        ("causal_toeplitz_linear_attention", "feature_map"),
        ("routing_attention", "centroids"),
        ("toeplitz_linear_attention", "bias"),
        ("toeplitz_linear_attention", "feature_map"),
    ],
)
def test_heads_may_share_all_tokens(name, argument):
    tokens, given = draw(name), KERNELS[name][1][argument]

    def call_scaled(scale):
        value = scale * normal(0, *np.shape(given))
        if callable(given):
            value = lambda x: given(scale * x)  # noqa: E731
        return call(name, tokens, **{argument: value})

    scales = normal(1, 2, 1, 1)
    with use_platform("cpu", pairs_size=2, causal_chunk=2):
        found, *alone = run(
            lambda scales: [call_scaled(scale) for scale in (scales, *scales)], scales
        )
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)


@kernels_with("v")
def test_empty_keys_raise(name):
    tokens = draw(name)
    empty = {
        key: x if key in ("q", "q_i", "low_q", "low_q_i") else x[..., :0, :]
        for key, x in tokens.items()
    }
    if "q" in tokens and KERNELS[name][0] is not CROSS:
        empty["q"] = tokens["q"][..., :0, :]
    with pytest.raises(
        ValueError, match=r"must not be empty along .*, got shape \(.*0,"
    ):
        call(name, empty)


@pytest.mark.quick("softmax_attention", "linformer_attention")
@pytest.mark.parametrize(
    "name", [name for name, row in KERNELS.items() if row[0] is CROSS]
)
def test_empty_queries_give_empty_output(name):
    tokens = draw(name, BATCH)
    out = call(name, {**tokens, "q": tokens["q"][:, :0]})
    assert out.shape == (BATCH, 0, VALUE_DIM)


@pytest.mark.parametrize("index", [-1, N, jnp.array(N)])
@pytest.mark.parametrize("name", [name for name in KERNELS if name.endswith("_step")])
def test_a_position_outside_of_the_sequence_raises(name, index):
    with pytest.raises(ValueError, match="must be the position of a token, 0 .. 6"):
        call(name, draw(name), index=index)


def call_with(name, **changes):
    """Returns a call of a kernel with some arguments changed."""
    return lambda: call(name, draw(name), **changes)


def traced_call_with(name, **changes):
    """Returns `call_with` with the changes traced."""
    return lambda: jax.jit(functools.partial(call, name, draw(name)))(**changes)


@pytest.mark.parametrize(
    ("invalid_call", "message"),
    [
        (
            call_with("translution", w_v=np.ones((HEAD_DIM + 1, HEADS, HEAD_DIM))),
            r"x \[\*batch, n, dim\] and w_v .* must have the same dim, got shapes",
        ),
        (
            call_with("lor_translution", t_q=np.ones((INNER, HEADS + 1, RANK))),
            r"qkv\[0\] \[\*batch, heads, n, head_dim\] and tables\[0\] .* must have "
            "the same heads",
        ),
        (
            lambda: kernels.lor_translution(
                (None, None), (None,) * 3, (None,) * 3, **INDEX
            ),
            "qkv must be a tuple of 3, got 2",
        ),
        (
            call_with("linformer_attention", key_projection=np.ones((2, M + 1))),
            rf"must have the same m, got shapes \({M}, {HEAD_DIM}\) and \(2, {M + 1}\)",
        ),
        (
            call_with(
                "relative_attention", key_table=np.ones((2 * N - 1, HEAD_DIM + 1))
            ),
            r"q .* and key_table \[.*key_rows, head_dim\] must have the same head_dim",
        ),
        (
            call_with("routing_attention", centroids=np.ones((2, HEAD_DIM + 1))),
            r"and centroids \[.*, clusters, head_dim\] must have the same head_dim",
        ),
        (
            call_with("general_translution", positions=np.ones((N + 1, 2))),
            "x .* and positions .* must have the same n, got shapes",
        ),
        (
            call_with("rotate", angles=np.ones((N + 1, HEAD_DIM // 2))),
            "x .* and angles .* must have the same n, got shapes",
        ),
        (
            call_with("softmax_attention", q=np.ones(HEAD_DIM)),
            rf"q must have shape \[\*batch, n, head_dim\], got shape \({HEAD_DIM},\)",
        ),
        (
            call_with("softmax_attention", q=np.ones((N, 0)), k=np.ones((M, 0))),
            rf"must not be empty along head_dim, got shape \({N}, 0\)",
        ),
        (
            call_with("softmax_attention", q=np.ones((N, HEAD_DIM), np.complex64)),
            "q must hold real numbers, got complex64",
        ),
        (
            call_with("softmax_attention", q=np.ones((N, HEAD_DIM), jnp.float8_e4m3fn)),
            "q must have a dtype of 16 bits or more, got float8_e4m3fn: convert it",
        ),
        (
            lambda: kernels.softmax_attention(
                *np.ones((3, N, HEAD_DIM), np.float32), segment_ids=np.ones(N)
            ),
            "segment_ids must hold whole numbers, got float64",
        ),
        (
            lambda: kernels.segment_mask(np.ones(N)),
            "segment_ids must hold whole numbers, got float64",
        ),
        (
            call_with("softmax_attention", mask=np.zeros((N, M))),
            "mask must be boolean",
        ),
        (
            call_with("rotate", angles=np.ones((3, N, HEAD_DIM // 2))),
            r"of x and angles must be the same or broadcast, got shapes x \(7, 6\) and",
        ),
        (
            lambda: kernels.irpe_exponents(np.ones((2, 3)), np.ones((2, 4))),
            r"embeddings\[0\] .* and embeddings\[1\] .* must have the same head_dim",
        ),
        (
            lambda: kernels.wave_bias(
                np.ones((3, 1), int), np.ones((4, 2)), np.ones((4, 2))
            ),
            "offsets .* and frequencies .* must have the same axes",
        ),
        (
            lambda: kernels.wave_bias(
                np.ones((3, 1), int), np.ones((4, 1)), np.ones((4, 3))
            ),
            r"coefficients must have shape \[\*heads, waves, 2\], got shape \(4, 3\)",
        ),
        (
            call_with("local_attention", window=2.5),
            "window must be a whole number, got 2.5$",
        ),
        (
            call_with("local_attention", window=1, num_prefix=None),
            "num_prefix must be a whole number, got None$",
        ),
        (
            lambda: kernels.offset_buckets(np.arange(3), max_distance=float("nan")),
            "max_distance must be a whole number, got nan$",
        ),
        (
            lambda: kernels.resize_table(np.ones(6), (6,), (-6,)),
            r"grid must have sizes of at least 1, got \(-6,\)",
        ),
        (
            lambda: kernels.absolute_frequencies(2.5),
            "num must be a whole number, got 2.5$",
        ),
        (
            lambda: kernels.length_scale_frequencies(2.5),
            "num_scales must be a whole number, got 2.5$",
        ),
        (
            traced_call_with("causal_softmax_attention", window=3),
            "window must be a whole number, got .*: add 'window' to the static_arg",
        ),
        (
            traced_call_with("softmax_attention", return_logsumexp=True),
            "return_logsumexp must be True or False, got .*: add 'return_logsumexp' to",
        ),
        (
            traced_call_with("relative_attention", grid=(N,)),
            "grid must be a tuple of .*: add 'grid' to the static_argnames of jax.jit",
        ),
        (
            lambda: kernels.string_exponents(
                np.ones((N, 1)), np.ones((1, 1)), [0], np.ones((2, 3)), num_prefix=N + 1
            ),
            "num_prefix must be from 0 to 7, the number of tokens, got 8",
        ),
        (
            lambda: offsets.num_table_rows((N,), clip=1.5),
            "clip must be a whole number of at least 0, or None, got 1.5",
        ),
        (
            lambda: kernels.update_centroids(*np.ones((2, 3, 4)), np.ones(3), decay=2),
            "decay must be from 0 to 1, got 2",
        ),
    ],
)
def test_errors_name_arrays_and_shapes(invalid_call, message):
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        invalid_call()


def test_valid_arrays_are_passed_unchanged():
    @checks.check_arguments
    def pair(q: Float[jax.Array, "n head_dim"], *, scale=1.0):
        return q, scale

    q = jnp.ones((2, 3), jnp.bfloat16)
    assert pair(q, scale=2.0)[0] is q and pair(q=q)[1] == 1.0
