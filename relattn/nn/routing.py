"""The Routing Transformer's attention: within clusters, and local."""

from __future__ import annotations

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from relattn.kernels import routing
from relattn.nn.attention import Context, MultiHeadAttention
from relattn.nn.device_axis import mean_over_devices


class RoutingAttention(MultiHeadAttention):
    """Attends within clusters of tokens in routed heads, to neighbours in local heads.

    The heads are `relattn.kernels.routing_attention` and
    `relattn.kernels.local_attention`, with the same window: a routed query attends to
    the ``window`` tokens of its cluster, a local query to as many tokens around it and
    to the prefix tokens.

    The centroids are not parameters: they are the variable ``centroids`` in the
    collection ``batch_stats``. They start as random unit vectors. When the collection
    is mutable, they move to the means of the nearest queries and keys, over the batches
    of all devices.

    Attributes:
        clusters: Number of clusters of a routed head.
        window: Number of tokens of a cluster; 0 for ceil(n / clusters), where n
            includes the prefix tokens. A token may be in several clusters, or in none.
        local_heads: Number of local heads; None for half of the heads.
        decay: Weight of a centroid's past in its moving average.

    Example:
        >>> x = jnp.ones((1, 7, 8))
        >>> module = RoutingAttention(dim=8, num_heads=2, clusters=3)
        >>> out, variables = module.init_with_output(jax.random.key(0), x)
        >>> out.shape, variables["batch_stats"]["centroids"].shape
        ((1, 7, 8), (1, 3, 4))

    Source:
        Roy et al., Efficient Content-Based Sparse Attention with Routing Transformers,
        section 4.
    """

    clusters: int = 8
    window: int = 0
    local_heads: int | None = None
    decay: float = 0.999
    sites: ClassVar[tuple[str, ...]] = ("none", "tokens", "values")
    # The tokens of a cluster depend on all tokens, including later ones.
    has_causal_form: ClassVar[bool] = False
    scannable: ClassVar[bool] = True

    @property
    def num_local_heads(self) -> int:
        """Number of local heads."""
        return self.num_heads // 2 if self.local_heads is None else self.local_heads

    @property
    def needs_order(self) -> bool:
        """Whether heads are local, or the window grows with the number of tokens."""
        return self.num_local_heads > 0 or self.window == 0

    @nn.nowrap
    def check(self) -> None:
        """Raises ValueError if the attributes are invalid."""
        super().check()
        if self.clusters < 1:
            raise ValueError(
                f"attention 'routing' needs clusters >= 1, got {self.clusters}"
            )
        if self.window < 0:
            raise ValueError(
                "attention 'routing' needs window >= 1, or 0 for n / clusters, got "
                f"{self.window}"
            )
        if self.local_heads is not None and not 0 <= self.local_heads <= self.num_heads:
            raise ValueError(
                f"attention 'routing' has {self.num_heads} heads, got local_heads="
                f"{self.local_heads}"
            )
        if not 0 <= self.decay <= 1:
            raise ValueError(
                f"attention 'routing' needs decay from 0 to 1, got {self.decay}"
            )

    def attend(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch heads n head_dim"],
        v: Float[Array, "batch heads n value_dim"],
        context: Context,
    ) -> Float[Array, "batch heads n value_dim"]:
        """Computes local attention in the first heads, routed in the rest."""
        window = self.window or -(-q.shape[-2] // self.clusters)
        first = self.num_local_heads
        outs = []
        if first:
            outs.append(
                routing.local_attention(
                    *(x[:, :first] for x in (q, k, v)),
                    window=window,
                    num_prefix=context.num_prefix,
                    key_mask=context.key_mask,
                )
            )
        if first < self.num_heads:
            q, k, v = (x[:, first:] for x in (q, k, v))
            centroids = self.centroids(q, k, context.key_mask)
            outs.append(
                routing.routing_attention(
                    q, k, v, centroids, window=window, key_mask=context.key_mask
                )
            )
        return jnp.concatenate(outs, axis=1)

    def centroids(
        self,
        q: Float[Array, "batch heads n head_dim"],
        k: Float[Array, "batch heads n head_dim"],
        key_mask: Bool[Array, "batch 1 n"] | None,
    ) -> Float[Array, "heads clusters head_dim"]:
        """Returns the centroids for this batch; in training, updates the variable.

        The centroids have no gradient.
        """

        def init() -> Array:
            shape = (q.shape[1], self.clusters, self.head_dim)
            return routing.unit_vectors(
                jax.random.normal(self.make_rng("params"), shape, jnp.float32)
            )

        variable = self.variable("batch_stats", "centroids", init)
        centroids = variable.value
        if self.is_mutable_collection("batch_stats") and not self.is_initializing():
            both = [
                routing.cluster_sums(x, centroids, key_mask=key_mask) for x in (q, k)
            ]
            sums, counts = (
                mean_over_devices((from_q + from_k).sum(axis=0))
                for from_q, from_k in zip(*both, strict=True)
            )
            variable.value = routing.update_centroids(
                centroids, sums, counts, decay=self.decay
            )
        return centroids
