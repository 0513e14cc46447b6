"""CutMix and MixUp: each image of a batch mixed with another one, under jit."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from relattn import spec

# From a key and (height, width) to the weight of the image in every pixel.
Mix = Callable[[Key[Array, ""], tuple[int, int]], Float[Array, "height width"]]


def cutmix(
    key: Key[Array, ""], size: tuple[int, int], *, alpha: float = 1.0
) -> Float[Array, "height width"]:
    """CutMix: replaces a random rectangle of the image.

    The rectangle has 2 floor(height r) by 2 floor(width r) pixels, r = sqrt(1 - s) / 2,
    s ~ Beta(alpha, alpha). Its centre is uniform over the pixels; what lies outside of
    the image is cut off.

    Args:
        key: of the random numbers.
        size: height and width.
        alpha: of the Beta distribution.

    Returns:
        [height, width], 0 in the rectangle and 1 elsewhere.

    Raises:
        ValueError: `alpha` is not positive.

    Example:
        >>> mask = cutmix(jax.random.key(0), (5, 7))
        >>> mask.shape, set(mask.ravel().tolist()) <= {0.0, 1.0}
        ((5, 7), True)

    Source:
        Yun et al., CutMix, section 3.1, with the sides rounded as in torchvision.
    """
    share_key, *centre_keys = jax.random.split(key, 3)
    ratio = jnp.sqrt(1 - _draw_share(share_key, "cutmix", alpha)) / 2
    inside = []
    for axis_key, length in zip(centre_keys, size, strict=True):
        pixels = jnp.arange(length)
        half = jnp.floor(ratio * length)
        centre = jax.random.randint(axis_key, (), 0, length)
        inside.append((pixels >= centre - half) & (pixels < centre + half))
    return 1.0 - (inside[0][:, None] & inside[1]).astype(jnp.float32)


def mixup(
    key: Key[Array, ""], size: tuple[int, int], *, alpha: float = 1.0
) -> Float[Array, "height width"]:
    """MixUp: the same weight s ~ Beta(alpha, alpha) for every pixel.

    Args:
        key: of the random number.
        size: height and width.
        alpha: of the Beta distribution.

    Returns:
        [height, width], all s.

    Raises:
        ValueError: `alpha` is not positive.

    Example:
        >>> mask = mixup(jax.random.key(0), (5, 7), alpha=0.8)
        >>> mask.shape, len(set(mask.ravel().tolist()))
        ((5, 7), 1)

    Source:
        Zhang et al., mixup, section 2.
    """
    return jnp.full(size, _draw_share(key, "mixup", alpha))


def _draw_share(key: Array, name: str, alpha: float) -> Array:
    if alpha <= 0:
        raise ValueError(f"data.mix: {name} needs a positive alpha, got {alpha}")
    return jax.random.beta(key, alpha, alpha, dtype=jnp.float32)


MIXES = {"cutmix": cutmix, "mixup": mixup}


def make_mix(text: str, kind: str = "images") -> Mix | None:
    """Makes the function that draws how a batch is mixed.

    mixed_i = mask image_i + (1 - mask) image_(i-1),
    loss_i = mean(mask) loss(label_i) + (1 - mean(mask)) loss(label_(i-1))

    The mask is one for the whole batch; the first image is mixed with the last.

    Args:
        text: a spec of `MIXES`, or several joined by ``|``, of which every batch uses
            one at random with equal probability; "none" for no mixing.
        kind: "images", or "tokens", which cannot be mixed.

    Returns:
        A function from a key and (height, width) to the mask [height, width]; None
        for "none".

    Raises:
        ValueError: there is no such spec, an option does not fit, or the data are text.

    Example:
        >>> mix = make_mix("cutmix(alpha=1.0) | mixup(alpha=0.8)")
        >>> mix(jax.random.key(0), (5, 7)).shape
        (5, 7)
    """
    if text == "none":
        return None
    if kind != "images":
        raise ValueError(
            f"data.mix={spec.shorten(text)} mixes images, and the data are text: "
            "leave data.mix out"
        )
    choices = [
        spec.resolve(choice, MIXES, "data.mix", reserved=("key", "size"))
        for choice in spec.alternatives(text)
    ]

    def mix(key: Key[Array, ""], size: tuple[int, int]) -> Array:
        choice_key, key = jax.random.split(key)
        masks = jnp.stack([choice(key, size) for choice in choices])
        return masks[jax.random.randint(choice_key, (), 0, len(choices))]

    # Options out of range are refused here, not in the first step.
    jax.eval_shape(lambda key: mix(key, (1, 1)), jax.random.key(0))
    return mix
