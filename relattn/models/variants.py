"""The methods compared in Translution's tables, as attention and position."""

from __future__ import annotations

from typing import Any

from relattn import spec

# Name of the method: attention, position of images, position of text. The published
# parameter counts of the relative vectors include a table of learned positions, which
# the paper's formulas do not have. The rotary base of 10,000 is that of the authors'
# code, whose rotary ViT also has learned positions, unlike the formulas and its GPT.
METHODS = {
    "self_attention": ("softmax", "learned", "learned"),
    "no_position": ("softmax", "none", "none"),
    "relative_key": ("softmax", *["learned + relative_key"] * 2),
    "relative_value": ("softmax", *["learned + relative_value"] * 2),
    "relative_bias": ("softmax", "relative_bias", "relative_bias"),
    "gated_positional": ("gated_positional", "none", "none"),
    "rope": ("softmax", "rope2d(base=10000.0)", "rope1d"),
    "lor_translution": ("lor_translution(rank=8)", "none", "none"),
    "translution": ("translution", "none", "none"),
}


def method_options(
    name: str, inputs: str = "images", position: str = "", **options: Any
) -> dict[str, str]:
    """Returns the specs of a method's attention and position.

    Args:
        name: A key of `METHODS`.
        inputs: ``"images"`` or ``"tokens"``.
        position: Spec of a position that replaces the method's; empty for the method's.
        **options: Options of the attention to change, for example ``rank=16``.

    Returns:
        The values of ``config.model.attention`` and ``config.model.position``.

    Raises:
        ValueError: If the method does not exist; names the closest.

    Example:
        >>> method_options("lor_translution", rank=16, relative="qk")
        {'attention': "lor_translution(rank=16, relative='qk')", 'position': 'none'}
        >>> method_options("rope", "tokens")
        {'attention': 'softmax', 'position': 'rope1d'}
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: {spec.closest(name, METHODS)}")
    attention, image_position, text_position = METHODS[name]
    kind, values = spec.parse(attention)
    values |= options
    if values:
        listed = ", ".join(f"{key}={value!r}" for key, value in values.items())
        kind = f"{kind}({listed})"
    default = image_position if inputs == "images" else text_position
    return {"attention": kind, "position": position or default}
