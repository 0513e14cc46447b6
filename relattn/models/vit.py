"""Vision Transformers: one model, `ViT`, and three of its settings.

`Performer`, `Linformer` and `RoutingTransformer` are `ViT` with other defaults: the
sizes of the papers' models, pixels as tokens, and no LayerNorms around the embedding or
before the head. `SIZES` has the sizes A, B and C of Translution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.messages import check_choice
from relattn.models.anchor import ANCHORS, polyphase_anchor
from relattn.models.patches import (
    PatchSize,
    check_images,
    extract_patches,
    patch_grid,
    zero_patches,
)
from relattn.nn.attention_pool import AttentionPool
from relattn.nn.blocks import (
    LAYER_NORM_EPSILON,
    Linear,
    at_precision,
    block_of,
    make_norm,
    transformer_blocks,
)
from relattn.nn.registry import layer_attentions

# Translution, table 1.
SIZES: dict[str, dict[str, Any]] = {
    "A": {"num_layers": 6, "dim": 192, "num_heads": 3, "mlp_dim": 768},
    "B": {"num_layers": 12, "dim": 192, "num_heads": 3, "mlp_dim": 768},
    "C": {"num_layers": 12, "dim": 384, "num_heads": 6, "mlp_dim": 1536},
}

HEADS = ("linear", "mlp")
POOLS = ("cls", "mean", "cls_mean", "attention")


class ViT(nn.Module):
    """Classifies images or volumes from their patches: embedding, CLS, blocks, head.

    A patch is embedded by LayerNorm, Linear, LayerNorm. The CLS token comes first and
    starts as N(0, 1). A final LayerNorm precedes the head. With ``dim``,
    ``num_layers``, ``num_heads`` and ``mlp_dim`` from ``SIZES["A"]`` and so on these
    are the ViT-A, B and C of Translution. With ``qkv_bias=True``,
    ``embedding_norms=False`` and ``head="mlp"`` it is the ViT of Guoji, whose text does
    not state biases, norms and the hidden size of the head.

    Attributes:
        num_classes: Number of classes; 0 for a model without a head, whose outputs are
            what a head would read.
        dim: Width of the tokens.
        num_layers: Number of blocks.
        num_heads: Number of heads.
        num_kv_heads: Number of heads with keys and values, which consecutive heads of
            queries share (grouped queries); divides ``num_heads``; 0 for ``num_heads``.
        head_dim: Width of a head; 0 for dim / num_heads.
        mlp_dim: Width of the feed-forward networks' hidden layer.
        patch_size: Side of the square patch that is one token, or its height and width,
            in pixels; for volumes, such as videos, of a cube, or its frames, height and
            width.
        patch_overlap: Number of pixels by which a patch is larger on every side.
        anchor: ``"polyphase"`` rolls every image by `polyphase_anchor` before it is cut
            into patches; ``"none"`` does not.
        periodic: Whether the image and the grid of patches are periodic, a
            `relattn.Torus`. With ``anchor="polyphase"`` the logits are then the same
            for all circular shifts.
        pool: What the head reads: ``"cls"``; ``"mean"``, the mean of the patch tokens;
            ``"cls_mean"``, both, one after the other; or ``"attention"``, the output
            of an `AttentionPool` of the patch tokens.
        pool_prefix: Whether the mean and `AttentionPool` read prefix tokens too.
        class_token: Whether there is a CLS token; None for whether ``pool`` needs one.
        num_registers: Number of register tokens, learned tokens after CLS that, like
            it, have no position, and that the head does not read.
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
        mlp_bias: Whether the blocks' feed-forward networks have biases.
        embedding_norms: Whether norms surround the embedding's linear layer.
        pre_norm: Whether a norm precedes the first block.
        final_norm: Whether a norm precedes the head.
        fc_norm: Whether this norm follows the pooling; otherwise it precedes it.
        norm_type: Type of all norms: ``"layer_norm"``, or ``"rms_norm"``, which
            subtracts no mean and has no bias.
        norm_eps: Constant that the norms add to the variance.
        activation: Activation of the feed-forward networks: ``"gelu"``;
            ``"gelu_tanh"``, its approximation by tanh; ``"quick_gelu"``, x
            sigmoid(1.702 x); or ``"swiglu"``, silu(W_gate x) * W_hidden x in place of
            gelu(W_hidden x).
        head: ``"linear"``, or ``"mlp"``: a hidden layer of ``mlp_dim`` and GELU
            before it.
        scan_layers: Whether equal layers are compiled once, by `jax.lax.scan`; their
            parameters are then stacked.
        dtype: Compute dtype; parameters are float32.
        precision: Precision of matrix products, one of those that
            `jax.default_matmul_precision` takes: ``"default"``, ``"high"`` or
            ``"highest"``; ``""`` for JAX's setting.
        remat: Whether the backward pass recomputes each layer from its input.

    Example:
        >>> import jax
        >>> model = ViT(num_classes=3, patch_size=2, dim=8, num_layers=2, num_heads=2,
        ...             mlp_dim=16, attention="translution", num_relative_layers=1)
        >>> images = jnp.zeros((1, 4, 6, 1))
        >>> logits, _ = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), images)
        >>> logits.shape
        (1, 3)

    Source:
        Translution, section 4.1 and table 1; the embedding, biases, norms and initial
        values: the authors' code; Guoji, Improving efficient Vision Transformers with
        RPEs, section 3. Registers: Darcet et al., Vision Transformers Need Registers;
        ``pre_norm`` and ``quick_gelu``: Radford et al., Learning Transferable Visual
        Models From Natural Language Supervision.
    """

    num_classes: int
    dim: int = 192
    num_layers: int = 6
    num_heads: int = 3
    num_kv_heads: int = 0
    head_dim: int = 0
    mlp_dim: int = 768
    patch_size: PatchSize = 16
    patch_overlap: int = 0
    anchor: str = "none"
    periodic: bool = False
    pool: str = "cls"
    pool_prefix: bool = False
    class_token: bool | None = None
    num_registers: int = 0
    attention: str = "softmax"
    position: str = "none"
    num_relative_layers: int = 0
    attention_dropout: float = 0.0
    dropout: float = 0.0
    drop_path: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = True
    mlp_bias: bool = True
    embedding_norms: bool = True
    pre_norm: bool = False
    final_norm: bool = True
    fc_norm: bool = False
    norm_type: str = "layer_norm"
    norm_eps: float = LAYER_NORM_EPSILON
    activation: str = "gelu"
    head: str = "linear"
    scan_layers: bool = True
    dtype: Any = jnp.float32
    precision: str = ""
    remat: bool = False
    inputs: ClassVar[str] = "images"
    split_axes: ClassVar[Mapping[str, tuple[int, ...]]] = {
        "embedding/kernel": (-1,),
        "head/kernel": (-1, -2),
    }

    def __post_init__(self) -> None:
        # A list, as in a config.json, would make the module unhashable.
        if isinstance(self.patch_size, list):
            self.patch_size = tuple(self.patch_size)
        super().__post_init__()

    @property
    def num_prefix(self) -> int:
        """Number of prefix tokens: the CLS token, if there is one, and registers."""
        return int(self.has_class_token) + self.num_registers

    @property
    def has_class_token(self) -> bool:
        """Whether there is a CLS token, the first token."""
        if self.class_token is None:
            return self.pool in ("cls", "cls_mean")
        return self.class_token

    @nn.compact
    @at_precision
    def __call__(
        self,
        images: Float[Array, "batch *size channels"],
        *,
        key_mask: Bool[Array, "batch patches"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "batch classes"]:
        """Computes the class logits of a batch of images.

        Args:
            images: Shape ``[batch, height, width, channels]``; volumes ``[batch,
                frames, height, width, channels]``.
            key_mask: True for patches that exist, row by row, shape
                ``[batch, patches]``: for images padded to one size.
            deterministic: Whether dropout is off.

        Returns:
            Logits, float32, shape ``[batch, num_classes]``; without a head
            ``[batch, dim]``, or ``[batch, 2 dim]`` with ``pool="cls_mean"``.

        Raises:
            ValueError: If an attribute is invalid, or does not fit the images or the
                mask.
        """
        self._check(images, key_mask)
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
        )
        norm = make_norm(self.norm_type, self.norm_eps, self.dtype)
        # The anchor rolls each image to a place that its content chooses.
        if self.anchor == "polyphase":
            images = polyphase_anchor(images, self.patch_size)
        if key_mask is not None:
            images = zero_patches(images, key_mask, self.patch_size)
        # Pixels of the patches, [batch, n, patch height * patch width * channels].
        x, grid = extract_patches(
            images,
            self.patch_size,
            overlap=self.patch_overlap,
            periodic=self.periodic,
        )
        self._check_channels(images, x)
        # Tokens: norm, Linear, norm of the patches.
        if self.embedding_norms:
            x = norm(name="patch_norm")(x)
        x = Linear(self.dim, dtype=self.dtype, name="embedding")(x)
        if self.embedding_norms:
            x = norm(name="embedding_norm")(x)
        # x + p, for encodings that act on tokens; CLS has no position.
        position = make_position(name="position")
        x = position.add_to_tokens(x, grid)
        x = self._prepend_prefix(x)
        if self.pre_norm:
            x = norm(name="pre_norm")(x)
        # Keys include prefix tokens.
        if key_mask is not None:
            key_mask = jnp.pad(
                key_mask, [(0, 0), (self.num_prefix, 0)], constant_values=True
            )
        # num_layers times: x + attention(norm(x)), then x + MLP(norm(x)). The other
        # encodings act in the attentions.
        x = transformer_blocks(
            x,
            attentions,
            block_of(self),
            positions=position.per_layer(grid, self.num_prefix),
            scan=self.scan_layers,
            grid=grid,
            num_prefix=self.num_prefix,
            key_mask=key_mask,
            remat=self.remat,
            drop_path=self.drop_path,
            deterministic=deterministic,
        )
        # CLS is taken first, because the norm acts on each token alone.
        if self.pool == "cls":
            x = x[:, 0]
        if self.final_norm and not self.fc_norm:
            x = norm(name="norm")(x)
        if self.pool != "cls":
            x = self._pool(x, key_mask)
        if self.final_norm and self.fc_norm:
            x = norm(name="norm")(x)
        return self._classify(x.astype(jnp.float32))

    @nn.nowrap
    def _check_channels(self, images, patches):
        """Checks that images have the channels of the parameters, if there are any."""
        embedding = self.get_variable("params", "embedding")
        if embedding is None:
            return
        channels, inputs = images.shape[-1], embedding["kernel"].shape[0]
        if inputs != patches.shape[-1]:
            raise ValueError(
                f"images have {channels} channels, but the model's parameters are for "
                f"{inputs * channels / patches.shape[-1]:g}: pass such images, or load "
                f"a saved model by load_pretrained(folder, channels={channels})"
            )

    @nn.nowrap
    def _check(self, images: Array, key_mask: Array | None) -> None:
        """Raises ValueError if attributes, images and mask do not fit together."""
        check_images(images)
        check_choice("head", self.head, HEADS)
        check_choice("pool", self.pool, POOLS)
        if self.pool.startswith("cls") and not self.has_class_token:
            raise ValueError(
                f"pool={self.pool!r} reads the CLS token, which class_token=False "
                "leaves out: choose pool='mean' or class_token=True"
            )
        if self.num_registers < 0:
            raise ValueError(
                f"num_registers must be at least 0, got {self.num_registers}"
            )
        check_choice("anchor", self.anchor, ANCHORS)
        if key_mask is not None and self.anchor != "none":
            raise ValueError(
                "the anchor rolls the patches, which key_mask does not follow: "
                "leave out key_mask, or choose anchor='none'"
            )
        batch, *size, _ = images.shape
        expected = (batch, math.prod(patch_grid(size, self.patch_size)))
        if key_mask is not None and key_mask.shape != expected:
            raise ValueError(
                f"key_mask has shape {key_mask.shape}, expected {expected}: an entry "
                "for each patch of an image, row by row"
            )
        if self.anchor != "none" and images.ndim != 4:
            raise ValueError(
                "the anchor rolls images along their height and width: choose "
                "anchor='none' for volumes"
            )

    def _prepend_prefix(
        self, x: Float[Array, "batch patches dim"]
    ) -> Float[Array, "batch n dim"]:
        """Puts CLS and the registers, the same for all images, before the patches."""
        prefix = []
        if self.has_class_token:
            prefix.append(self._tokens("cls", 1))
        if self.num_registers:
            prefix.append(self._tokens("registers", self.num_registers))
        prefix = [
            jnp.broadcast_to(tokens.astype(x.dtype), (x.shape[0], *tokens.shape[1:]))
            for tokens in prefix
        ]
        return jnp.concatenate([*prefix, x], axis=1) if prefix else x

    def _classify(
        self, x: Float[Array, "batch features"]
    ) -> Float[Array, "batch outputs"]:
        """Applies the head, if there is one, to what it reads."""
        if not self.num_classes:
            return x
        if self.head == "mlp":
            x = nn.gelu(Linear(self.mlp_dim, name="hidden")(x), approximate=False)
        return Linear(self.num_classes, name="head")(x)

    def _tokens(self, name: str, count: int) -> Float[Array, "1 {count} dim"]:
        """Returns learned tokens."""
        shape = (1, count, self.dim)
        return self.param(name, nn.initializers.normal(1.0), shape, jnp.float32)

    def _pool(
        self, x: Float[Array, "batch n dim"], key_mask: Bool[Array, "batch n"] | None
    ) -> Float[Array, "batch features"]:
        """Pools the tokens that exist: their mean, or attention to them."""
        start = 0 if self.pool_prefix else self.num_prefix
        if key_mask is not None:
            key_mask = key_mask[:, start:]
        if self.pool == "attention":
            pool = AttentionPool(
                self.num_heads,
                self.mlp_dim,
                self.norm_eps,
                self.activation,
                self.dtype,
                self.norm_type,
                name="pool",
            )
            return pool(x[:, start:], key_mask=key_mask)
        x = x.astype(jnp.float32)
        patches = x[:, start:]
        if key_mask is None:
            mean = patches.mean(axis=1)
        else:
            # An image without patches, such as padding of a batch, has the mean zero.
            count = jnp.maximum(key_mask.sum(axis=1, keepdims=True), 1)
            mean = jnp.sum(patches, axis=1, where=key_mask[..., None]) / count
        if self.pool == "cls_mean":
            return jnp.concatenate([x[:, 0], mean], axis=-1)
        return mean


class Performer(ViT):
    """The pixel Performer: `ViT` on pixels, with linear attention.

    With ``attention="favor"`` and ``position`` ``"none"``, ``"learnable_sincos"`` or
    ``"constrained_sincos"``, or with ``attention="banded(clip=6)"``, these are the
    Performers of Horn et al. (no position, absolute, strategy 1, strategy 2). They have
    the published number of parameters plus the 256 of the CLS token, which the
    published count leaves out. Queries, keys and values have a bias; there are no
    LayerNorms around the embedding or before the head.

    Attributes are those of `ViT`.

    Example:
        >>> import jax
        >>> model = Performer(num_classes=3, dim=8, num_layers=1, num_heads=2,
        ...                   mlp_dim=16)
        >>> images = jnp.zeros((1, 5, 7, 1))
        >>> logits, _ = model.init_with_output(jax.random.key(0), images)
        >>> logits.shape
        (1, 3)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 3
        and appendix A.2; ``mlp_dim``, biases and norms: the authors' code.
    """

    dim: int = 256
    num_layers: int = 6
    num_heads: int = 8
    mlp_dim: int = 1024
    patch_size: PatchSize = 1
    attention: str = "favor"
    qkv_bias: bool = True
    embedding_norms: bool = False
    final_norm: bool = False
    scan_layers: bool = False


class Linformer(Performer):
    """The pixel Linformer: `Performer` with attention to projected keys and values.

    A baseline of Horn et al. The one in their notebooks has one patch of 32x32 pixels
    (`relattn.models.cnn.PUBLISHED_BASELINES`); this one has pixels as tokens, like
    their Performers. Horn et al. state 10.2M parameters; the sizes are our choice: 5
    layers of width 384, and, as in their Performers, heads of 32, an MLP of four times
    the width and absolute positions. k is 256 for 1,025 tokens, and the keys and values
    of a layer share one matrix, which the authors of Linformer choose for sequences of
    1,024. With 32x32 images and ten classes the model has 10,189,418 parameters for one
    channel, 10,190,186 for three.

    Attributes are those of `ViT`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = Linformer(
        ...     num_classes=3, dim=8, num_layers=1, num_heads=2, mlp_dim=16,
        ...     attention="linformer(k=5)")
        >>> images = jnp.zeros((1, 5, 7, 1))
        >>> logits, _ = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), images)
        >>> logits.shape
        (1, 3)

    Source:
        Wang et al., Linformer: Self-Attention with Linear Complexity; a baseline of
        Horn et al., table 1.
    """

    dim: int = 384
    num_layers: int = 5
    num_heads: int = 12
    mlp_dim: int = 1536
    attention: str = "linformer(k=256, sharing='key_value')"
    position: str = "learnable_sincos"
    scan_layers: bool = True


class RoutingTransformer(Performer):
    """The pixel Routing Transformer: `Performer` with routed and local attention.

    A baseline of Horn et al., who state only that it has 11.4M parameters. The sizes
    are our choice: 9 layers of width 320 with 10 heads, half of them local, and, as in
    their Performers, heads of 32 and an MLP of four times the width; learned positions;
    8 clusters, whose window is 129 of the 1,025 tokens. With 32x32 images and ten
    classes the model has 11,428,490 parameters for one channel, 11,429,130 for three;
    the centroids are not parameters.

    Attributes are those of `ViT`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> model = RoutingTransformer(
        ...     num_classes=3, dim=8, num_layers=1, num_heads=2, mlp_dim=16,
        ...     attention="routing(clusters=3)")
        >>> images = jnp.zeros((1, 5, 7, 1))
        >>> logits, variables = jax.eval_shape(
        ...     model.init_with_output, jax.random.key(0), images)
        >>> logits.shape, sorted(variables)
        ((1, 3), ['batch_stats', 'params'])

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers;
        a baseline of Horn et al., table 1.
    """

    dim: int = 320
    num_layers: int = 9
    num_heads: int = 10
    mlp_dim: int = 1280
    attention: str = "routing(clusters=8)"
    position: str = "learned"
    scan_layers: bool = True
