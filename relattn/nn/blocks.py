"""Linear layers and Transformer blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn import offsets

# Uniform in +-1/sqrt(fan-in), PyTorch's default, with which the published models were
# trained. Flax's own start is sqrt(3) times wider: queries and keys are then so long
# that random features estimate their attention poorly.
KERNEL_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def uniform_bias(fan_in: int) -> nn.initializers.Initializer:
    """The start of a bias in PyTorch: uniform in +-1/sqrt(fan_in), as the weights.

    Args:
        fan_in: Number of inputs of each output of the layer.

    Returns:
        An initializer.

    Example:
        >>> bias = uniform_bias(16)(jax.random.key(0), (1000,))
        >>> 0.2 < float(abs(bias).max()) <= 0.25
        True

    Source:
        PyTorch, ``torch.nn.Linear`` and ``torch.nn.Conv2d``.
    """
    bound = fan_in**-0.5

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


class Linear(nn.Module):
    """A linear layer, x W + b.

    W and b start uniform in +-1/sqrt(inputs), PyTorch's default.

    Attributes:
        features: Number of outputs.
        use_bias: Whether there is a b.
        dtype: Compute dtype, by default that of the input; parameters are float32.

    Example:
        >>> layer = Linear(3)
        >>> params = layer.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
        >>> jax.tree.map(jnp.shape, params)
        {'bias': (3,), 'kernel': (2, 3)}
    """

    features: int
    use_bias: bool = True
    dtype: Any = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch inputs"]
    ) -> Float[Array, "*batch features"]:
        """Applies the layer to the last axis."""
        fan_in = x.shape[-1]
        kernel = self.param("kernel", KERNEL_INIT, (fan_in, self.features))
        bias = None
        if self.use_bias:
            bias = self.param("bias", uniform_bias(fan_in), (self.features,))
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = x @ kernel
        return y if bias is None else y + bias


# PyTorch's default, with which the published models were trained.
LAYER_NORM_EPSILON = 1e-5


class FeedForward(nn.Module):
    """The position-wise network: Dense, exact GELU, Dense.

    Attributes:
        dim: Width of the tokens.
        mlp_dim: Width of the hidden layer.
        dropout: Dropout rate after the activation.
        dtype: Compute dtype.
    """

    dim: int
    mlp_dim: int
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch n dim"], *, deterministic: bool = True
    ) -> Float[Array, "batch n dim"]:
        """Applies the network to every token."""
        x = Linear(self.mlp_dim, dtype=self.dtype, name="hidden")(x)
        x = nn.gelu(x, approximate=False)
        x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
        return Linear(self.dim, dtype=self.dtype, name="out")(x)


class TransformerBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Attributes:
        attention: Makes the attention module; called with ``name`` and ``dtype``.
        dim: Width of the tokens.
        mlp_dim: Width of the feed-forward network's hidden layer.
        attention_dropout: Dropout rate of the attention's output.
        dropout: Dropout rate of the feed-forward network.
        dtype: Compute dtype.
    """

    attention: Callable[..., nn.Module]
    dim: int
    mlp_dim: int
    attention_dropout: float = 0.0
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid,
        num_prefix: int,
        position: Any = None,
        key_mask: Bool[Array, "batch n"] | None = None,
        index: Int[Array, ""] | None = None,
        shared: Any = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch n dim"]:
        """Applies the block; arguments as in `relattn.nn.attention`."""

        def norm(name: str) -> nn.LayerNorm:
            return nn.LayerNorm(LAYER_NORM_EPSILON, dtype=self.dtype, name=name)

        y = self.attention(name="attention", dtype=self.dtype)(
            norm("attention_norm")(x),
            grid=grid,
            num_prefix=num_prefix,
            position=position,
            key_mask=key_mask,
            index=index,
            shared=shared,
        )
        x = x + nn.Dropout(self.attention_dropout)(y, deterministic=deterministic)
        return x + FeedForward(
            self.dim, self.mlp_dim, self.dropout, self.dtype, name="feed_forward"
        )(norm("feed_forward_norm")(x), deterministic=deterministic)


def transformer_blocks(
    x: Float[Array, "batch n dim"],
    attentions: Sequence[functools.partial],
    make_block: functools.partial,
    *,
    positions: Sequence[Any] | None = None,
    scan: bool = True,
    remat: bool = False,
    **options: Any,
) -> Float[Array, "batch n dim"]:
    """Applies the blocks of a model, compiling equal layers once; for ``__call__``.

    Neighbours with the same attention are one scanned block ``blocks_FIRST``, FIRST the
    index of its first layer, whose parameters have a leading axis of layers; so a model
    of 12 layers compiles like one of a single layer. The backward pass keeps no copy of
    their parameters. Attentions that draw random
    features, and all with ``scan=False``, have blocks of their own, ``block_LAYER``.
    What layers with the same attention share is the model's, ``shared_FIRST``.

    Args:
        x: Tokens, shape ``[batch, n, dim]``.
        attentions: A constructor for each layer, as `relattn.nn.registry` gives it.
        make_block: Makes a `TransformerBlock`; called with its attention and name.
        positions: What the position encoding returned for each layer, if anything.
        scan: Whether to scan equal layers.
        remat: Whether to keep only the input of each layer for the backward pass, which
            then computes the layer anew.
        **options: Further arguments of the blocks' call.

    Returns:
        The tokens after the last block.

    Example:
        >>> from relattn.nn.registry import build
        >>> attention, _ = build("softmax", "none", dim=8, num_heads=2, num_layers=3)
        >>> class Model(nn.Module):
        ...     @nn.compact
        ...     def __call__(self, x):
        ...         block = functools.partial(TransformerBlock, dim=8, mlp_dim=16)
        ...         return transformer_blocks(
        ...             x, [attention] * 3, block, grid=(7,), num_prefix=0)
        >>> params = Model().init(jax.random.key(0), jnp.ones((1, 7, 8)))["params"]
        >>> params["blocks_0"]["attention"]["q"]["kernel"].shape
        (3, 8, 8)
    """
    positions = [None] * len(attentions) if positions is None else list(positions)
    shared = _shared(attentions, x.shape[-2], options["grid"])
    for first, last in _equal_layers(attentions, scan):
        attention = functools.partial(attentions[first], layer=first)
        options["shared"] = shared[first]
        structure = jax.tree.structure(positions[first])

        def body(block, x, leaves, structure=structure):
            position = jax.tree.unflatten(structure, leaves)
            return block(x, position=position, **options), None

        leaves = [jax.tree.leaves(position) for position in positions[first:last]]
        if not scan or not attention.func.scannable:
            block = make_block(attention, name=f"block_{first}")
            x, _ = (nn.remat(body) if remat else body)(block, x, leaves[0])
            continue
        block = make_block(attention, name=f"blocks_{first}")
        stacked = [jnp.stack(values) for values in zip(*leaves, strict=True)]
        policy = None if remat else _not_of_parameters
        x, _ = nn.scan(
            nn.remat(body, prevent_cse=False, policy=policy),
            variable_axes={
                "params": 0,
                "batch_stats": 0,
                "cache": 0,
                "intermediates": 0,
            },
            split_rngs={"params": True, "dropout": True},
            length=last - first,
            # Nothing is shared by the layers; looking for it would trace them twice.
            check_constancy_invariants=False,
        )(block, x, stacked)
    return x


def _not_of_parameters(primitive: Any, *inputs: Any, **_: Any) -> bool:
    """What to keep for the backward pass: no reshaped or cast copies of parameters.

    A layer's parameters themselves cost nothing, since they are an input of the scan.
    Complex numbers, of an FFT, are computed anew: JAX cannot keep them.
    """
    if any(jnp.iscomplexobj(x) for x in inputs):
        return False
    names = ("reshape", "convert_element_type", "fft", "complex")
    return primitive.name not in names


def _shared(
    attentions: Sequence[functools.partial], n: int, grid: offsets.Grid
) -> list[Any]:
    """For every layer, what those with its attention share."""
    made = {}
    for layer, attention in enumerate(attentions):
        if id(attention) not in made:
            make = attention(parent=None).make_shared()
            made[id(attention)] = make and make(name=f"shared_{layer}")(n, grid)
    return [made[id(attention)] for attention in attentions]


def _equal_layers(
    attentions: Sequence[functools.partial], scan: bool
) -> Iterator[tuple[int, int]]:
    """First and last + 1 of the layers that may share a compiled block."""
    first = 0
    while first < len(attentions):
        last = first + 1
        if scan and attentions[first].func.scannable:
            while last < len(attentions) and attentions[last] is attentions[first]:
                last += 1
        yield first, last
        first = last
