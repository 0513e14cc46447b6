"""Tests sums of waves of the offset, and rotated values, in attention layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import offsets
from relattn.nn.attention import Context
from relattn.nn.positions.base import ScoreAndValuePosition
from relattn.nn.registry import ATTENTIONS, POSITIONS, build
from relattn.offsets import Torus
from tests import reference
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, normal_like, quick_jit, run
from tests.helpers.specs import small

GRID, N, DIM, HEADS, HEAD_DIM = (2, 3), 7, 8, 2, 4
LAYER = 1
WITH_VALUES = [name for name, entry in ATTENTIONS.items() if "values" in entry.sites]


def draw(make, *args, **options):
    """Draws variables so large that every part matters."""
    shapes = jax.eval_shape(functools.partial(make, **options), *args)
    return normal_like(shapes, scale=0.5)


def make_layer(attention, position, grid=GRID, num_prefix=1, **options):
    """Returns an attention, its variables, and a function of the position's layer."""
    make_attention, make_position = build(
        small(attention), position, dim=DIM, num_heads=HEADS, num_layers=3, **options
    )
    encoding, module = make_position(), make_attention(layer=0)
    key = jax.random.key(0)
    where = {"grid": grid, "num_prefix": num_prefix}
    variables = draw(lambda key: encoding.init(key, **where, method="per_layer"), key)

    def layer(variables):
        return encoding.apply(variables, **where, method="per_layer")[LAYER]

    x = jnp.zeros((1, num_prefix + int(np.prod(grid)), DIM))
    of_attention = draw(
        lambda key, x, variables: module.init(
            key, x, **where, position=layer(variables)
        ),
        *(key, x, variables),
    )
    return functools.partial(module.apply, **where), of_attention, layer, variables


def heads_of(x, params, name):
    y = x @ params[name]["kernel"] + params[name]["bias"]
    return y.reshape(len(x), HEADS, HEAD_DIM).swapaxes(0, 1)


def matrices_of(params, head, num_prefix=1):
    """Returns W_ij - W_0 of every pair of tokens."""
    kernel = params["kernel"][LAYER][:, head]
    if "basis" in params:
        basis = params["basis"][LAYER][head]
        kernel = jnp.einsum("cwtr,wrd->cwtd", kernel, basis)
    frequencies = params["frequencies"][LAYER]
    waves = len(frequencies)
    positions = np.float64(offsets.grid_positions(GRID, num_prefix))
    found = reference.wave_matrices(
        positions, frequencies, kernel[:, :waves], num_prefix
    )
    if kernel.shape[1] == waves:
        return found
    # Pairs of a grid token that is projected with a prefix token, and of a prefix token
    # with a grid token.
    prefix = np.arange(N) < num_prefix
    of_grid, of_prefix = jnp.moveaxis(kernel[:, -1], 1, 0)
    pairs = [(~prefix)[:, None] & prefix, prefix[:, None] & ~prefix]
    pairs = [pair[..., None, None] for pair in pairs]
    return found + jnp.where(pairs[0], of_grid, 0) + jnp.where(pairs[1], of_prefix, 0)


def expect_equal(apply, layer, naive, *inputs):
    """Compares a layer with a naive version of its encoding, variables and tokens."""

    def out(encoding, variables, x):
        return apply(variables, x[None], position=layer(encoding))[0]

    found = run(out, *inputs)
    with jax.enable_x64(True):
        expected = run(naive, *jax.tree.map(np.float64, inputs))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


OPTIONS = ["rank=0", "rank=2", "prefix_matrices=True", "prefix_matrices=True, rank=1"]


@pytest.mark.quick("fourier_values-prefix_matrices=True, rank=1")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["fourier_values", "fourier_scores", "keys"])
def test_the_projection_of_a_pair_is_the_sum_of_waves(name, options):
    spec = f"fourier_values(num_frequencies=3, {options})"
    if name != "fourier_values":
        of = "k" if name == "keys" else "q"
        spec = f"fourier_scores(num_frequencies=3, relative={of!r}, {options})"
    apply, variables, layer, encoding = make_layer("softmax", spec)
    x = normal(1, N, DIM)

    def naive(encoding, variables, x):
        params, heads = variables["params"], []
        projected = [heads_of(x, params, name) for name in "qkv"]
        allowed = np.ones((N, N), bool)
        for head, (q, k, v) in enumerate(zip(*projected, strict=True)):
            matrices = matrices_of(encoding["params"], head)
            if name == "fourier_values":
                # The value is projected: the key comes first in a pair with a prefix.
                swapped = np.arange(N) < 1
                swapped = (swapped[:, None] | swapped)[..., None, None]
                matrices = jnp.where(swapped, matrices.swapaxes(0, 1), matrices)
                weights = reference.softmax_attention(q, k, np.eye(N), allowed)
                heads.append(reference.fourier_values(weights, x, v, matrices))
                continue
            scores = reference.fourier_scores(
                *((x, q, k) if name == "fourier_scores" else (x, k, q)), matrices
            )
            scores = scores.T if name == "keys" else scores
            none = np.zeros((N, 1))
            heads.append(reference.softmax_attention(none, none, v, allowed, scores))
        merged = jnp.stack(heads, axis=1).reshape(N, DIM)
        return merged @ params["out"]["kernel"] + params["out"]["bias"]

    expect_equal(apply, layer, naive, encoding, variables, x)


@pytest.mark.quick("fourier_values(prefix_matrices=True, rank=1)")
@pytest.mark.parametrize(
    "spec",
    [
        "fourier_values",
        "fourier_values(prefix_matrices=True, rank=1)",
        "fourier_values(learned=False)",
        "fourier_scores(prefix_matrices=True)",
        "fourier_mask",
    ],
)
def test_points_have_the_waves_of_a_grid_where_they_stand_on_one(spec):
    apply, variables, _, encoding = make_layer("softmax", spec)
    _, make = build("softmax", spec, dim=DIM, num_heads=HEADS, num_layers=3)
    # The second example has the same points, listed backwards.
    of_grid = offsets.grid_positions(GRID)
    points = np.stack([of_grid, of_grid[::-1]])
    x = normal(1, N, DIM)
    order = np.array([0, *range(N - 1, 0, -1)])

    def out(encoding, variables, x, points):
        def layer(grid):
            return make().apply(encoding, grid, 1, method="per_layer")[LAYER]

        both = jnp.stack([x, x[order]])
        found = apply(variables, both, position=layer(points))
        return found, apply(variables, x[None], position=layer(GRID))[0]

    found, expected = run(out, encoding, variables, x, points)
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[order], atol=1e-5)


def test_the_mask_of_softmax_is_a_bias_of_the_offset():
    apply, variables, layer, encoding = make_layer("softmax", "fourier_mask")
    x = normal(1, N, DIM)

    def naive(encoding, variables, x):
        params, heads = variables["params"], []
        projected = [heads_of(x, params, name) for name in "qkv"]
        positions = np.float64(offsets.grid_positions(GRID, 1))
        angles = (positions[:, None] - positions) @ encoding["params"]["frequencies"][
            LAYER
        ].T
        has_offset = np.arange(N) > 0
        for head, (q, k, v) in enumerate(zip(*projected, strict=True)):
            a, b = encoding["params"]["coefficients"][LAYER, head].T
            bias = (jnp.exp(1j * angles) @ (a + 1j * b) ** 2).real
            bias = jnp.where(has_offset[:, None] & has_offset, bias, 0.0)
            allowed = np.ones((N, N), bool)
            heads.append(reference.softmax_attention(q, k, v, allowed, bias))
        merged = jnp.stack(heads, axis=1).reshape(N, DIM)
        return merged @ params["out"]["kernel"] + params["out"]["bias"]

    expect_equal(apply, layer, naive, encoding, variables, x)


def test_normalised_queries_and_keys_keep_the_mask():
    q, k = map(jnp.asarray, normal(1, 2, 1, HEADS, N, HEAD_DIM))
    scores = []
    for normalize in (False, True):
        make_attention, make_position = build(
            f"favor(normalize={normalize})",
            "fourier_mask",
            dim=DIM,
            num_heads=HEADS,
            num_layers=3,
        )
        layers, _ = make_position().init_with_output(
            jax.random.key(0), GRID, 1, method="per_layer"
        )
        context = Context(GRID, 1, layers[LAYER], None, None, None)
        module = make_attention(layer=LAYER)
        wide = module.with_position(q, k, jnp.zeros((1, N, DIM)), context)
        scores.append(np.einsum("bhid,bhjd->hij", *wide) / wide[0].shape[-1] ** 0.5)
    lengths = [np.linalg.norm(x[0], axis=-1) for x in (q, k)]
    products = np.einsum("bhid,bhjd->hij", q, k)
    cosines = products / lengths[0][..., :, None] / lengths[1][..., None, :]
    masks = scores[0] - products / HEAD_DIM**0.5, scores[1] - cosines
    np.testing.assert_allclose(*masks, atol=1e-6)
    assert np.ptp(masks[0]) > 1e-2


@pytest.mark.quick(
    "favor-fourier_values", "softmax-fourier_scores", "lor_translution-fourier_scores"
)
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        *((name, "fourier_values") for name in WITH_VALUES),
        ("softmax", "fourier_values(rank=2, prefix_matrices=True)"),
        ("softmax", "fourier_scores"),
        ("gated_positional", "fourier_scores(rank=2, relative='k')"),
        ("lor_translution", "fourier_scores"),
        ("lor_translution", "fourier_scores + fourier_values"),
    ],
)
def test_attention_starts_as_without_the_encoding(attention, position):
    apply, variables, layer, encoding = make_layer(attention, position)
    _, make = build(small(attention), position, dim=DIM, num_heads=HEADS, num_layers=3)

    @quick_jit
    def outputs(encoding, variables, x):
        initial = make().init(jax.random.key(0), GRID, 1, method="per_layer")
        positions = (layer(initial), layer(encoding), None)
        return [apply(variables, x, position=position) for position in positions]

    found, changed, expected = outputs(encoding, variables, normal(1, 2, N, DIM))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.abs(changed - expected).max() > 1e-2


@pytest.mark.quick("softmax-relative_bias + fourier_values")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("softmax", "relative_bias + fourier_values"),
        ("softmax", "fourier_scores(relative='k') + fourier_values(rank=2)"),
        ("favor", "rope1d + rotary_values"),
        ("favor", "fourier_scores(num_frequencies=2) + fourier_values"),
        ("favor", "fourier_values + sincos_bias"),
        ("favor", "fourier_mask + fourier_values"),
        ("relu", "rotary_values(learned=True)"),
        ("gated_positional", "fourier_values(learned=False)"),
        ("lor_translution", "fourier_values"),
    ],
)
def test_decoding_equals_full_attention(attention, position):
    """tests/nn/test_attention.py decodes with initial parameters, which are zero."""
    apply, variables, layer, encoding = make_layer(
        attention, position, (N,), 0, causal=True
    )

    @quick_jit
    def outputs(encoding, variables, x):
        position = layer(encoding)
        expected = apply(variables, x, position=position)

        def decode(x, cache, index):
            state = {**variables, **cache}
            return apply(state, x, position=position, index=index, mutable=["cache"])

        # Prefill with three tokens, followed by padding.
        padded = x[:, :5].at[:, 3:].set(17.0)
        out, cache = decode(padded, {}, 2)
        outs = [out[:, :3]]
        for index in range(3, N):
            out, cache = decode(x[:, index : index + 1], cache, index)
            outs.append(out)
        return jnp.concatenate(outs, axis=1), expected

    found, expected = outputs(encoding, variables, normal(1, 2, N, DIM))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_sum_has_an_encoding_of_scores_and_one_of_values():
    """The order of the terms does not matter."""
    _, _, layer, encoding = make_layer("softmax", "fourier_values + learned + rope2d")

    def arrays(encoding):
        both = layer(encoding)
        assert isinstance(both, ScoreAndValuePosition)
        return both.scores.angles, both.values.waves

    angles, waves = jax.eval_shape(arrays, encoding)
    assert (angles.shape, waves.shape) == ((N, HEAD_DIM // 2), (N, 8, 2))


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("fourier_values + rotary_values", "has 2 terms that reach the attention"),
        ("rope2d + fourier_scores + rotary_values", "has 3 terms that reach"),
        ("relative_value + rotary_values", "has 2 terms that change the values"),
    ],
)
def test_sums_with_two_terms_of_a_kind_raise(position, message):
    with pytest.raises(ValueError, match=message):
        build("softmax", position, dim=DIM, num_heads=HEADS, num_layers=1)


@pytest.mark.parametrize(
    ("position", "message"),
    [
        ("fourier_values(num_frequencies=0)", "'fourier_values' needs num_frequencies"),
        ("fourier_scores(rank=-1)", "'fourier_scores' needs .* and rank=-1"),
        ("fourier_mask(num_frequencies=0)", "'fourier_mask' needs num_frequencies >="),
        ("fourier_scores(relative='v')", "unknown relative 'v' of position"),
        ("fourier_values(base=-1.0)", "base of a series of .* must be > 0, got -1.0"),
    ],
)
def test_invalid_options_raise(position, message):
    _, make = build("softmax", position, dim=DIM, num_heads=HEADS, num_layers=1)
    with pytest.raises(ValueError, match=message):
        make().init(jax.random.key(0), GRID, 1)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([2, 3], r"a tuple of the sizes of its axes, such as \(7, 7\), or .*, got \[2"),
        (6, "a tuple of the sizes of its axes, .*, got 6"),
        (np.zeros((6, 2)), r"positions of points, \[batch, n, axes\], got array"),
        ((), r"grid must have sizes of at least 1, got \(\)"),
        ((2, 0), r"grid must have sizes of at least 1, got \(2, 0\)"),
    ],
)
@pytest.mark.parametrize("name", ["fourier_values", "rope1d"])
def test_what_is_no_grid_raises(name, grid, message):
    _, make = build("softmax", name, dim=DIM, num_heads=HEADS, num_layers=1)
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        make().init(jax.random.key(0), grid, 1, method="per_layer")


@pytest.mark.parametrize("options", ["", "prefix_matrices=True"])
def test_another_number_of_tokens_raises(options):
    apply, variables, layer, encoding = make_layer(
        "softmax", f"fourier_values({options})"
    )
    position = layer(jax.tree.map(jnp.asarray, encoding))
    with pytest.raises(ValueError, match="position has 7 tokens, .* attention 6"):
        apply(variables, jnp.ones((1, 6, DIM)), position=position, grid=(5,))


@pytest.mark.parametrize("name", ["fourier_values", "fourier_scores", "fourier_mask"])
def test_a_torus_of_one_token_has_no_waves(name):
    _, make = build("softmax", name, dim=DIM, num_heads=HEADS, num_layers=1)
    with pytest.raises(ValueError, match="no waves on a torus of one token: choose sm"):
        make().init(jax.random.key(0), Torus((1, 1)), 1)


def test_fixed_frequencies_are_the_same_with_every_setting_of_jax():
    def waves():
        module = POSITIONS["fourier_mask"](
            dim=DIM, num_heads=HEADS, num_layers=1, num_frequencies=3, learned=False
        )
        variables = {"params": {"coefficients": jnp.zeros((1, HEADS, 3, 2))}}
        return run(lambda: module.apply(variables, GRID, 1)[0].waves)

    expected = waves()
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(waves(), expected)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        np.testing.assert_array_equal(waves(), expected)


def test_fixed_frequencies_are_no_parameters():
    def init(position, grid):
        _, make = build("softmax", position, dim=DIM, num_heads=HEADS, num_layers=3)
        return jax.eval_shape(
            lambda key: make().init(key, grid, 1)["params"], jax.random.key(0)
        )

    learned = init("fourier_values(rank=2)", GRID)
    assert jax.tree.map(lambda leaf: leaf.shape, learned) == {
        "frequencies": (3, 8, 2),
        "kernel": (3, DIM, HEADS, 8, 2, 2),
        "basis": (3, HEADS, 8, 2, HEAD_DIM),
    }
    assert set(init("fourier_values(learned=False)", GRID)) == {"kernel"}
    # The torus has five frequencies, but for the sign and zero, of which three are.
    params = init("fourier_values(num_frequencies=3)", Torus(GRID))
    assert set(params) == {"kernel"} and params["kernel"].shape[3] == 3
