"""What a model costs: its parameters, and its multiply-adds by formula."""

from __future__ import annotations

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from relattn import spec


@dataclasses.dataclass(frozen=True)
class Size:
    """The parameter count of one model, and what it costs.

    Attributes:
        model: Name of the model.
        size: Name of its size.
        method: Its attention and position encoding.
        image: Height x width x channels of the images; empty for text.
        params: Our count.
        published: The published count, None where there is none.
        note: Why they differ, where they do.
        table: The published table that has the row.
        printed: The published count as printed.
        multiply_adds: True multiply-adds of a forward pass, for an image or for a
            sequence of text; None where they are not counted.
        multiply_adds_per_token: The same for one token of text.
        paper_flops: What the paper states for the same pass, as printed.
    """

    model: str
    size: str
    method: str
    image: str
    params: int
    published: int | None
    note: str = ""
    table: str = ""
    printed: str = ""
    multiply_adds: int | None = None
    multiply_adds_per_token: int | None = None
    paper_flops: str = ""


def count_parameters(
    model: nn.Module,
    image_shape: tuple[int, int, int] | None = None,
    *,
    num_tokens: int = 1,
) -> int:
    """Counts the parameters of a model without allocating them.

    Args:
        model: A module called on images or on token ids.
        image_shape: Height, width and channels; None for a model of text.
        num_tokens: Length of a sequence of text.

    Returns:
        The number of trainable scalars.

    Example:
        >>> count_parameters(nn.Dense(3), (1, 1, 2))
        9
    """
    example: Array = jnp.zeros((1, num_tokens), jnp.int32)
    if image_shape is not None:
        example = jnp.zeros((1, *image_shape))
    variables = jax.eval_shape(model.init, jax.random.key(0), example)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))


def multiply_adds(
    attention: str,
    *,
    num_tokens: int,
    dim: int,
    num_layers: int,
    heads: int,
    mlp_dim: int,
    causal: bool = False,
) -> int:
    """Multiply-adds of a Transformer's blocks in one forward pass.

    A layer of softmax attention costs 3 n C C' + 2 P C' with C = C' = ``dim`` and P the
    number of pairs of tokens: n^2, or n (n + 1) / 2 where it is causal. Translution
    projects every pair, P (3 C C' + 2 C'). LoR-Translution adds to softmax attention
    3 n C r + P (3 r^2 + 2 r) + n r C' with r = ``rank * heads``; in a subset, the score
    is 2 n C r + P r, the value n C r + P r + n r C', and each table P r^2. The output
    projection and the feed-forward network add n (C'^2 + 2 C ``mlp_dim``). Position
    encodings are not counted, which add less than 1% here.

    Args:
        attention: Spec of the attention.
        num_tokens: Number of tokens, prefix included.
        dim: Width of the tokens.
        num_layers: Number of layers.
        heads: Number of heads.
        mlp_dim: Width of the feed-forward networks' hidden layer.
        causal: Whether a token attends to itself and earlier tokens only.

    Returns:
        The number of multiply-adds.

    Example:
        >>> sizes = dict(num_tokens=17, dim=192, num_layers=6, heads=3, mlp_dim=768)
        >>> multiply_adds("translution", **sizes)
        226273536

    Source:
        Translution, section 3.3; its own figures miss that a projection is per pair.
    """
    name, options = spec.parse(attention)
    n, square = num_tokens, dim * dim
    pairs = n * (n + 1) // 2 if causal else n * n
    relative = len(options.get("relative", "qkv"))
    if name == "translution":
        layer = (pairs * relative + n * (3 - relative)) * square + 2 * pairs * dim
    else:
        layer = 3 * n * square + 2 * pairs * dim
    if name == "lor_translution":
        rank = options.get("rank", 8) * heads
        layer *= options.get("base", True)
        subset = options.get("relative", "qkv")
        scores, values = "q" in subset or "k" in subset, "v" in subset
        layer += (2 * scores + values) * n * dim * rank + values * n * rank * dim
        layer += pairs * (relative * rank**2 + (scores + values) * rank)
    layer += n * (square + 2 * dim * mlp_dim)
    return num_layers * layer
