"""Linear attention modules, with random or learned features.

`LinearAttention` calls the kernels with the feature map of a subclass. `FavorAttention`
(Performer) and `BandedAttention` (strategy 2) draw random features; their projection is
not a parameter but a variable in the collection ``random_features``.
`LearnedReluAttention` and `HedgehogAttention` learn their features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import serialization
from jaxtyping import Array, Float

from relattn.kernels import banded, feature_maps, linear, random_projections, toeplitz
from relattn.kernels.feature_maps import unit_norm
from relattn.kernels.sums import check_state, empty_causal_state
from relattn.messages import check_choice
from relattn.nn.attention import Context, MultiHeadAttention, grouped, split_heads
from relattn.nn.blocks import uniform

# Lets `flax.serialization.to_bytes` store a model's variables.
serialization.register_serialization_state(
    random_projections.RandomFeatures,
    lambda drawn: {"projection": drawn.projection},
    lambda drawn, state: dataclasses.replace(drawn, projection=state["projection"]),
    override=True,
)

FEATURE_MAPS = {
    "positive": feature_maps.positive_features,
    "trigonometric": feature_maps.trigonometric_features,
    "relu": feature_maps.relu_features,
}
# In wider heads, the weights of causal positive features underflow: see
# `relattn.kernels.causal_linear_attention`.
_MAX_CAUSAL_HEAD_DIM = 224
# Separates the seeds of a layer's projections: larger than any number of layers.
_MAX_LAYERS = 2**16


class LinearAttention(MultiHeadAttention):
    """Base class of attentions with weights phi(q_i) . phi(k_j).

    With an offset bias b the weights are multiplied by exp(b), as in
    `relattn.kernels.toeplitz_linear_attention`. A subclass defines `feature_map`.
    """

    sites: ClassVar[tuple[str, ...]] = (
        "none",
        "tokens",
        "heads",
        "values",
        "offset_bias",
    )
    periodic: ClassVar[bool] = True
    has_causal_form: ClassVar[bool] = True
    has_cross_form: ClassVar[bool] = True
    has_grouped_form: ClassVar[bool] = True
    scannable: ClassVar[bool] = True
    # Parameters of the feature map.
    feature_map_params: ClassVar[tuple[str, ...]] = ()

    def feature_map(self, head_dim: int) -> feature_maps.FeatureMap:
        """Returns the layer's feature map for queries and keys of width head_dim."""
        raise NotImplementedError

    @property
    def signed(self) -> bool:
        """Whether features, and so the sum of a query's weights, may be negative."""
        return False

    @nn.nowrap
    def takes_segments(self, position: Any) -> bool:
        """Returns whether the attention is causal, without an offset bias."""
        return self.causal and not (position and position.tables)

    @grouped
    def attend(
        self,
        q: Float[Array, "*batch heads n head_dim"],
        k: Float[Array, "*batch kv_heads m head_dim"],
        v: Float[Array, "*batch kv_heads m value_dim"],
        context: Context,
    ) -> Float[Array, "*batch heads n value_dim"]:
        """Computes linear attention."""
        feature_map = self.feature_map(q.shape[-1])
        return self.attend_content(q, k, v, feature_map, context)

    def attend_content(
        self,
        q: Float[Array, "*batch heads n head_dim"],
        k: Float[Array, "*batch kv_heads m head_dim"],
        v: Float[Array, "*batch kv_heads m value_dim"],
        feature_map: feature_maps.FeatureMap,
        context: Context,
    ) -> Float[Array, "*batch heads n value_dim"]:
        """Computes linear attention; sows the fraction of sums of weights <= 0."""
        tables = self.tables(context)
        options = {"key_mask": context.key_mask, **tables}
        if self.causal:
            attend: Callable[..., Any] = linear.causal_linear_attention
            if tables:
                attend = toeplitz.causal_toeplitz_linear_attention
            else:
                options["segment_ids"] = context.segment_ids
            return attend(q, k, v, feature_map, **options)
        attend = linear.linear_attention
        if tables:
            attend = toeplitz.toeplitz_linear_attention
            grid = context.grid_for("an offset bias has a row for each offset")
            options |= {"grid": grid, "num_prefix": context.num_prefix}
        if not self.signed:
            return attend(q, k, v, feature_map, **options)
        out, normalizer = attend(
            q, k, v, feature_map, return_normalizer=True, **options
        )
        self.sow("intermediates", "nonpositive_normalizer", (normalizer <= 0).mean())
        return out

    def decode(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch kv_heads n head_dim"],
        v: Float[Array, "batch kv_heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Computes the heads' outputs in decoding; caches the state.

        With an offset bias there is no state: keys and values are cached.
        """
        if self.tables(context):
            return super().decode(q, k, v, context)
        return self.decode_by_state(q, k, v, context)

    @grouped
    def decode_by_state(
        self,
        q: Float[Array, "*batch heads n head_dim"],
        k: Float[Array, "*batch kv_heads n head_dim"],
        v: Float[Array, "*batch kv_heads n value_dim"],
        context: Context,
    ) -> Float[Array, "*batch heads n value_dim"]:
        """Computes the heads' outputs in decoding; caches the state of the keys."""
        assert context.index is not None
        feature_map = self.feature_map(q.shape[-1])
        state, key_mask = self.get_variable("cache", "state"), None
        check_state(state)
        if q.shape[-2] > 1:
            # The state must not include padding.
            state, key_mask = None, jnp.arange(q.shape[-2]) <= context.index
        elif state is not None:
            # The first token of a sequence has none before it.
            empty = empty_causal_state(feature_maps.feature_shapes(feature_map, k), v)
            is_first = context.index == 0
            state = jax.tree.map(functools.partial(jnp.where, is_first), empty, state)
        out, state = linear.causal_linear_attention(
            q,
            k,
            v,
            feature_map,
            key_mask=key_mask,
            state=state,
            return_state=True,
        )
        if not self.is_initializing():
            self.put_variable("cache", "state", state)
        return out

    @grouped
    def attend_step(
        self,
        q_i: Float[Array, "*batch heads head_dim"],
        k: Float[Array, "*batch kv_heads length head_dim"],
        v: Float[Array, "*batch kv_heads length value_dim"],
        context: Context,
    ) -> Float[Array, "*batch heads value_dim"]:
        """Computes biased linear attention of one token to the tokens up to it."""
        assert context.index is not None
        return toeplitz.causal_toeplitz_linear_attention_step(
            q_i,
            k,
            v,
            self.feature_map(q_i.shape[-1]),
            index=context.index,
            **self.tables(context),
        )


class RandomFeatureAttention(LinearAttention):
    """Base class of linear attentions that draw random features.

    Attributes:
        num_features: Number of random features; 0 for int(head_dim * ln(head_dim)),
            where head_dim includes the width of a concatenated position.
        features: ``"positive"`` (FAVOR+), ``"trigonometric"`` (FAVOR) or ``"relu"``.
        orthogonal: Whether the rows of the projection are orthogonal within blocks;
            otherwise they are independent.
        norms: ``"chi"``, or ``"fixed"``, which is biased: see `draw_orthogonal`.
        sign_corrected: Whether the signs of the QR decomposition are corrected, so that
            the rows are uniform among orthogonal ones. False, as in the code of Horn et
            al., biases the features.
        eps: Added to every feature; None for the default of `positive_features`, 0, or
            of `relu_features`, 1e-3. Trigonometric features take none.
    """

    num_features: int = 0
    features: str = "positive"
    orthogonal: bool = True
    norms: str = "chi"
    sign_corrected: bool = True
    eps: float | None = None
    scannable: ClassVar[bool] = False

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        features, norms, eps = self.features, self.norms, self.eps
        if self.num_features < 0:
            raise ValueError(
                "num_features must be at least 1, or 0 for int(head_dim * "
                f"ln(head_dim)), got {self.num_features}"
            )
        check_choice("features", features, FEATURE_MAPS)
        check_choice("norms", norms, random_projections.NORMS)
        if eps is None:
            return
        if features == "trigonometric":
            raise ValueError(
                "trigonometric features may be negative and take no eps: leave out "
                f"eps={eps}, or use features='positive'"
            )
        if eps < 0 or features == "relu" and eps == 0:
            least = "eps > 0" if features == "relu" else "eps >= 0"
            raise ValueError(f"features={features!r} need {least}, got eps={eps}")

    def feature_map(
        self, head_dim: int, *, group: int = 0
    ) -> Callable[[Array], feature_maps.Features]:
        """Returns the feature map with the layer's projection; for the hooks.

        Args:
            head_dim: Width of the queries and keys.
            group: Index of the projection, where groups of heads have one each.

        Returns:
            The feature map.

        Raises:
            ValueError: If weights would underflow: causal positive features with
                head_dim > 224; or if the variable is not `RandomFeatures`.
        """
        wide = head_dim > _MAX_CAUSAL_HEAD_DIM
        if wide and self.causal and self.features == "positive":
            raise ValueError(
                "causal attention with positive features needs a head_dim (dim / "
                "num_heads, plus the width of a concatenated position) of at most "
                f"{_MAX_CAUSAL_HEAD_DIM}, got {head_dim}"
            )

        def draw() -> random_projections.RandomFeatures:
            return random_projections.draw_random_features(
                self.make_rng("random_features"),
                layer=self.layer + group * _MAX_LAYERS,
                num_features=self.num_features
                or feature_maps.default_num_features(head_dim),
                head_dim=head_dim,
                orthogonal=self.orthogonal,
                norms=self.norms,
                sign_corrected=self.sign_corrected,
            )

        name = f"projection_{group}" if group else "projection"
        drawn = self.variable("random_features", name, draw).value
        if not isinstance(drawn, random_projections.RandomFeatures):
            raise ValueError(
                f"the random features are a {type(drawn).__name__}, expected "
                f"RandomFeatures: {random_projections.RESTORE}"
            )
        options = {} if self.eps is None else {"eps": self.eps}
        return functools.partial(
            FEATURE_MAPS[self.features], projection=drawn.projection, **options
        )

    def attend_content(
        self,
        q: Float[Array, "*batch heads n head_dim"],
        k: Float[Array, "*batch kv_heads m head_dim"],
        v: Float[Array, "*batch kv_heads m value_dim"],
        feature_map: feature_maps.FeatureMap,
        context: Context,
    ) -> Float[Array, "*batch heads n value_dim"]:
        """Computes linear attention; sows the fraction of keys that underflow."""
        positive = self.features == "positive"
        if self.causal and positive and self.is_mutable_collection("intermediates"):
            lost = linear.underflowed(
                linear.key_features(feature_map, jax.lax.stop_gradient(k))
            )
            if context.key_mask is not None:
                lost = lost & context.key_mask
            self.sow("intermediates", "underflowed_keys", lost.mean())
        return super().attend_content(q, k, v, feature_map, context)

    @property
    def signed(self) -> bool:
        """Trigonometric features may be negative."""
        return self.features == "trigonometric"


class FavorAttention(RandomFeatureAttention):
    """Computes linear attention with random features of the softmax kernel (Performer).

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j)

    The projection is the variable ``projection`` in the collection
    ``random_features``; `relattn.kernels.redraw` redraws it. With an offset bias b the
    weights are multiplied by exp(b), as in `relattn.kernels.toeplitz_linear_attention`.

    Causal attention with positive features sows ``underflowed_keys``, the fraction of
    keys that are too long to get any weight (see
    `relattn.kernels.causal_linear_attention`). Training logs it.

    Attributes:
        normalize: Whether queries and keys are normalised before their position is
            applied, so that the weights are exp(cos(q_i, k_j)). Random features
            estimate these more precisely.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = FavorAttention(dim=8, num_heads=2, num_features=5)
        >>> out, variables = module.init_with_output(jax.random.key(0), x)
        >>> out.shape, sorted(variables)
        ((1, 7, 8), ['params', 'random_features'])

    Source:
        Choromanski et al., Rethinking Attention with Performers, section 2; offset
        bias and normalisation: Luo et al., Stable, Fast and Accurate: Kernelized
        Attention with Relative Positional Encoding, section 3.
    """

    normalize: bool = False

    def with_position(
        self, q: Array, k: Array | None, x: Array, context: Context
    ) -> tuple[Array, Array | None]:
        """Applies the position, if any, to normalised queries and keys."""
        if self.normalize:
            q, k = unit_norm(q), None if k is None else unit_norm(k)
        return super().with_position(q, k, x, context)


class BandedAttention(RandomFeatureAttention):
    """Attends by content in some heads, by clipped distance in others (strategy 2).

    Content heads are those of `FavorAttention`. In a position head the weight of key j
    for query i is phi(q_i) . phi(w_d), where d is the Manhattan distance of i and j
    clipped at ``clip``; keys are not projected. The position heads share the table w,
    which starts at zero.

    Attributes:
        clip: Distance from which on all distances are equal, in tokens.
        position_heads: Number of position heads; 0 for half of the heads.
        separate_projections: Whether position heads draw separate random features, as
            in the authors' code, instead of using those of the content heads.
        cls: Where CLS stands for the position heads when it is a query: ``"far"`` from
            all tokens, or at the ``"corner"`` below the bottom left token, as in the
            authors' code. As a key it is far from all tokens.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = BandedAttention(dim=8, num_heads=2, clip=2)
        >>> out, _ = module.init_with_output(
        ...     jax.random.key(0), x, grid=(2, 3), num_prefix=1)
        >>> out.shape
        (1, 7, 8)

    Source:
        Horn et al., Translational Equivariance in Kernelizable Attention, section 2.3
        (strategy 2); the initial w, which all position heads of a layer share: the
        authors' code.
    """

    clip: int = 6
    position_heads: int = 0
    separate_projections: bool = False
    cls: str = "far"
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "values")
    has_causal_form: ClassVar[bool] = False
    has_cross_form: ClassVar[bool] = False
    has_grouped_form: ClassVar[bool] = False

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        if self.clip < 1:
            raise ValueError(f"attention 'banded' needs clip >= 1, got {self.clip}")
        check_choice("cls", self.cls, banded.PLACES, " of attention 'banded'")
        if not self.position_heads and self.num_heads % 2:
            raise ValueError(
                "attention 'banded' needs an even num_heads, half of which are "
                f"position heads, got {self.num_heads}: change it, or pass "
                "position_heads"
            )
        if not 0 <= self.position_heads <= self.num_heads:
            raise ValueError(
                f"attention 'banded' has {self.num_heads} heads, got "
                f"position_heads={self.position_heads}"
            )

    @property
    def key_heads(self) -> int:
        """Number of content heads: position heads have no keys."""
        return self.num_heads - (self.position_heads or self.num_heads // 2)

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch key_heads n head_dim"] | None,
        v: Float[Array, "batch heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Computes linear attention in content heads, banded in position heads."""
        table = self.param(
            "table", nn.initializers.zeros, (self.clip + 1, self.head_dim), jnp.float32
        )
        feature_map = position_map = self.feature_map(self.head_dim)
        if self.separate_projections:
            position_map = self.feature_map(self.head_dim, group=1)
        position = banded.banded_attention(
            q[:, self.key_heads :],
            v[:, self.key_heads :],
            table,
            position_map,
            grid=context.grid_for("attention 'banded' needs distances"),
            num_prefix=context.num_prefix,
            cls=self.cls,
            key_mask=context.key_mask,
        )
        if k is None:
            return position
        content = (q[:, : self.key_heads], k, v[:, : self.key_heads])
        content = self.attend_content(*content, feature_map, context)
        return jnp.concatenate([content, position], axis=1)


class LearnedReluAttention(LinearAttention):
    """Computes linear attention with learned ReLU features.

    out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / phi(q_i)^T sum_j phi(k_j) with
    phi(x) = relu(W x / head_dim^(1/4) + b) + eps. It does not approximate softmax.

    The heads of a layer share W and b, which start like those of a `Linear`.

    Attributes:
        num_features: Number of features; 0 for int(head_dim * ln(head_dim)), where
            head_dim includes the width of a concatenated position.
        eps: Added to every feature; keeps the sum of weights above zero.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = LearnedReluAttention(dim=8, num_heads=2, num_features=5)
        >>> out, variables = module.init_with_output(jax.random.key(0), x)
        >>> out.shape, variables["params"]["projection"].shape
        ((1, 7, 8), (5, 4))

    Source:
        Guoji, Improving efficient Vision Transformers with RPEs, section 4.3; the
        number of features, ``eps`` and the scaling are ours.
    """

    num_features: int = 0
    eps: float = 1e-3
    feature_map_params: ClassVar[tuple[str, ...]] = ("projection", "bias")

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        if self.num_features < 0:
            raise ValueError(
                "attention 'relu' needs num_features >= 1, or 0 for "
                f"int(head_dim * ln(head_dim)), got {self.num_features}"
            )
        if self.eps <= 0:
            raise ValueError(
                "attention 'relu' needs eps > 0, without which the weights of a query "
                f"can all be zero, got {self.eps}"
            )

    def feature_map(self, head_dim: int) -> feature_maps.FeatureMap:
        """Returns the feature map with the layer's parameters; for the hooks."""
        width = self.num_features or feature_maps.default_num_features(head_dim)
        init = uniform(head_dim**-0.5)
        return functools.partial(
            feature_maps.relu_features,
            projection=self.param("projection", init, (width, head_dim), jnp.float32),
            bias=self.param("bias", init, (width,), jnp.float32),
            eps=self.eps,
        )


class HedgehogAttention(LinearAttention):
    """Computes linear attention with learned exponential features (Hedgehog).

    out_i = phi_q(q_i)^T sum_j phi_k(k_j) v_j^T / phi_q(q_i)^T sum_j phi_k(k_j) with
    phi(x) = softmax([W x, -W x]). The weights can be trained to imitate those of
    softmax attention.

    Every head has a W for its queries and one for its keys, which start as the
    identity: the parameters ``query_projection``, of shape ``[num_heads, head_dim,
    head_dim]``, and ``key_projection``, ``[num_kv_heads, head_dim, head_dim]``. With a
    concatenated position, head_dim includes its width.

    Example:
        >>> import jax
        >>> x = jnp.ones((1, 7, 8))
        >>> module = HedgehogAttention(dim=8, num_heads=2)
        >>> out, variables = module.init_with_output(jax.random.key(0), x)
        >>> out.shape, variables["params"]["key_projection"].shape
        ((1, 7, 8), (2, 4, 4))

    Source:
        Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with
        Softmax Mimicry, section 4.2, without bias; see
        `relattn.kernels.hedgehog_features`.
    """

    feature_map_params: ClassVar[tuple[str, ...]] = (
        "query_projection",
        "key_projection",
    )

    def feature_map(self, head_dim: int) -> feature_maps.FeatureMap:
        """Returns the feature maps of queries and keys; for the hooks."""

        def make(name: str, heads: int) -> Callable[[Array], feature_maps.Features]:
            shape = (heads, head_dim, head_dim)
            projection = self.param(name, _identity, shape, jnp.float32)
            if self.num_kv_heads < self.num_heads:
                projection = split_heads(projection, 0, self.num_kv_heads)
            return functools.partial(
                feature_maps.hedgehog_features, projection=projection
            )

        heads = (self.num_heads, self.num_kv_heads)
        to_q, to_k = map(make, self.feature_map_params, heads)
        return to_q, to_k


def _identity(key, shape, dtype):
    del key
    return jnp.broadcast_to(jnp.eye(*shape[-2:], dtype=dtype), shape)
