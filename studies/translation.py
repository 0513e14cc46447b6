"""Measures how an attention layer's output changes when its content is shifted.

``python -m studies.translation`` prints the table of docs/contracts.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from relattn import command, offsets
from relattn.kernels import redraw
from relattn.markdown import markdown_table
from relattn.nn.registry import ATTENTIONS, BUILT_IN, POSITIONS, build

EXACT = 1e-5
LARGEST_STANDARD_ERROR = 0.1


@dataclasses.dataclass(frozen=True)
class TranslationError:
    """The translation error of one attention with one position encoding.

    Errors are relative to the norm of the output.

    Attributes:
        single: Root mean square of the errors of single draws.
        mean: Error of the output averaged over the draws.
        standard_error: Standard error of ``mean`` due to the finite number of draws.
    """

    single: float
    mean: float
    standard_error: float

    @property
    def verdict(self) -> str:
        """Classifies the layer's translation equivariance.

        ``"exact"`` if single draws have no error; ``"no"`` if the mean error exceeds 4
        standard errors; ``"in expectation"`` if it is at most 2 (about 1 is expected by
        chance); otherwise ``"too noisy to tell"``.
        """
        if self.single <= EXACT:
            return "exact"
        if self.mean > 4 * self.standard_error:
            return "no"
        within_noise = self.mean <= 2 * self.standard_error
        precise = self.standard_error <= LARGEST_STANDARD_ERROR
        return "in expectation" if within_noise and precise else "too noisy to tell"


class _Layer(nn.Module):
    """One attention layer with a position encoding, composed as in the models."""

    attention: str
    position: str
    dim: int
    num_heads: int
    num_prefix: int

    @nn.compact
    def __call__(self, x, grid, key_mask):
        sizes: dict[str, Any] = {
            "dim": self.dim,
            "num_heads": self.num_heads,
            "num_layers": 1,
        }
        make_attention, make_position = build(self.attention, self.position, **sizes)
        position = make_position(name="position")
        n = self.num_prefix
        x = jnp.concatenate([x[:, :n], position.add_to_tokens(x[:, n:], grid)], axis=1)
        layers = position.per_layer(grid, n) or [None]
        return make_attention(layer=0, name="attention")(
            x, grid=grid, num_prefix=n, position=layers[0], key_mask=key_mask
        )


def translation_error(
    attention: str,
    position: str,
    *,
    shift: offsets.Grid = (3, 4),
    content: offsets.Grid = (5, 4),
    grid: offsets.Grid = (11, 13),
    periodic: bool = False,
    num_prefix: int = 1,
    dim: int = 32,
    num_heads: int = 2,
    draws: int = 64,
    seed: int = 0,
) -> TranslationError:
    """Measures the translation error of an attention layer.

    Random content is placed on an otherwise empty (masked) canvas, after a CLS token,
    and shifted by whole tokens. If ``periodic``, the content fills a torus and is
    rolled instead. With y and y' the content's outputs before and after,
    the error is |y' - y| / |y|: for single draws of the random features, and for the
    mean over the draws.

    Args:
        attention: Spec of an attention.
        position: Spec of a position encoding.
        shift: Shift of the content, rows and columns in tokens.
        content: Height and width of the content, in tokens.
        grid: Height and width of the canvas, in tokens.
        periodic: Whether the canvas is a torus, filled with content.
        num_prefix: Number of prefix tokens.
        dim: Width of the tokens.
        num_heads: Number of heads.
        draws: Number of draws of the random features.
        seed: Seed of the content, parameters and draws.

    Returns:
        The errors.

    Raises:
        ValueError: If the shifted content does not fit on the canvas, or the attention
            or position cannot be periodic.

    Example:
        >>> translation_error("softmax", "none", draws=2).verdict
        'exact'
    """
    if periodic:
        content, grid = grid, offsets.Torus(grid)
    elif any(c + s > g for c, s, g in zip(content, shift, grid, strict=True)):
        raise ValueError(
            f"content {content} shifted by {shift} does not fit on the canvas {grid}"
        )
    content_key, init_key, table_key, draw_key = jax.random.split(
        jax.random.key(seed), 4
    )
    tokens = jax.random.normal(content_key, (num_prefix + content[0] * content[1], dim))

    def positions(corner: offsets.Grid):
        rows, columns = (
            np.arange(start, start + size) % whole
            for start, size, whole in zip(corner, content, grid, strict=True)
        )
        return num_prefix + (rows[:, None] * grid[1] + columns).reshape(-1)

    # A batch of two: the content before and after the shift.
    num_tokens, both = num_prefix + grid[0] * grid[1], np.array([[0], [1]])
    inside = np.stack([positions((0, 0)), positions(shift)])
    prefix = np.broadcast_to(np.arange(num_prefix), (2, num_prefix))
    index = np.concatenate([prefix, inside], axis=1)
    x = jnp.zeros((2, num_tokens, dim)).at[both, index].set(tokens)
    key_mask = jnp.zeros((2, num_tokens), bool).at[both, index].set(True)
    layer = _Layer(attention, position, dim, num_heads, num_prefix)

    # Not under jit, which would compile a program for every pair.
    tokens_spec, mask_spec = (
        jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, key_mask)
    )
    variables = layer.lazy_init(init_key, tokens_spec, grid, mask_spec)
    # Position tables start at zero; random ones make positions matter.
    leaves, structure = jax.tree.flatten(variables["params"])
    keys = jax.random.split(table_key, len(leaves))
    params = [
        leaf if leaf.any() else 0.5 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    variables = {**variables, "params": jax.tree.unflatten(structure, params)}
    drawn = variables.pop("random_features", {})

    @jax.jit
    def outputs(variables, indices):
        def output(index):
            features = redraw(drawn, draw_key, index)
            state = {**variables, "random_features": features}
            out = cast(jax.Array, layer.apply(state, x, grid, key_mask))
            return out[both, inside]

        return jax.lax.map(output, indices)

    if jax.tree.leaves(drawn):
        all_outputs = np.asarray(outputs(variables, jnp.arange(draws)))
    else:
        # Without random features all draws are equal: two give a variance of 0.
        draws = 2
        all_outputs = np.repeat(outputs(variables, jnp.arange(1)), draws, axis=0)
    y, y_moved = np.moveaxis(all_outputs, 1, 0)
    difference = y_moved - y
    scale = np.linalg.norm(y.mean(axis=0))
    variance = difference.var(axis=0, ddof=1).sum() / draws
    return TranslationError(
        single=float(np.sqrt((difference**2).sum(axis=(1, 2)).mean()) / scale),
        mean=float(np.linalg.norm(difference.mean(axis=0)) / scale),
        standard_error=float(np.sqrt(variance) / scale),
    )


# Options that change the verdict, each with a position that shows it.
VARIANTS = (
    ("favor(features='trigonometric')", "constrained_sincos"),
    ("favor(features='trigonometric')", "sincos_bias"),
    ("favor(features='relu')", "constrained_sincos"),
    ("favor(features='relu')", "sincos_bias"),
    ("translution(absolute=True)", "none"),
)


def all_pairs() -> list[tuple[str, str]]:
    """Lists every attention with every single position encoding that it supports.

    Returns:
        Pairs of names.

    Example:
        >>> ("banded", "sincos") in all_pairs(), ("banded", "rope2d") in all_pairs()
        (True, False)
    """
    return [
        (attention, position)
        for attention, attention_entry in ATTENTIONS.items()
        for position, position_entry in POSITIONS.items()
        if position_entry.site in attention_entry.sites
        and {attention, position} <= BUILT_IN
    ]


def torus_error(attention: str, position: str) -> TranslationError | None:
    """Measures the translation error on a torus; None for pairs that support no torus.

    With rotary positions there is no prefix token.

    Args:
        attention: Spec of an attention.
        position: Spec of a position encoding.

    Example:
        >>> torus_error("linformer", "none") is None
        True
    """
    num_prefix = int(position != "rope2d")
    try:
        return translation_error(
            attention, position, periodic=True, num_prefix=num_prefix
        )
    except ValueError as error:
        if "cannot be periodic" in str(error):
            return None
        raise


def translation_table() -> str:
    """Measures the translation errors of all pairs; takes minutes.

    Returns:
        The table of docs/contracts.md, in Markdown.
    """
    header = ["attention", "position", "equivariant", "error, one draw"]
    header += ["mean of 64 draws", "on a torus"]
    rows = []
    for attention, position in (*all_pairs(), *VARIANTS):
        error = translation_error(attention, position)
        torus = torus_error(attention, position)
        mean = f"{error.mean:.1g} ± {error.standard_error:.1g}"
        cells = [f"`{attention}`", f"`{position}`", error.verdict]
        cells += [f"{error.single:.1g}", mean, torus.verdict if torus else "–"]
        rows.append(cells)
    return markdown_table(header, rows)


@command.entry_point
def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table of the translation errors of all pairs."""
    command.Parser("python -m studies.translation", __doc__).parse_args(argv)
    print(translation_table())


if __name__ == "__main__":
    main()
