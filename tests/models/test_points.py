"""Tests Transformers on points: shifts, order, padding, training signals and errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import PointTransformer, build_model
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, normal_like, quick_jit, run

CONFIG = {
    "name": "point_transformer",
    "dim": 8,
    "num_layers": 2,
    "num_heads": 2,
    "mlp_dim": 7,
}
N, AXES, CHANNELS = 9, 2, 3
ATTENTIONS = ["softmax", "favor", "relu"]
POSITIONS = ["fourier_values(num_frequencies=3)", "fourier_values(rank=2)"]


def make(**options):
    """Returns a model and variables so large that every part matters."""
    model = build_model(
        CONFIG | options, num_classes=5, point_shape=(N, AXES, CHANNELS)
    )
    shapes = jax.eval_shape(
        model.init,
        jax.random.key(0),
        jax.ShapeDtypeStruct((1, N, AXES + CHANNELS), "float32"),
    )
    variables = normal_like(shapes, scale=0.5)
    return model, variables


def draw_points(seed=1):
    points = normal(seed, 2, N, AXES + CHANNELS)
    points[..., :AXES] *= 5
    return points


def shift(points, *vectors):
    """Moves the points of each example by its vector."""
    shifted = points.copy()
    shifted[..., :AXES] += np.array(vectors)[:, None]
    return shifted


@pytest.mark.quick("softmax-fourier_values(num_frequencies=3)")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        *itertools.product(ATTENTIONS, POSITIONS),
        # Random features only estimate scores of waves.
        ("softmax", "fourier_scores + fourier_values"),
    ],
)
def test_logits_do_not_change_if_points_move_by_a_real_vector(attention, position):
    with jax.enable_x64(True):
        model, variables = make(attention=attention, position=position)
        model = model.clone(dtype=jnp.float64)
        points = draw_points().astype(np.float64)
        examples = np.stack(
            [points, shift(points, (0.37, -20.1), (np.pi, 1e3 / 7)), 2 * points]
        )
        logits, moved, scaled = run(
            lambda variables, points: jax.lax.map(
                lambda x: model.apply(variables, x), points
            ),
            *(variables, examples),
        )
    # The mean and the head are float32.
    np.testing.assert_allclose(moved, logits, rtol=0, atol=1e-6 * abs(logits).max())
    assert abs(scaled - logits).max() > 1e-2


def test_parts_of_llama_have_no_biases():
    options = {"norm_type": "rms_norm", "activation": "swiglu", "qkv_bias": False}
    _, variables = make(**options, out_bias=False, mlp_bias=False)
    params = variables["params"]
    for name in ("norm", "blocks_0"):
        for path, _ in jax.tree_util.tree_leaves_with_path(params[name]):
            assert "'bias'" not in jax.tree_util.keystr(path)


def test_float32_logits_change_by_rounding_only():
    model, variables = make(position=POSITIONS[0])
    points = draw_points()
    # A multiple of 2^-10: float32 adds it to positions with an error of their rounding.
    examples = np.stack([points, shift(points, (0.375, -20.125), (3.5, 9.25))])
    logits, moved = run(
        lambda variables, points: jax.lax.map(
            lambda x: model.apply(variables, x), points
        ),
        *(variables, examples),
    )
    # Positions of up to 32 are rounded by 2^-19, and the waves' phases as much.
    bound = 10 * 2.0**-19 * abs(logits).max()
    np.testing.assert_allclose(moved, logits, rtol=0, atol=bound)


@pytest.mark.quick("softmax")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_and_order_do_not_matter(attention):
    model, variables = make(attention=attention, position=POSITIONS[0])
    points = draw_points()
    order = np.random.default_rng(0).permutation(N)
    padding = normal(5, 2, 4, AXES + CHANNELS, scale=100.0)
    masked = np.concatenate([points[:, order], padding], axis=1)
    unmasked = masked.copy()
    unmasked[:, N:] = np.nan
    exists = np.broadcast_to(np.arange(N + 4) < N, (2, N + 4))

    def logits(variables, points, masked, unmasked, exists):
        return (
            model.apply(variables, points),
            model.apply(variables, masked, key_mask=exists),
            model.apply(variables, unmasked),
            model.apply(variables, masked),
        )

    inputs = (variables, points, masked, unmasked, exists)
    expected, by_mask, by_nan, kept = run(logits, *inputs)
    bound = 1e-5 * abs(expected).max()
    np.testing.assert_allclose(by_mask, expected, rtol=0, atol=bound)
    np.testing.assert_array_equal(by_nan, by_mask)
    assert abs(kept - expected).max() > 100 * bound


def test_padding_has_finite_gradients():
    model, variables = make(position=POSITIONS[0])
    points = draw_points()
    points[:, 6:] = np.nan

    def loss(params, points):
        return model.apply({"params": params}, points).sum()

    gradients = quick_jit(jax.grad(loss))(variables["params"], points)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert np.isfinite(leaf).all(), path
    assert np.any(gradients["position"]["frequencies"])


def test_errors():
    sizes = {"num_classes": 5, "point_shape": (N, AXES, CHANNELS)}
    with pytest.raises(ValueError, match="Learned needs tokens on a grid, got points"):
        build_model(CONFIG | {"position": "learned"}, **sizes)
    with pytest.raises(ValueError, match="is for points and needs num_classes and poi"):
        build_model(CONFIG, num_classes=5, image_shape=(4, 4, 1))
    for shape in ((N, AXES), (N, AXES, 0)):
        with pytest.raises(ValueError, match=r"be \(points, axes, channels\), all at"):
            build_model(CONFIG, num_classes=5, point_shape=shape)
    on_grids = ("translution", "banded", "gated_positional", "linformer")
    # Of neighbours in the list, and of clusters that grow with the padding.
    in_order = ("routing(window=3)", "routing(local_heads=0)")
    for attention in (*on_grids, *in_order):
        with pytest.raises(ValueError, match="another attention for points, such as"):
            build_model(CONFIG | {"attention": attention, "position": "none"}, **sizes)
    clusters = "routing(local_heads=0, window=3)"
    assert build_model(CONFIG | {"attention": clusters}, **sizes)
    model = PointTransformer(num_classes=5, num_axes=2)
    for shape, message in (
        ((1, N, 2), "points have 2 columns, expected 2 of"),
        ((N, 3), r"shape \(9, 3\), expected \[batch, n, axes \+ channels\] and"),
        ((1, 0, 3), r"shape \(1, 0, 3\), expected \[batch, n, axes"),
    ):
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            model.init(jax.random.key(0), jnp.zeros(shape))
    for mask in (np.ones((1, N + 1), bool), np.ones((1, N))):
        message = r"key_mask has .*, expected \(1, 9\) and bool"
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            model.init(jax.random.key(0), jnp.zeros((1, N, 3)), key_mask=mask)
