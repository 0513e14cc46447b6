"""Tests Vision Transformers on volumes: patches, positions, shifts and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.models import build_model
from relattn.models.patches import extract_patches, patch_grid, zero_patches
from relattn.nn.registry import ATTENTIONS, POSITIONS
from tests.helpers.quick import normal, normal_like, quick_jit, run
from tests.helpers.specs import small, with_others

CONFIG = {"name": "vit", "dim": 12, "num_layers": 2, "num_heads": 2, "mlp_dim": 7}
# A grid of 2x3x5 patches.
SHAPE, PATCH = (4, 3, 10, 2), (2, 1, 2)
PAIRS = with_others([], ATTENTIONS, POSITIONS)
PERIODIC = with_others(
    [("softmax", "t5_bias(num_buckets=8, max_distance=5)")],
    [name for name, entry in ATTENTIONS.items() if entry.periodic],
    [name for name, entry in POSITIONS.items() if entry.periodic],
)


def make(shape=SHAPE, **options):
    """Returns a model and variables so large that every part matters."""
    options = {"patch_size": PATCH, **options}
    model = build_model(CONFIG | options, num_classes=5, image_shape=shape)
    shapes = jax.eval_shape(
        model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, *shape), "float32")
    )
    variables = normal_like(shapes, scale=0.5)
    return model, variables


@pytest.mark.parametrize("overlap", [0, 1])
def test_patches_of_a_volume_are_in_row_major_order(overlap):
    volumes = normal(0, 2, *SHAPE)
    tokens, grid = run(lambda x: extract_patches(x, PATCH, overlap=overlap), volumes)
    assert grid == patch_grid(SHAPE[:-1], PATCH) == (2, 3, 5)
    padded = np.pad(volumes, [(0, 0), *[(overlap, overlap)] * 3, (0, 0)])
    for token, (t, y, x) in zip(tokens.swapaxes(0, 1), np.ndindex(grid), strict=True):
        patch = padded[
            :,
            2 * t : 2 * t + 2 + 2 * overlap,
            y : y + 1 + 2 * overlap,
            2 * x : 2 * x + 2 + 2 * overlap,
        ]
        np.testing.assert_array_equal(token, patch.reshape(2, -1))


def test_patches_that_do_not_exist_are_zero():
    volumes, exists = normal(0, 1, *SHAPE), np.arange(30)[None] != 17
    zeroed = run(lambda *x: zero_patches(*x, PATCH), volumes, exists)
    # Token 17 is at (1, 0, 2).
    assert (zeroed[0, 2:, 0, 4:6] == 0).all()
    assert (zeroed != 0).sum() == volumes.size - 2 * 1 * 2 * 2


@pytest.mark.quick("softmax-rope2d", "translution-none")
@pytest.mark.parametrize(("attention", "position"), PAIRS)
def test_every_attention_and_position_takes_volumes(attention, position):
    model = build_model(
        CONFIG | {"patch_size": PATCH, "attention": attention, "position": position},
        num_classes=5,
        image_shape=SHAPE,
    )
    logits, _ = jax.eval_shape(
        model.init_with_output,
        jax.random.key(0),
        jax.ShapeDtypeStruct((1, *SHAPE), "float32"),
    )
    assert logits.shape == (1, 5)


@pytest.mark.quick("translution-none")
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        ("translution", "none"),
        ("lor_translution(rank=2)", "learned"),
        ("softmax", "relative_bias"),
        (small("banded"), "none"),
    ],
)
def test_a_volume_of_one_frame_is_an_image(attention, position):
    images, options = normal(0, 2, 3, 10, 2), {"position": position}
    model, variables = make(
        (3, 10, 2), patch_size=(1, 2), attention=attention, **options
    )
    deep, _ = make((1, 3, 10, 2), patch_size=(1, 1, 2), attention=attention, **options)
    logits = run(model.apply, variables, images)
    np.testing.assert_allclose(
        run(deep.apply, variables, images[:, None]), logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.quick("softmax-rope2d")
@pytest.mark.parametrize(("attention", "position"), PERIODIC)
def test_periodic_logits_do_not_depend_on_shifts_by_patches(attention, position):
    model, variables = make(
        periodic=True, pool="mean", attention=attention, position=position
    )
    volumes, apply = normal(0, 1, *SHAPE), quick_jit(model.apply)
    logits = apply(variables, volumes)
    shifted = np.roll(volumes, (2, 1, 6), axis=(1, 2, 3))
    np.testing.assert_allclose(apply(variables, shifted), logits, rtol=1e-5, atol=1e-5)
    if position != "none":
        # Two patches that change places are no shift.
        changed = volumes.copy()
        changed[:, :2, 0, 0:2], changed[:, :2, 0, 4:6] = (
            volumes[:, :2, 0, 4:6],
            volumes[:, :2, 0, 0:2],
        )
        assert np.abs(apply(variables, changed) - logits).max() > 1e-4


def test_errors_name_the_axes():
    make_volume = {"num_classes": 3, "image_shape": SHAPE}
    with pytest.raises(ValueError, match=r"or three \(frames, height and width\), got"):
        build_model(CONFIG | {"patch_size": (1, 2)}, **make_volume)
    with pytest.raises(ValueError, match=r"or three \(frames, height and width\), got"):
        build_model(CONFIG | {"patch_size": (1, 2, 2, 1)}, **make_volume)
    for shape in ((4, 4), (4, 0, 4, 1)):
        with pytest.raises(ValueError, match="image_shape must be .height, width, ch"):
            build_model(CONFIG, num_classes=3, image_shape=shape)
    model = build_model(CONFIG | {"patch_size": 1}, **make_volume)
    with pytest.raises(ValueError, match="images have shape .* add the axis of the ba"):
        model.init(jax.random.key(0), jnp.zeros((4, 4, 1)))
    with pytest.raises(ValueError, match="does not divide the image of 4x3x10 pixels"):
        build_model(CONFIG | {"patch_size": 2}, **make_volume)
    with pytest.raises(ValueError, match="choose anchor='none' for volumes"):
        build_model(CONFIG | {"patch_size": 1, "anchor": "polyphase"}, **make_volume)
    with pytest.raises(ValueError, match="takes images of height and width"):
        build_model({"name": "resnet18"}, **make_volume)
    corner = {"attention": "banded(clip=2, cls='corner')", "patch_size": 1}
    with pytest.raises(ValueError, match="needs a grid with a last row"):
        build_model(CONFIG | corner, **make_volume)
