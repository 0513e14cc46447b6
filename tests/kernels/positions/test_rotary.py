"""Tests rotary positions: values, invariance, prefix tokens and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn import offsets
from relattn.kernels.positions.rotary import (
    draw_mixed_frequencies,
    mixed_rotary_angles,
    rotary_angles,
    rotate,
)
from relattn.kernels.positions.string import circulant_string
from relattn.offsets import Torus
from tests import reference
from tests.helpers import compare
from tests.helpers.export import unchecked_annotations
from tests.helpers.quick import normal, run


@pytest.mark.parametrize(
    "positions",
    # Of three axes, the last one has two of the four pairs.
    [np.arange(7.0)[:, None], np.eye(5, 2) * 3, 3 * np.eye(5, 3) + np.arange(3.0)],
)
def test_matches_multiplication_by_complex_numbers(positions):
    positions = positions.astype(np.float32)
    x = normal(0, 2, len(positions), 8)
    compare.expect_equal(
        lambda x: rotate(x, rotary_angles(positions, 8, base=100.0)),
        functools.partial(reference.rotary, positions=np.float64(positions), base=100),
        [x],
    )


@pytest.mark.parametrize("original_length", [0, 29])
def test_lower_frequencies_match_the_reference(original_length):
    # In 29 tokens, the five frequencies turn 4.6, 1.8, 0.7, 0.3 and 0.1 times.
    options = {"base": 100.0, "factor": 3.0, "original_length": original_length}
    positions, x = np.arange(7.0)[:, None], normal(0, 2, 7, 10)
    compare.expect_equal(
        lambda x: rotate(x, rotary_angles(np.float32(positions), 10, **options)),
        functools.partial(reference.rotary, positions=positions, **options),
        [x],
    )


@pytest.mark.parametrize("options", [{"factor": 0.0}, {"original_length": -1}])
def test_a_wrong_factor_raises(options):
    with pytest.raises(ValueError, match="need a finite factor > 0 and original_leng"):
        rotary_angles(np.zeros((3, 1), np.float32), 4, **options)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_only_on_offset(interleaved):
    def all_scores():
        angles = rotary_angles(offsets.grid_positions((4, 5)), 12, base=10.0)
        rotated = [
            rotate(np.tile(x, (20, 1)), angles, interleaved=interleaved)
            for x in normal(0, 2, 12)
        ]
        return (rotated[0] @ rotated[1].T).reshape(4, 5, 4, 5)

    scores = run(all_scores)
    np.testing.assert_allclose(
        scores[1:, 1:, 1:, 1:], scores[:-1, :-1, :-1, :-1], atol=2e-5
    )
    assert scores.std() > 0.1


@pytest.mark.parametrize("grid", [(2, 3), (3, 1, 4)])
def test_angles_on_a_small_torus_tell_all_tokens_apart(grid):
    positions = offsets.grid_positions(grid)
    angles = run(lambda: rotary_angles(positions, 12, base=100.0, torus=Torus(grid)))
    found = np.round(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), 4)
    assert len(np.unique(found, axis=0)) == len(positions)


def test_pairs_are_half_split_or_interleaved():
    x, quarter = np.float32([[1, 2, 3, 4]]), np.float32([[np.pi / 2, 0]])
    split = run(rotate, x, quarter)
    np.testing.assert_allclose(split, [[-3, 2, 1, 4]], atol=1e-6)
    interleaved = run(functools.partial(rotate, interleaved=True), x, quarter)
    np.testing.assert_allclose(interleaved, [[-2, 1, 3, 4]], atol=1e-6)


def test_prefix_tokens_are_unchanged():
    positions = offsets.grid_positions((3,), num_prefix=2) + 1
    x = np.ones((5, 4), np.float32)
    out = run(lambda x: rotate(x, rotary_angles(positions, 4, num_prefix=2)), x)
    np.testing.assert_array_equal(out[:2], x[:2])
    assert (out[2:] != 1).all()


@pytest.mark.parametrize(("turn", "pairs"), [(rotate, 2), (circulant_string, 3)])
def test_sines_of_half_precision_angles_are_float32(turn, pairs):
    x, angles = normal(0, 3, 4), normal(1, 3, pairs).astype(jnp.bfloat16)
    wide = angles.astype(np.float32)
    found, expected = run(lambda: [turn(x, angles), turn(x, wide)])
    np.testing.assert_array_equal(found, expected)


def test_half_precision_keeps_dtype_and_phase_of_far_tokens():
    positions = np.array([[4001.0]], np.float32)
    x = np.ones((1, 8), jnp.bfloat16)
    out = run(lambda x: rotate(x, rotary_angles(positions, 8)), x)
    assert out.dtype == jnp.bfloat16
    positions = np.float64(positions)
    naive = functools.partial(reference.rotary, positions=positions, base=10000.0)
    expected = compare.expected_results(naive, [x[None]])[0][0]
    np.testing.assert_allclose(np.float64(out), expected, atol=1e-2)


def test_wrong_head_dim_or_num_prefix_raises():
    for axes, head_dim in ((2, 2), (2, 7), (3, 4)):
        message = f"an even head_dim .* here {2 * axes}, got {head_dim}"
        with pytest.raises(ValueError, match=message):
            rotary_angles(np.zeros((3, axes), np.float32), head_dim)
    with pytest.raises(ValueError, match="head_dim 6 needs 3 angles per token, got 2"):
        rotate(np.ones((3, 6)), np.ones((3, 2)))
    for angles in (
        lambda x, n: rotary_angles(x, 4, num_prefix=n),
        lambda x, n: mixed_rotary_angles(x, np.ones((3, 1)), num_prefix=n),
    ):
        for num_prefix in (9, -1):
            with pytest.raises(ValueError, match=f"from 0 to 3, .* got {num_prefix}"):
                angles(np.zeros((3, 1), np.float32), num_prefix)


def test_scores_with_mixed_angles_depend_only_on_offset():
    q, k = normal(1, 2, 2, 20, 6)
    positions = offsets.grid_positions((4, 5))

    @jax.jit
    def scores(shift):
        w = draw_mixed_frequencies(jax.random.key(0), 3, 2, leading=(2,))
        angles = mixed_rotary_angles(positions + shift, w)
        rotated = [rotate(x, angles) for x in (q, k)]
        return jnp.einsum("hid,hjd->hij", *rotated)

    before = scores(np.float32([0.0, 0.0]))
    np.testing.assert_allclose(scores(np.float32([7.0, -3.0])), before, atol=5e-5)
    assert np.abs(before - q @ k.swapaxes(1, 2)).max() > 0.1


def test_initial_mixed_frequencies_are_at_right_angles():
    def draw():
        plane = draw_mixed_frequencies(jax.random.key(0), 5, 2, leading=(3, 7))
        line = draw_mixed_frequencies(jax.random.key(0), 4, 1, leading=(2,), base=100.0)
        volume = draw_mixed_frequencies(jax.random.key(0), 7, 3, leading=(3, 2))
        return plane, line, volume

    w, line, volume = run(draw)
    assert w.shape == (3, 7, 5, 2)
    lengths = np.linalg.norm(w, axis=-1)
    expected = 10.0 ** (-np.arange(3) / 3)
    np.testing.assert_allclose(
        lengths[..., :3], np.tile(expected, (3, 7, 1)), rtol=1e-5
    )
    np.testing.assert_allclose(lengths[..., 3:], lengths[..., :2], rtol=1e-5)
    np.testing.assert_allclose((w[..., :2, :] * w[..., 3:, :]).sum(-1), 0, atol=1e-6)
    assert len(np.unique(w[..., 0, 0])) == 21
    np.testing.assert_allclose(line[1, :, 0], 100.0 ** (-np.arange(4) / 4), rtol=1e-6)
    # Three directions with the lengths 1, 10^(-1/3), and the first 10^(-2/3) too.
    assert volume.shape == (3, 2, 7, 3) and len(np.unique(volume[..., 0, 0])) == 6
    products = volume @ volume.swapaxes(-2, -1)
    lengths = expected[[0, 1, 2, 0, 1, 0, 1]]
    direction = np.repeat(range(3), [3, 2, 2])
    same = direction == direction[:, None]
    np.testing.assert_allclose(
        products, np.tile(same * np.outer(lengths, lengths), (3, 2, 1, 1)), atol=1e-6
    )


def test_mixed_angles_of_prefix_are_zero_and_wrong_axes_raise():
    angles = functools.partial(mixed_rotary_angles, num_prefix=2)
    angles = run(angles, np.ones((5, 2)), np.ones((3, 2)))
    np.testing.assert_array_equal(
        angles, np.repeat([[0.0], [2.0]], [2, 3], 0).repeat(3, 1)
    )
    with pytest.raises(ValueError, match="frequencies of 1 axes do not fit positions"):
        mixed_rotary_angles(np.ones((5, 2)), np.ones((3, 1)))
    with pytest.raises(ValueError, match="axes must be at least 1, got 0"):
        draw_mixed_frequencies(jax.random.key(0), 4, 0)
    with pytest.raises(ValueError, match="num_frequencies must be at least 1, got 0"):
        draw_mixed_frequencies(jax.random.key(0), 0, 2)
    message = "num_frequencies must be a whole number, got"
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        draw_mixed_frequencies(jax.random.key(0), 2.5, 2)


def test_drawn_frequencies_are_float32_with_x64_enabled():
    with jax.enable_x64(True):
        w = jax.eval_shape(lambda: draw_mixed_frequencies(jax.random.key(0), 5, 2))
    assert w.dtype == jnp.float32
