"""Linear layers, dropout, Transformer blocks, and the loop over a model's blocks.

`Linear` starts as PyTorch's linear layer, with which the published models were trained.
`transformer_blocks` compiles equal layers once, by a scan.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jaxtyping import Array, Bool, Float, Int

from relattn import offsets
from relattn.kernels.masks import finite_tokens
from relattn.kernels.platform import platform_defaults
from relattn.messages import check_choice

Method = TypeVar("Method", bound=Callable[..., Any])

# Uniform in +-1/sqrt(fan_in), PyTorch's default. Flax's default is sqrt(3) times wider:
# queries and keys are then so long that random features estimate attention poorly.
KERNEL_INIT = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
# PyTorch's default.
LAYER_NORM_EPSILON = 1e-5

NORMS: dict[str, Callable[..., nn.Module]] = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": nn.RMSNorm,
}


def make_norm(norm_type: str, eps: float, dtype: Any) -> functools.partial:
    """Returns the constructor of a model's norms; call it with ``name=``.

    ``"layer_norm"``: (x - mean(x)) / sqrt(var(x) + eps) * scale + bias;
    ``"rms_norm"``: x / sqrt(mean(x^2) + eps) * scale.

    Args:
        norm_type: A key of `NORMS`.
        eps: Added to the variance, or to the mean square.
        dtype: Compute dtype; means are float32.

    Returns:
        A constructor of modules.

    Raises:
        ValueError: If there is no such norm.

    Example:
        >>> norm = make_norm("rms_norm", 0.0, jnp.float32)()
        >>> norm.init_with_output(jax.random.key(0), jnp.full(3, -2.0))[0].tolist()
        [-1.0, -1.0, -1.0]

    Source:
        Ba et al., Layer Normalization; Zhang and Sennrich, Root Mean Square Layer
        Normalization.
    """
    check_choice("norm_type", norm_type, NORMS)
    return functools.partial(NORMS[norm_type], eps, dtype=dtype)


def default_head_dim(dim: int, num_heads: int) -> int:
    """Returns dim / num_heads, the default width of a head; 0 if not an integer."""
    return dim // num_heads if num_heads > 0 and dim % num_heads == 0 else 0


def uniform(bound: float) -> nn.initializers.Initializer:
    """Returns an initializer that is uniform in +-``bound``.

    With 1/sqrt(fan_in) it is PyTorch's initializer of biases.

    Args:
        bound: Largest absolute value.

    Returns:
        An initializer.

    Example:
        >>> bias = uniform(0.25)(jax.random.key(0), (1000,))
        >>> 0.2 < float(abs(bias).max()) <= 0.25
        True

    Source:
        PyTorch, ``torch.nn.Linear`` and ``torch.nn.Conv2d``.
    """

    def init(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def at_precision(method: Method) -> Method:
    """Runs a module's method at the module's ``precision``, unless it is ``""``.

    Every product that names no precision takes it, those of submodules and of the
    backward pass too.

    Example:
        >>> class Square(nn.Module):
        ...     precision: str
        ...     @at_precision
        ...     def __call__(self, x):
        ...         return x @ x
        >>> "HIGHEST" in str(jax.make_jaxpr(Square("highest"))(jnp.eye(2)))
        True
    """

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.precision:
            return method(self, *args, **kwargs)
        with jax.default_matmul_precision(self.precision):
            return method(self, *args, **kwargs)

    return cast(Method, run)


class Linear(nn.Module):
    """Applies a linear layer, x W + b.

    W and b start uniform in +-1/sqrt(inputs), PyTorch's default.

    Attributes:
        features: Number of outputs.
        use_bias: Whether the layer has a bias b.
        dtype: Compute dtype; None for that of the input. Parameters are float32.

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
        kernel = self.param("kernel", KERNEL_INIT, (fan_in, self.features), jnp.float32)
        bias = None
        if self.use_bias:
            bias = self.param("bias", uniform(fan_in**-0.5), (self.features,))
        # y = x W + b
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        # One row per token: otherwise XLA transposes the gradient of y on CPUs.
        y = x.reshape(-1, fan_in) @ kernel
        y = y if bias is None else y + bias[None]
        return y.reshape(*x.shape[:-1], self.features)


class Dropout(nn.Module):
    """Sets elements to zero at random, and divides the others by the fraction kept.

    One random byte decides whether an element is dropped, so the rate is rounded to a
    multiple of 1/256. On CPUs `flax.linen.Dropout` spends most of its time on random
    bits, and is three times slower.

    Attributes:
        rate: Fraction of the elements that are set to zero.

    Example:
        >>> x, rngs = jnp.ones(7), {"dropout": jax.random.key(0)}
        >>> Dropout(0.5).apply({}, x, deterministic=False, rngs=rngs).tolist()
        [2.0, 2.0, 2.0, 2.0, 2.0, 0.0, 2.0]

    Source:
        Srivastava et al., Dropout: A Simple Way to Prevent Neural Networks from
        Overfitting, section 4.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, "*shape"], *, deterministic: bool = True) -> Any:
        """Drops elements, unless ``deterministic``."""
        if not 0 <= self.rate <= 1:
            raise ValueError(f"a dropout rate must be from 0 to 1, got {self.rate}")
        dropped = round(256 * self.rate)
        if deterministic or dropped == 0:
            return x
        if dropped == 256:
            return jnp.zeros_like(x)
        # Four bytes of each random word.
        *leading, width = x.shape
        shape = (*leading, -(-width // 4))
        words = jax.random.bits(self.make_rng("dropout"), shape, jnp.uint32)
        random = jax.lax.bitcast_convert_type(words, jnp.uint8)
        random = random.reshape(*leading, 4 * words.shape[-1])[..., :width]
        return jnp.where(random < dropped, 0.0, x * (256 / (256 - dropped)))


class DropPath(nn.Module):
    """Sets whole examples of a residual branch to zero at random.

    y_i = b_i x_i / (1 - rate), with b_i = 0 with probability ``rate``, else 1, for each
    example i

    Example:
        >>> x, rngs = jnp.ones((5, 2, 1)), {"dropout": jax.random.key(0)}
        >>> y = DropPath().apply({}, x, 0.5, deterministic=False, rngs=rngs)
        >>> set(y.ravel().tolist()), bool((y[:, 0] == y[:, 1]).all())
        ({0.0, 2.0}, True)

    Source:
        Huang et al., Deep Networks with Stochastic Depth; Larsson et al., FractalNet.
    """

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        rate: Float[Any, ""] | float | None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "batch n dim"]:
        """Drops examples at a rate, which may be traced; None drops none."""
        if deterministic or rate is None:
            return x
        shape = (x.shape[0], *[1] * (x.ndim - 1))
        kept = jax.random.bernoulli(self.make_rng("dropout"), 1 - rate, shape)
        # At a rate of 1 all is dropped; a division by zero has gradients of NaN.
        fraction = jnp.where(rate < 1, 1 - rate, 1)
        return jnp.where(kept, x / jnp.asarray(fraction, x.dtype), 0)


def gelu(x: Float[Array, "*shape"], *, approximate: bool = False) -> Array:
    """Computes GELU(x) = x (1 + erf(x / sqrt(2))) / 2.

    `flax.linen.gelu` uses erfc, which takes twice as long on CPUs.

    Args:
        x: An array.
        approximate: Whether to use the tanh approximation.

    Returns:
        An array in the shape and dtype of ``x``.

    Example:
        >>> gelu(jnp.array([-1.0, 0.0, 1.0])).round(3).tolist()
        [-0.15900000929832458, 0.0, 0.8410000205039978]
    """
    if approximate:
        return nn.gelu(x, approximate=True)
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def quick_gelu(x: Float[Array, "*shape"]) -> Array:
    """Computes x sigmoid(1.702 x), the approximation of GELU in OpenAI's CLIP.

    Args:
        x: An array.

    Returns:
        An array in the shape and dtype of ``x``.

    Example:
        >>> [f"{x:.3f}" for x in quick_gelu(jnp.array([-1.0, 0.0, 1.0]))]
        ['-0.154', '0.000', '0.846']

    Source:
        Hendrycks and Gimpel, Gaussian Error Linear Units, section 2.
    """
    return x * jax.nn.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate=True),
    "quick_gelu": quick_gelu,
    "swiglu": nn.silu,
}


class FeedForward(nn.Module):
    """Applies the feed-forward network to every token: Linear, GELU, Linear.

    W_out gelu(W_hidden x), or with SwiGLU W_out (silu(W_gate x) * W_hidden x); each
    product has a bias, if ``use_bias``.

    Attributes:
        dim: Width of the tokens.
        mlp_dim: Width of the hidden layer.
        dropout: Dropout rate after the activation.
        dtype: Compute dtype; parameters are float32.
        activation: ``"gelu"``; ``"gelu_tanh"``, its approximation by tanh;
            ``"quick_gelu"``, x sigmoid(1.702 x); or ``"swiglu"``.
        use_bias: Whether the linear layers have a bias.

    Source:
        SwiGLU: Shazeer, GLU Variants Improve Transformer.
    """

    dim: int
    mlp_dim: int
    dropout: float = 0.0
    dtype: Any = jnp.float32
    activation: str = "gelu"
    use_bias: bool = True
    # The hidden layer, see `MultiHeadAttention.split_axes`.
    split_axes: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "hidden/kernel": (-1,),
        "hidden/bias": (-1,),
        "gate/kernel": (-1,),
        "gate/bias": (-1,),
        "out/kernel": (-2,),
    }

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch n dim"], *, deterministic: bool = True
    ) -> Float[Array, "batch n dim"]:
        """Applies the network to every token."""
        check_choice("activation", self.activation, ACTIVATIONS)
        activation = ACTIVATIONS[self.activation]
        linear = functools.partial(Linear, use_bias=self.use_bias, dtype=self.dtype)
        # W_out gelu(W_hidden x + b) + b'
        hidden = linear(self.mlp_dim, name="hidden")(x)
        if self.activation == "swiglu":
            x = activation(linear(self.mlp_dim, name="gate")(x)) * hidden
        else:
            x = activation(hidden)
        x = Dropout(self.dropout)(x, deterministic=deterministic)
        return linear(self.dim, name="out")(x)


class TransformerBlock(nn.Module):
    """Applies a pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Attributes:
        attention: Constructor of the attention; called with ``name`` and ``dtype``.
        dim: Width of the tokens.
        mlp_dim: Width of the feed-forward network's hidden layer.
        attention_dropout: Dropout rate of the attention's output.
        dropout: Dropout rate of the feed-forward network.
        dtype: Compute dtype; parameters are float32.
        norm_eps: Constant that the norms add to the variance.
        activation: See `FeedForward`.
        norm_type: ``"layer_norm"`` or ``"rms_norm"``, see `make_norm`.
        mlp_bias: Whether the feed-forward network has biases.
    """

    attention: Callable[..., nn.Module]
    dim: int
    mlp_dim: int
    attention_dropout: float = 0.0
    dropout: float = 0.0
    dtype: Any = jnp.float32
    norm_eps: float = LAYER_NORM_EPSILON
    activation: str = "gelu"
    norm_type: str = "layer_norm"
    mlp_bias: bool = True

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch n dim"],
        *,
        grid: offsets.Grid | None,
        num_prefix: int,
        position: Any = None,
        key_mask: Bool[Array, "batch n"] | None = None,
        segment_ids: Int[Array, "batch n"] | None = None,
        index: Int[Array, ""] | None = None,
        shared: Any = None,
        drop_path: Float[Any, ""] | float | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch n dim"]:
        """Applies the block.

        ``drop_path`` is the rate of `DropPath` on both branches; the other arguments
        are those of `MultiHeadAttention.__call__`.
        """
        x = finite_tokens(x, key_mask)
        norm = make_norm(self.norm_type, self.norm_eps, self.dtype)
        # y = attention(norm(x))
        y = self.attention(name="attention", dtype=self.dtype)(
            norm(name="attention_norm")(x),
            grid=grid,
            num_prefix=num_prefix,
            position=position,
            key_mask=key_mask,
            segment_ids=segment_ids,
            index=index,
            shared=shared,
        )
        # x + y, then x + MLP(norm(x))
        y = Dropout(self.attention_dropout)(y, deterministic=deterministic)
        x = x + DropPath()(y, drop_path, deterministic=deterministic)
        y = FeedForward(
            self.dim,
            self.mlp_dim,
            self.dropout,
            self.dtype,
            self.activation,
            self.mlp_bias,
            name="feed_forward",
        )(norm(name="feed_forward_norm")(x), deterministic=deterministic)
        return x + DropPath()(y, drop_path, deterministic=deterministic)


def block_of(model: nn.Module) -> functools.partial:
    """Returns the constructor of a model's blocks; call it with the attention.

    Args:
        model: A model with the attributes of `TransformerBlock`, other than
            ``attention``, under the same names.

    Returns:
        A constructor of `TransformerBlock`.
    """
    fields = {field.name for field in dataclasses.fields(TransformerBlock)}
    names = sorted(fields - {"attention", "parent", "name"})
    return functools.partial(
        TransformerBlock, **{name: getattr(model, name) for name in names}
    )


def transformer_blocks(
    x: Float[Array, "batch n dim"],
    attentions: Sequence[functools.partial],
    make_block: functools.partial,
    *,
    positions: Sequence[Any] | None = None,
    scan: bool = True,
    remat: bool = False,
    drop_path: float = 0.0,
    **options: Any,
) -> Float[Array, "batch n dim"]:
    """Applies the blocks of a model and compiles equal layers once; for ``__call__``.

    Consecutive layers with the same attention are one scanned block ``blocks_FIRST``,
    where FIRST is the index of the first layer. Its parameters have a leading axis of
    layers, so a model of 12 layers compiles like a model of one layer. The backward
    pass keeps no copy of the parameters. On CPUs the scan is unrolled if a layer
    compiles quickly: that takes less time in training. Attentions that draw random
    features have a block for each layer, ``block_LAYER``; so do all attentions with
    ``scan=False``.
    The module shared by layers with the same attention is ``shared_FIRST``.

    Args:
        x: Tokens, shape ``[batch, n, dim]``.
        attentions: A constructor for each layer, from `relattn.nn.registry`.
        make_block: Constructor of a `TransformerBlock`; called with its attention and
            ``name``.
        positions: A `LayerPosition` for each layer, or None.
        scan: Whether to scan equal layers.
        remat: Whether the backward pass keeps only the input of each layer and
            recomputes the layer.
        drop_path: Rate of `DropPath` in the last layer; it grows linearly from zero in
            the first layer.
        **options: Further arguments of the blocks' call.

    Returns:
        The tokens after the last block.

    Raises:
        ValueError: If ``drop_path`` is not from 0 to 1.

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
    rates: list[Any] = [None] * len(attentions)
    if not 0 <= drop_path <= 1:
        raise ValueError(f"drop_path must be from 0 to 1, got {drop_path}")
    if drop_path:
        rates = list(np.linspace(0, drop_path, len(attentions), dtype=np.float32))
    # What differs between equal layers.
    inputs = list(zip(positions, rates, strict=True))
    shared = _shared(attentions, x.shape[-2], options["grid"])
    for first, last in _equal_layers(attentions, scan):
        attention = functools.partial(attentions[first], layer=first)
        options["shared"] = shared[first]
        structure = jax.tree.structure(inputs[first])

        def body(block, x, leaves, structure=structure):
            position, rate = jax.tree.unflatten(structure, leaves)
            return block(x, position=position, drop_path=rate, **options), None

        leaves = [jax.tree.leaves(values) for values in inputs[first:last]]
        # A block that is not scanned is called by itself.
        if not scan or not attention.func.scannable:
            block = make_block(attention, name=f"block_{first}")
            x, _ = (nn.remat(body) if remat else body)(block, x, leaves[0])
            continue
        # Equal blocks are one scan over their parameters and positions, stacked.
        block = make_block(attention, name=f"blocks_{first}")
        stacked = [jnp.stack(values) for values in zip(*leaves, strict=True)]
        cheap = not (remat or attention.func.expensive_to_compile())
        unroll = platform_defaults().unroll_layers and cheap
        if remat:
            body = nn.remat(body, prevent_cse=False)
        x, _ = nn.scan(
            body,
            variable_axes={
                "params": 0,
                "batch_stats": 0,
                "cache": 0,
                "intermediates": 0,
                "attention_weights": 0,
            },
            split_rngs={"params": True, "dropout": True},
            length=last - first,
            unroll=last - first if unroll else 1,
            # Layers share no constants; the check would trace them twice.
            check_constancy_invariants=False,
        )(block, x, stacked)
    return x


def _shared(
    attentions: Sequence[functools.partial], n: int, grid: offsets.Grid | None
) -> list[Any]:
    """Returns, for each layer, the output of the module that it shares."""
    shared = {}
    for layer, attention in enumerate(attentions):
        if id(attention) not in shared:
            make = attention(parent=None).make_shared()
            shared[id(attention)] = make and make(name=f"shared_{layer}")(n, grid)
    return [shared[id(attention)] for attention in attentions]


def _equal_layers(
    attentions: Sequence[functools.partial], scan: bool
) -> Iterator[tuple[int, int]]:
    """Yields the ranges ``[first, last)`` of layers that share a compiled block."""
    first = 0
    while first < len(attentions):
        last = first + 1
        if scan and attentions[first].func.scannable:
            while last < len(attentions) and attentions[last] is attentions[first]:
                last += 1
        yield first, last
        first = last
