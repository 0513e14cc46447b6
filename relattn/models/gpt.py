"""The generative Transformer for text, with any causal attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from relattn.kernels.checks import at_most, bound_hint
from relattn.nn.attention import check_index
from relattn.nn.blocks import (
    LAYER_NORM_EPSILON,
    Linear,
    at_precision,
    block_of,
    make_norm,
    transformer_blocks,
)
from relattn.nn.registry import layer_attentions


class GPT(nn.Module):
    """Predicts each next token from earlier tokens: embedding, causal blocks, head.

    Embeddings start as N(0, 1). By default queries, keys, values and the head have no
    bias, the head is not tied to the embedding and, as in the code of Translution's
    authors, two LayerNorms follow each other before the head. With ``dim``,
    ``num_layers``, ``num_heads`` and ``mlp_dim`` from ``SIZES["A"]`` and so on these
    are the GPT-A, B and C of Translution. GPT-2 has ``position="learned"``,
    ``qkv_bias=True``, ``head_norm=False``, ``tie_head=True`` and
    ``activation="gelu_tanh"``. Llama has ``position="rope1d"``,
    ``norm_type="rms_norm"``, ``activation="swiglu"``, ``head_norm=False``,
    ``out_bias=False`` and ``mlp_bias=False``.

    Attributes:
        vocab_size: Size of the vocabulary.
        context_length: Length of the longest sequence, in tokens.
        dim: Width of the tokens.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        num_kv_heads: Number of heads with keys and values, which consecutive heads of
            queries share (grouped queries); divides ``num_heads``; 0 for ``num_heads``.
            The decoding cache holds these heads only.
        head_dim: Width of a head; 0 for dim / num_heads.
        mlp_dim: Width of the feed-forward networks' hidden layer.
        attention: Spec of the attention.
        position: Spec of the position encoding.
        num_relative_layers: Number of leading layers that use ``attention``; the rest
            use softmax; 0 for all layers.
        attention_dropout: Dropout rate of the attentions' outputs.
        dropout: Dropout rate of the feed-forward networks.
        drop_path: Stochastic depth: rate at which an example skips a branch of the last
            layer; it grows linearly from zero in the first layer.
        qkv_bias: Whether queries, keys and values have a bias.
        out_bias: Whether the attentions' output projections have a bias.
        mlp_bias: Whether the feed-forward networks have biases.
        head_norm: Whether a second norm follows the final norm.
        tie_head: Whether the head's matrix is the transposed embedding.
        norm_type: Type of all norms: ``"layer_norm"``, or ``"rms_norm"``, which
            subtracts no mean and has no bias.
        norm_eps: Constant that the norms add to the variance.
        activation: Activation of the feed-forward networks: ``"gelu"``;
            ``"gelu_tanh"``, its approximation by tanh; ``"quick_gelu"``, x
            sigmoid(1.702 x); or ``"swiglu"``, silu(W_gate x) * W_hidden x in place of
            gelu(W_hidden x).
        dtype: Compute dtype; parameters are float32.
        precision: Precision of matrix products, one of those that
            `jax.default_matmul_precision` takes: ``"default"``, ``"high"`` or
            ``"highest"``; ``""`` for JAX's setting.
        remat: Whether the backward pass recomputes each layer from its input.

    Example:
        >>> model = GPT(vocab_size=11, context_length=7, dim=8, num_layers=1,
        ...             num_heads=2, mlp_dim=16, attention="translution")
        >>> tokens = jnp.zeros((1, 5), jnp.int32)
        >>> logits, _ = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), tokens)
        >>> logits.shape
        (1, 5, 11)

    Source:
        Translution, section 4.2 and table 1; Llama: Touvron et al., LLaMA: Open and
        Efficient Foundation Language Models, section 2.2.
    """

    vocab_size: int
    context_length: int
    dim: int = 192
    num_layers: int = 6
    num_heads: int = 3
    num_kv_heads: int = 0
    head_dim: int = 0
    mlp_dim: int = 768
    attention: str = "softmax"
    position: str = "none"
    num_relative_layers: int = 0
    attention_dropout: float = 0.0
    dropout: float = 0.0
    drop_path: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = True
    mlp_bias: bool = True
    head_norm: bool = True
    tie_head: bool = False
    norm_type: str = "layer_norm"
    norm_eps: float = LAYER_NORM_EPSILON
    activation: str = "gelu"
    dtype: Any = jnp.float32
    precision: str = ""
    remat: bool = False
    inputs: ClassVar[str] = "tokens"
    # [vocab_size, dim] and [dim, vocab_size]
    split_axes: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "embedding/embedding": (-2, -1),
        "head/kernel": (-1, -2),
    }
    num_prefix: ClassVar[int] = 0

    @nn.compact
    @at_precision
    def __call__(
        self,
        tokens: Int[Array, "batch n"],
        *,
        key_mask: Bool[Array, "batch n"] | None = None,
        segment_ids: Int[Array, "batch n"] | None = None,
        deterministic: bool = True,
        index: Int[Array, ""] | int | None = None,
    ) -> Float[Array, "batch _n vocab"]:
        """Computes the logits of the token after each token.

        Args:
            tokens: Ids from 0 to ``vocab_size - 1``, shape ``[batch, n]``; others make
                the logits NaN, unless they are padding.
            key_mask: True for tokens that exist, shape ``[batch, n]``.
            segment_ids: For packed sequences: a token attends only to tokens of its
                segment, a run of equal ids, shape ``[batch, n]``. An id that comes back
                after another one starts a new segment. Absolute positions count on over
                segments; so do those of queries and keys, such as rotary ones and
                ``fourier_mask``, in linear attention, whose features depend on them.
            deterministic: Whether dropout is off.
            index: In decoding, the position of the last token. ``tokens`` is that token
                alone, which attends to the mutable collection ``cache``; or it is the
                whole sequence (prefill), which fills the cache, and tokens after
                ``index`` are padding. Logits are NaN if it is traced and out of range.

        Returns:
            Logits, float32, shape ``[batch, n, vocab_size]``; in decoding those of the
            last token, shape ``[batch, 1, vocab_size]``.

        Raises:
            ValueError: If the tokens or the mask have another shape, the sequence is
                longer than ``context_length``, or ``index`` is not a position in it.
        """
        self._check(tokens, key_mask, index)
        attentions, make_position = layer_attentions(
            self.attention,
            self.position,
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_relative_layers=self.num_relative_layers,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            causal=True,
        )
        length, num_tokens = self.context_length, tokens.shape[1]
        # Token embeddings, initially N(0, 1).
        embedding = nn.Embed(
            self.vocab_size,
            self.dim,
            embedding_init=nn.initializers.normal(1.0),
            dtype=self.dtype,
            name="embedding",
        )
        # Narrow integers, such as uint8, may not hold `unknown`.
        tokens = jnp.asarray(tokens)
        tokens = tokens if tokens.dtype.itemsize > 4 else tokens.astype(jnp.int32)
        # A negative id would count from the end; one that is too large is NaN.
        unknown = jnp.asarray(self.vocab_size, tokens.dtype)
        tokens = jnp.where(tokens < 0, unknown, tokens)
        if key_mask is not None:
            # Ids of padding may be out of range.
            tokens = jnp.where(key_mask, tokens, 0)
        x = embedding(tokens)
        # x + p, for encodings that act on tokens: the rows from the first token on, or
        # in decoding the row of the one token.
        grid = (length,)
        position = make_position(name="position")
        encoding = position.add_to_tokens(
            jnp.zeros((1, length, self.dim), x.dtype), grid
        )
        start = index if index is not None and num_tokens == 1 else 0
        x = x + jax.lax.dynamic_slice_in_dim(encoding, start, num_tokens, axis=1)
        # num_layers times: x + attention(norm(x)), causal, then x + MLP(norm(x)).
        x = transformer_blocks(
            x,
            attentions,
            block_of(self),
            positions=position.per_layer(grid, self.num_prefix),
            grid=grid,
            num_prefix=self.num_prefix,
            key_mask=key_mask,
            segment_ids=segment_ids,
            index=None if index is None else jnp.asarray(index),
            remat=self.remat,
            drop_path=self.drop_path,
            deterministic=deterministic,
        )
        # After a prefill, only the last token's logits count.
        if index is not None and num_tokens > 1:
            x = jax.lax.dynamic_slice_in_dim(x, index, 1, axis=1)
        # The final norm, and the second one of Translution's authors.
        norm = make_norm(self.norm_type, self.norm_eps, self.dtype)
        x = norm(name="norm")(x)
        if self.head_norm:
            x = norm(name="head_norm")(x)
        # Logits x E^T with the embeddings E, or x W; in float32.
        if self.tie_head:
            return embedding.attend(x).astype(jnp.float32)
        head = Linear(self.vocab_size, use_bias=False, dtype=self.dtype, name="head")
        return head(x).astype(jnp.float32)

    @nn.nowrap
    def _check(self, tokens: Array, key_mask: Array | None, index: Any) -> None:
        """Raises ValueError if tokens, mask and index do not fit the model."""
        if tokens.ndim != 2:
            raise ValueError(
                f"tokens have shape {tokens.shape}, expected [batch, n]: add the axis "
                "of the batch, tokens[None]"
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be whole numbers, got {tokens.dtype}")
        row = tokens.shape[1:]
        shapes = (row, (1, *row), tokens.shape)
        if key_mask is not None and key_mask.shape not in shapes:
            raise ValueError(
                f"key_mask has shape {key_mask.shape}, expected {tokens.shape}: an "
                "entry for each token"
            )
        length, num_tokens = self.context_length, tokens.shape[1]
        if not at_most(num_tokens, length):
            raise ValueError(
                f"the sequence of {num_tokens} tokens is longer than "
                f"context_length={length}" + bound_hint(num_tokens, f"<= {length}")
            )
        if index is not None:
            check_index(index, num_tokens, (length,))
