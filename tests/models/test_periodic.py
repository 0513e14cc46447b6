"""Tests periodic ViTs: overlapping patches, the polyphase anchor, equal logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import demo
from relattn.data import load_data, preprocess
from relattn.models import build_model, resize_grid
from relattn.models.anchor import polyphase_anchor
from relattn.models.patches import extract_patches
from relattn.nn.registry import ATTENTIONS, POSITIONS
from relattn.offsets import Torus
from tests.helpers.quick import normal_like, quick_jit
from tests.helpers.specs import with_others

CONFIG = {"name": "vit", "dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 11}
CONFIG |= {"patch_size": (3, 2), "patch_overlap": 1, "periodic": True}
SHAPE = (9, 10, 2)
PERIODIC = [name for name, entry in ATTENTIONS.items() if entry.periodic]
PAIRS = with_others(
    [
        ("softmax", "relative_bias"),
        ("softmax", "relative_key"),
        ("softmax", "constrained_sincos"),
        ("softmax", "rope2d"),
        ("favor(num_features=5)", "sincos_bias"),
        ("relu(num_features=5)", "fourier_bias"),
        ("softmax", "relative_value"),
        ("softmax", "t5_bias(num_buckets=8, max_distance=5)"),
    ],
    PERIODIC,
    [name for name, entry in POSITIONS.items() if entry.periodic],
)


def draw_images(*shape):
    """Returns images of bytes divided by 255, most of them background."""
    images = np.random.default_rng(0).integers(0, 256, (*shape, *SHAPE))
    # The brighter the image, the earlier it comes.
    images = (images // (1 + 3 * np.arange(len(images))[:, None, None, None])) / 255.0
    images[:, :2] = images[:, :, 6:] = 0.0
    return jnp.asarray(images, jnp.float32)


def make(**options):
    """Returns a model and variables so large that every part matters."""
    if options.get("position") == "rope2d":
        options["pool"] = "mean"
    model = build_model(CONFIG | options, num_classes=5, image_shape=SHAPE)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, *SHAPE)))
    variables = normal_like(shapes, scale=0.5)
    return model, variables


def logits_of_shifts(model, variables, shifts):
    """Returns the logits at each circular shift, [shifts, images, classes]."""
    images = draw_images(3) - 0.3
    apply = quick_jit(model.apply)
    return np.stack(
        [apply(variables, jnp.roll(images, shift, axis=(1, 2))) for shift in shifts]
    )


@pytest.mark.quick("softmax-relative_bias")
@pytest.mark.parametrize(("attention", "position"), PAIRS)
def test_a_shift_by_whole_patches_rolls_the_tokens(attention, position):
    model, variables = make(attention=attention, position=position)
    logits = logits_of_shifts(model, variables, [(0, 0), (3, 0), (-3, 4), (0, 1)])
    np.testing.assert_allclose(logits[1:3], [logits[0]] * 2, rtol=1e-5, atol=1e-5)
    assert np.abs(logits[3] - logits[0]).max() > 1e-3


@pytest.mark.quick("favor(num_features=5)-sincos_bias-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("attention", "position"),
    with_others([*PAIRS[4:6], ("softmax", "relative_bias")], PERIODIC),
)
def test_logits_are_equal_for_every_circular_shift(attention, position, dtype):
    model, variables = make(
        attention=attention, position=position, anchor="polyphase", dtype=dtype
    )
    shifts = np.random.default_rng(1).integers(0, SHAPE[:2], (7, 2))
    first, *others = logits_of_shifts(model, variables, [(0, 0), *shifts])
    assert np.ptp(first, axis=0).max() > 1e-2
    for logits in others:
        np.testing.assert_allclose(logits, first, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(logits.argmax(-1), first.argmax(-1))


def test_a_plain_grid_sees_the_border():
    model, variables = make(attention="softmax", position="relative_bias")
    plain = model.copy(periodic=False)
    shapes = jax.eval_shape(plain.init, jax.random.key(0), jnp.zeros((1, *SHAPE)))
    variables = normal_like(shapes, scale=0.3)
    logits = logits_of_shifts(plain, variables, [(0, 0), (3, 0)])
    assert np.abs(logits[1] - logits[0]).max() > 1e-3


def naive_energies(image, patch):
    """Returns the energy of every phase, [patch height, patch width]."""
    energies = np.zeros(patch)
    for row, column in np.ndindex(*patch):
        rolled = np.roll(image, (-row, -column), axis=(0, 1))
        for i in range(0, image.shape[0], patch[0]):
            for j in range(0, image.shape[1], patch[1]):
                cell = rolled[i : i + patch[0], j : j + patch[1]]
                energies[row, column] += cell.sum() ** 2
    return energies


def test_the_anchor_takes_no_images():
    none = jax.ShapeDtypeStruct((0, *SHAPE), "float32")
    anchored = jax.eval_shape(lambda images: polyphase_anchor(images, (3, 2)), none)
    assert anchored.shape == none.shape


def test_the_anchor_chooses_the_phase_of_largest_energy():
    images, patch = draw_images(7), (3, 2)
    anchored = polyphase_anchor(images, patch)
    for image, result in zip(np.float64(images), np.float64(anchored), strict=True):
        energies = naive_energies(image, patch)
        np.testing.assert_allclose(naive_energies(result, patch)[0, 0], energies.max())
        np.testing.assert_array_equal(np.sort(result, None), np.sort(image, None))


@pytest.mark.quick("object")
@pytest.mark.parametrize("kind", ["object", "background", "one pixel", "small object"])
def test_shifted_images_have_the_same_anchor_bit_for_bit(kind):
    image = draw_images(1)[0]
    if kind == "background":
        image = (image - 0.2860) / 0.3530
    elif kind == "one pixel":
        image = jnp.zeros(SHAPE).at[4, 7, 0].set(0.5)
    elif kind == "small object":
        # Several phases have equal energies: the object fits into one patch.
        image = jnp.full(SHAPE, -0.1).at[4:6, 7].set(jnp.array([[0.5], [0.25]]))
    image, shifts = np.asarray(image), list(np.ndindex(*SHAPE[:2]))
    images = np.stack([np.roll(image, shift, axis=(0, 1)) for shift in shifts])
    anchored = np.asarray(jax.jit(polyphase_anchor, static_argnums=1)(images, (3, 2)))
    np.testing.assert_array_equal(anchored, np.broadcast_to(anchored[0], images.shape))


@pytest.mark.slow
def test_photographed_clothes_have_the_same_anchor_at_every_shift():
    """Many have equal patches, all white or all black."""
    split = load_data(demo.get_config("invariant").data).test
    images = np.asarray(preprocess(split.images[:61], image_size=32))
    anchor = jax.jit(lambda images: polyphase_anchor(images, 4))
    expected = anchor(images)
    for shift in ((5, 0), (-8, 3), (13, 22)):
        moved = np.roll(images, shift, axis=(1, 2))
        np.testing.assert_array_equal(anchor(moved), expected)


@pytest.mark.slow
def test_gradients_pass_through_the_chosen_roll():
    images, weights = draw_images(2), jax.random.normal(jax.random.key(0), (2, *SHAPE))

    def weighted(images):
        return (weights * polyphase_anchor(images, (3, 2))).sum()

    gradients = np.asarray(quick_jit(jax.grad(weighted))(images))
    anchored = np.asarray(quick_jit(polyphase_anchor, patch_size=(3, 2))(images))
    for image, result, weight, gradient in zip(
        np.asarray(images), anchored, np.asarray(weights), gradients, strict=True
    ):
        (shift,) = [
            shift
            for shift in np.ndindex(*SHAPE[:2])
            if (np.roll(image, shift, axis=(0, 1)) == result).all()
        ]
        back = np.roll(weight, np.negative(shift), axis=(0, 1))
        np.testing.assert_array_equal(gradient, back)


@pytest.mark.parametrize("periodic", [False, True])
def test_overlapping_patches_continue_at_the_border(periodic):
    images, overlap = draw_images(2), 2
    tokens, grid = extract_patches(images, (3, 2), overlap=overlap, periodic=periodic)
    assert tuple(grid) == (3, 5) and tokens.shape == (2, 15, 7 * 6 * 2)
    height, width, _ = SHAPE
    for n, (i, j) in enumerate(np.ndindex(3, 5)):
        patch = np.asarray(tokens[0, n]).reshape(7, 6, 2)
        for a, b in np.ndindex(7, 6):
            row, column = 3 * i - overlap + a, 2 * j - overlap + b
            inside = 0 <= row < height and 0 <= column < width
            expected = images[0, row % height, column % width]
            assert (patch[a, b] == (expected if inside or periodic else 0.0)).all()


def test_the_mean_ignores_masked_patches():
    model, variables = make(pool="mean", periodic=False)
    assert model.num_prefix == 0 and "cls" not in variables["params"]
    images, mask = draw_images(2), jnp.arange(15) % 5 < 3
    # The overlap of patches reaches one pixel into the masked ones.
    changed = images.at[:, :, 7:].set(9.0)
    apply = quick_jit(model.apply)
    mask = jnp.stack([mask, mask])
    expected = apply(variables, images, key_mask=mask)
    np.testing.assert_allclose(
        apply(variables, changed, key_mask=mask), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "attention", ["linformer(k=3)", "routing", "translution(absolute=True)"]
)
def test_attention_that_cannot_be_periodic_raises(attention):
    with pytest.raises(ValueError, match="cannot be periodic: choose another"):
        make(attention=attention)


@pytest.mark.parametrize(
    "position", [name for name, entry in POSITIONS.items() if not entry.periodic]
)
def test_absolute_position_on_a_torus_raises(position):
    with pytest.raises(ValueError, match="cannot be periodic: choose another"):
        make(position=f"none + {position}")


def test_a_table_on_a_torus_is_not_resized():
    model, variables = make(position="relative_bias")
    with pytest.raises(ValueError, match="table of offsets on a torus is not resized"):
        resize_grid(model, variables, (3, 5), (6, 5))
    model, variables = make(position="t5_bias")
    assert (
        resize_grid(model, variables, (3, 5), (6, 5))["params"] == variables["params"]
    )


@pytest.mark.parametrize("name", ["fourier_bias", "fourier_mask", "fourier_values"])
def test_other_waves_of_a_torus_are_not_taken_for_those_of_training(name):
    def resize(old, new, num_frequencies=8):
        position = POSITIONS[name](num_frequencies=num_frequencies)
        return position.resize(params, old, new, 0)

    params = {}
    assert resize(Torus((7, 7)), Torus((9, 9))) is params
    assert resize((4, 4), (4, 8)) is params
    # The second longest wave is another; more waves; the waves get sines.
    for old, new, *count in [((4, 4), (4, 8)), ((3, 3), (5, 5)), ((2, 2), (3, 3), 2)]:
        with pytest.raises(ValueError, match=r"other waves on a torus of .* choose"):
            resize(Torus(old), Torus(new), *count)


def test_invalid_settings_raise():
    with pytest.raises(ValueError, match=r"rope2d.*without: choose pool"):
        build_model(
            CONFIG | {"position": "rope2d"}, num_classes=5, image_shape=SHAPE
        ).init(jax.random.key(0), jnp.zeros((1, *SHAPE)))
    with pytest.raises(ValueError, match="patch_overlap must be at least 0"):
        make(patch_overlap=-1)
    for name in ("pool", "anchor"):
        with pytest.raises(ValueError, match=f"unknown {name} 'none_'"):
            make(**{name: "none_"})
    model, variables = make(anchor="polyphase")
    with pytest.raises(ValueError, match="leave out key_mask"):
        model.apply(variables, draw_images(1), key_mask=jnp.ones((1, 15), bool))
