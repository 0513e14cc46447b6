"""Naive float64 references of every kernel, written for readability.

Each function takes and returns arrays without batch axes and computes all n x m
weights. Run them under ``jax.enable_x64(True)``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from relattn.offsets import Torus


def shortest(offset, grid):
    """Returns the shortest offset on a torus; on a plain grid the offset itself."""
    if not isinstance(grid, Torus):
        return np.array(offset)
    wrapped = [
        min((d % size, d % size - size), key=lambda d: (abs(d), -d))
        for d, size in zip(offset, grid, strict=True)
    ]
    return np.array(wrapped)


def sinusoids(positions, frequencies):
    """Returns [sin w p, cos w p] for every axis of a position, then every frequency."""
    rows = []
    for position in positions:
        row = []
        for coordinate in position:
            for frequency in frequencies:
                angle = frequency * coordinate
                row += [jnp.sin(angle), jnp.cos(angle)]
        rows.append(jnp.stack(row))
    return jnp.stack(rows)


def constrained_scores(query_positions, key_positions, frequencies, coefficients):
    """Returns the scores of lemma 1: sum a cos w (p_i - p_j) + b sin w (p_i - p_j).

    ``coefficients`` holds (a, b) for every axis, then every frequency.
    """
    rows = []
    for query in query_positions:
        row = []
        for key in key_positions:
            pairs = iter(coefficients)
            score = 0.0
            for axis in range(len(query)):
                for frequency in frequencies:
                    a, b = next(pairs)
                    angle = frequency * (query[axis] - key[axis])
                    score += a * jnp.cos(angle) + b * jnp.sin(angle)
            row.append(score)
        rows.append(jnp.stack(row))
    return jnp.stack(rows)


def softmax_attention(q, k, v, allowed, bias=0.0):
    """Computes softmax attention over the keys in ``allowed``, ``[n, m]``."""
    weights = jnp.exp(q @ k.T / q.shape[1] ** 0.5 + bias)
    return _weighted_mean(jnp.where(allowed, weights, 0.0), v)


def positive_features(x, projection, eps=0.0):
    """Returns (exp(w x~ - |x~|^2 / 2) + eps) / sqrt(features) of one vector."""
    x = x / len(x) ** 0.25
    return (jnp.exp(projection @ x - x @ x / 2) + eps) / len(projection) ** 0.5


def trigonometric_features(x, projection):
    """Returns exp(|x~|^2 / 2) [cos w x~, sin w x~] / sqrt(features) of one vector."""
    x = x / len(x) ** 0.25
    waves = jnp.concatenate([jnp.cos(projection @ x), jnp.sin(projection @ x)])
    return jnp.exp(x @ x / 2) * waves / len(projection) ** 0.5


def relu_features(x, projection, bias=0.0, eps=1e-3):
    """Returns max(w x~ + b, 0) + eps of one vector; the derivative at zero is 0."""
    projected = projection @ (x / len(x) ** 0.25) + bias
    return jnp.where(projected > 0, projected, 0) + eps


def hedgehog_features(x, projection):
    """Returns softmax([w x, -w x]) of one vector."""
    exponentials = jnp.exp(jnp.concatenate([projection @ x, -projection @ x]))
    return exponentials / exponentials.sum()


def linear_attention(q, k, v, feature_map, allowed, bias=0.0):
    """Computes attention with weights phi(q_i) . phi(k_j) exp(b_ij).

    ``feature_map`` may be a pair, of queries and of keys.
    """
    is_pair = isinstance(feature_map, tuple)
    maps = feature_map if is_pair else (feature_map, feature_map)
    phi_q, phi_k = (jax.vmap(phi)(x) for phi, x in zip(maps, (q, k), strict=True))
    weights = phi_q @ phi_k.T * jnp.exp(bias)
    return _weighted_mean(jnp.where(allowed, weights, 0.0), v)


def _weighted_mean(weights, v):
    """Returns the weighted mean of the values, zeros without weights."""
    total = weights.sum(axis=1, keepdims=True)
    return weights @ v / jnp.where(total == 0, 1.0, total)


def banded_attention(
    q, v, table, log_phi, grid, num_prefix=0, key_mask=None, cls="far"
):
    """Computes attention with weights phi(q_i) . phi(w_distance); positive features.

    ``log_phi`` maps [n, head_dim] to the logarithms of features, [n, features].
    """
    n, clip = len(q), len(table) - 1
    distances = np.full((n, n), clip)
    prefix = [(grid[0], 0)] * num_prefix if cls == "corner" else [None] * num_prefix
    for i, start in enumerate([*prefix, *np.ndindex(*grid)]):
        for j, end in enumerate(np.ndindex(*grid), num_prefix):
            if start is not None:
                offset = shortest(np.subtract(start, end), grid)
                distances[i, j] = min(np.abs(offset).sum(), clip)
    products = log_phi(q)[:, None] + log_phi(table)[distances]
    scores = jax.nn.logsumexp(products, axis=-1)
    if key_mask is not None:
        scores = jnp.where(key_mask, scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v


def offset_rows(grid, num_prefix=0, causal=False):
    """Returns rows of the tables of queries, keys and values for every (query, key).

    Offsets are row-major, the most negative first (modulo the sizes on a torus), then
    "in", "self" and "out". The row belongs to the token that is projected.
    """
    positions = [None] * num_prefix + list(np.ndindex(*grid))
    periodic = isinstance(grid, Torus)
    sizes = [size if periodic else 2 * size - 1 for size in grid]
    first = int(np.prod(sizes))

    def row(token, partner):
        if token is None:
            return first + (1 if partner is None else 2)
        if partner is None:
            return first
        if causal:
            return abs(token[0] - partner[0])
        result = 0
        for a, b, size in zip(token, partner, grid, strict=True):
            if periodic:
                result = result * size + (a - b) % size
            else:
                result = result * (2 * size - 1) + a - b + size - 1
        return result

    def value_row(query, key):
        return row(key, query) if None in (query, key) else row(query, key)

    return [
        np.array([[row_of(i, j) for j in positions] for i in positions])
        for row_of in (row, lambda i, j: row(j, i), value_row)
    ]


def clip_rows(rows, grid, clip, causal=False):
    """Maps rows of `offset_rows` to those of a table in which far offsets share one."""
    if causal:
        return [np.minimum(of_pairs, clip + 1) for of_pairs in rows]
    periodic, side = isinstance(grid, Torus), [2 * clip + 1] * len(grid)
    far = int(np.prod(side))
    clipped = []
    for index in np.ndindex(*[n if periodic else 2 * n - 1 for n in grid]):
        d = shortest(index if periodic else np.subtract(index, grid) + 1, grid)
        near = np.abs(d).max() <= clip
        clipped.append(np.ravel_multi_index(tuple(d + clip), side) if near else far)
    clipped = np.array([*clipped, far + 1, far + 2, far + 3])
    return [clipped[of_pairs] for of_pairs in rows]


def translution(x, w_q, w_k, w_v, rows, allowed):
    """Computes [heads n head_dim]; ``rows`` as in `offset_rows`, None for pairs."""
    n, head_dim = len(x), w_q.shape[-1]
    queries, keys = jnp.repeat(x[:, None], n, 1), jnp.repeat(x[None], n, 0)
    q = _project_pairs(queries, w_q, rows[0])
    k = _project_pairs(keys, w_k, rows[1])
    v = _project_pairs(keys, w_v, rows[2])
    return _sum_pairs(jnp.sum(q * k, axis=-1) / head_dim**0.5, v, allowed)


def lor_translution(q, k, v, low, tables, rows, allowed, scale, average=False):
    """Computes plain and low-rank outputs; arrays of a missing part are None."""
    n = len(allowed)
    queries, keys, values = (
        None if x is None else jnp.repeat(jnp.expand_dims(x, axis), n, axis)
        for x, axis in zip(low, (1, 0, 0), strict=True)
    )
    scores, both, out, low_out = 0.0, average and q is not None, None, None
    if q is not None:
        scores = jnp.einsum("hid,hjd->ijh", q, k)
    if queries is not None:
        low_q = _project_pairs(queries, tables[0], rows[0])
        low_k = _project_pairs(keys, tables[1], rows[1])
        scores = scores + jnp.sum(low_q * low_k, axis=-1)
        scores = scores / 2 if both else scores
    if values is not None:
        low_v = _project_pairs(values, tables[2], rows[2])
        low_out = _sum_pairs(scores * scale, low_v, allowed) / (2 if both else 1)
    if v is not None:
        plain_v = jnp.repeat(jnp.moveaxis(v, 0, 1)[None], n, 0)
        out = _sum_pairs(scores * scale, plain_v, allowed)
        out = out / (2 if both and values is not None else 1)
    return out, low_out


def _project_pairs(tokens, w, rows):
    """Projects tokens [n n width] to [n n heads head_dim]."""
    w = (
        w[rows]
        if w.ndim == 4
        else jnp.broadcast_to(w, (*tokens.shape[:2], *w.shape[-3:]))
    )
    return jnp.einsum("ijc,ijche->ijhe", tokens, w)


def _sum_pairs(scores, v, allowed):
    weights = jnp.where(allowed[..., None], jnp.exp(scores), 0.0)
    total = weights.sum(axis=1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("ijh,ijhe->hie", weights, v)


def gather_rows(table, rows):
    """Gathers a table's row of every pair; missing rows are zero."""
    if table is None:
        return 0.0
    missing = max(rows.max() + 1 - len(table), 0)
    return jnp.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))[rows]


def relative_attention(
    q, k, v, key_table=None, value_table=None, bias=None, *, allowed, rows
):
    """Computes relative attention; ``rows`` [n, n] index the tables."""
    pair_keys = k[None] + gather_rows(key_table, rows)
    scores = jnp.einsum(
        "id,ijd->ij", q, jnp.broadcast_to(pair_keys, (len(q), *k.shape))
    )
    weights = jnp.exp(scores / q.shape[1] ** 0.5 + gather_rows(bias, rows))
    weights = jnp.where(allowed, weights, 0.0)
    total = weights.sum(axis=1, keepdims=True)
    pair_values = v + gather_rows(value_table, rows)
    pair_values = jnp.broadcast_to(pair_values, (len(q), *v.shape))
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("ij,ijd->id", weights, pair_values)


def wave_matrices(positions, frequencies, kernel, num_prefix=0):
    """Returns sum_r cos(w_r . d) A_r + sin(w_r . d) B_r of pairs, [n, n, dim, width].

    ``kernel`` is [dim, waves, 2, width]; pairs with a prefix token have zeros.
    """
    angles = (positions[:, None] - positions[None]) @ frequencies.T
    has_offset = np.arange(len(positions)) >= num_prefix
    has_offset = (has_offset[:, None] & has_offset[None])[..., None]
    waves = [jnp.where(has_offset, f(angles), 0.0) for f in (jnp.cos, jnp.sin)]
    return jnp.einsum("tijr,crtd->ijcd", jnp.stack(waves), kernel)


def fourier_values(weights, x, v, matrices):
    """Returns sum_j alpha_ij (v_j + x_j W_ij) for weights [n, n]."""
    return weights @ v + jnp.einsum("ij,jc,ijcd->id", weights, x, matrices)


def fourier_scores(x, q, k, matrices):
    """Returns (q_i + x_i W_ij) . k_j / sqrt(head_dim), [n, n]."""
    scores = q @ k.T + jnp.einsum("ic,ijcd,jd->ij", x, matrices, k)
    return scores / q.shape[1] ** 0.5


def rotary_values(weights, v, positions, base, num_prefix=0):
    """Returns sum_j alpha_ij R(p_j - p_i) v_j; pairs with a prefix token have R = 1."""
    rows = []
    for i, position in enumerate(positions):
        moved = rotary(v, positions - position, base)
        alone = (np.arange(len(v)) < num_prefix) | (i < num_prefix)
        rows.append(weights[i] @ jnp.where(alone[:, None], v, moved))
    return jnp.stack(rows)


def gated_positional_attention(q, k, v, gate, coefficients, allowed, grid, num_prefix):
    """Computes (1 - g) softmax attention + g attention with scores w . (|d|^2, d)."""
    positions = [None] * num_prefix + [np.array(p) for p in np.ndindex(*grid)]
    prefix_kinds = np.zeros((3 if num_prefix else 0, 1 + len(grid)))

    def features(i, j):
        if i is not None and j is not None:
            d = shortest(i - j, grid)
            return [d @ d, *d, *prefix_kinds[:, 0]]
        kind = 0 if i is not None else (1 if j is None else 2)
        return [*prefix_kinds[0], *np.eye(3)[kind]]

    pairs = np.array([[features(i, j) for j in positions] for i in positions])
    scores = pairs @ coefficients
    by_position = _weighted_mean(jnp.where(allowed, jnp.exp(scores), 0.0), v)
    g = 1 / (1 + jnp.exp(-gate))
    return (1 - g) * softmax_attention(q, k, v, allowed) + g * by_position


def linformer_attention(q, k, v, key_projection, value_projection, exists):
    """Computes attention to weighted sums of the keys that exist."""
    keys = jnp.where(exists, key_projection, 0.0) @ k
    values = jnp.where(exists, value_projection, 0.0) @ v
    return softmax_attention(q, keys, values, np.ones((len(q), len(keys)), bool))


def routing_attention(q, k, v, centroids, window, exists):
    """Computes routing attention: a cluster has the ``window`` closest tokens."""
    q, k = _layer_norm(q), _layer_norm(k)
    n = len(q)
    first = np.tril(np.ones((n, n), bool), -1)

    def members(x, centroid):
        scores = x @ centroid
        ties = (scores[None] == scores[:, None]) & first
        closer = exists & ((scores[None] > scores[:, None]) | ties)
        return exists & (closer.sum(axis=1) < window)

    total, count = 0.0, 0
    for centroid in centroids:
        queries, keys = members(q, centroid), members(k, centroid)
        total += softmax_attention(q, k, v, queries[:, None] & keys)
        count += queries
    return total / jnp.maximum(count, 1)[:, None]


def _layer_norm(x):
    mean, variance = x.mean(axis=1)[:, None], x.var(axis=1)[:, None]
    return (x - mean) / jnp.sqrt(variance + 1e-5)


def layer_norm(x, params):
    return _layer_norm(x) * params["scale"] + params["bias"]


def rms_norm(x, scale, eps=1e-5):
    return x / jnp.sqrt((x**2).mean(axis=1)[:, None] + eps) * scale


def linear(x, params):
    return x @ params["kernel"] + params.get("bias", 0.0)


def gelu(x):
    """Returns x times the probability that a standard normal number is less than x."""
    return x * (1 + jax.scipy.special.erf(x / 2**0.5)) / 2


def swiglu(x, params):
    """Computes W_out (z / (1 + exp(-z)) * W_hidden x) with z = W_gate x."""
    gate = linear(x, params["gate"])
    hidden = gate / (1 + jnp.exp(-gate)) * linear(x, params["hidden"])
    return linear(hidden, params["out"])


def transformer_block(x, params, num_heads, allowed):
    """Computes x + attention(norm(x)), then x + feed_forward(norm(x)), with softmax."""
    attention, feed_forward = params["attention"], params["feed_forward"]
    y = layer_norm(x, params["attention_norm"])
    q, k, v = (
        jnp.split(linear(y, attention[name]), num_heads, axis=1) for name in "qkv"
    )
    outputs = [softmax_attention(*qkv, allowed) for qkv in zip(q, k, v, strict=True)]
    x = x + linear(jnp.concatenate(outputs, axis=1), attention["out"])
    y = layer_norm(x, params["feed_forward_norm"])
    return x + linear(gelu(linear(y, feed_forward["hidden"])), feed_forward["out"])


def rotary(x, positions, base, factor=1.0, original_length=0):
    """Rotates the complex numbers x_t + i x_(t + head_dim / 2), a share per axis."""

    def frequency(t, share):
        w = base ** (-t / share)
        turns = original_length * w / (2 * np.pi)
        if turns <= 1:
            return w / factor
        return w if turns >= 4 else w / factor + (turns - 1) / 3 * (w - w / factor)

    half, axes = x.shape[1] // 2, len(positions[0])
    # The last axes have one more if the shares are not equal.
    shares = [half // axes + (axis >= axes - half % axes) for axis in range(axes)]
    angles = [
        [
            p * frequency(t, share)
            for p, share in zip(position, shares, strict=True)
            for t in range(share)
        ]
        for position in positions
    ]
    rotated = (x[:, :half] + 1j * x[:, half:]) * jnp.exp(1j * jnp.array(angles))
    return jnp.concatenate([rotated.real, rotated.imag], axis=1)


def mixed_rotary(x, positions, frequencies):
    """Rotates pair t, the complex number x_t + i x_(t + head_dim / 2), by w_t . p."""
    half = x.shape[1] // 2
    angles = jnp.stack([frequencies @ position for position in positions])
    rotated = (x[:, :half] + 1j * x[:, half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([rotated.real, rotated.imag], axis=1)


def string(x, positions, generators):
    """Returns exp(sum_axis p_axis L_axis) x, L of [axes, head_dim, head_dim]."""
    generators = jnp.stack(generators)

    def rotate(token, position):
        return _exponential(jnp.tensordot(position, generators, 1)) @ token

    return jax.vmap(rotate)(x, jnp.asarray(positions))


def _exponential(matrix):
    """Sums the Taylor series of exp(matrix / 2^6), then squares it six times."""
    total = term = jnp.eye(len(matrix))
    for k in range(1, 15):
        term = term @ matrix / (2**6 * k)
        total = total + term
    for _ in range(6):
        total = total @ total
    return total


def cayley_generators(entries, frequencies):
    """Returns P J P^T of each axis; J rotates pair (t, t + head_dim / 2) by w_t."""
    half, axes = frequencies.shape
    skew = jnp.zeros((2 * half, 2 * half))
    indices = [(i, j) for i in range(2 * half) for j in range(i)]
    for (i, j), entry in zip(indices, entries, strict=True):
        skew = skew.at[i, j].set(entry).at[j, i].set(-entry)
    identity = jnp.eye(2 * half)
    basis = (identity - skew) @ jnp.linalg.inv(identity + skew)
    generators = []
    for axis in range(axes):
        rotation = jnp.zeros((2 * half, 2 * half))
        for t in range(half):
            w = frequencies[t, axis]
            rotation = rotation.at[t + half, t].set(w).at[t, t + half].set(-w)
        generators.append(basis @ rotation @ basis.T)
    return generators


def circulant_generators(circulants):
    """Returns C - C^T of every axis; c is the first column of C."""
    head_dim = circulants.shape[1]
    indices = [[(i - j) % head_dim for j in range(head_dim)] for i in range(head_dim)]
    matrices = [c[np.array(indices)] for c in circulants]
    return [matrix - matrix.T for matrix in matrices]


def irpe_gate(x, rows, columns, grid, num_prefix):
    """Multiplies a token by exp(its row's embedding + its column's), elementwise."""
    scales = [jnp.exp(rows[i] + columns[j]) for i, j in np.ndindex(*grid)]
    return jnp.concatenate([x[:num_prefix], x[num_prefix:] * jnp.stack(scales)])


def string_gate(x, frequencies, phases, coefficients, grid, num_prefix):
    """Multiplies a token by exp([cos(w . p + b), sin(w . p + b)] A), elementwise."""
    scales = []
    for position in np.ndindex(*grid):
        angles = frequencies @ jnp.array(position, float) + phases
        waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)])
        scales.append(jnp.exp(waves @ coefficients))
    return jnp.concatenate([x[:num_prefix], x[num_prefix:] * jnp.stack(scales)])


def resize(table, new):
    """Resizes with Keys' cubic kernel (a = -1/2), widened for a smaller grid.

    ``table`` is ``[*old, *rest]``; positions are half-integers.
    """

    def cubic(t):
        t = abs(t)
        if t < 1:
            return 1.5 * t**3 - 2.5 * t**2 + 1
        return -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2 if t < 2 else 0.0

    for axis, size in enumerate(new):
        old = table.shape[axis]
        stretch = max(old / size, 1.0)
        weights = np.zeros((size, old))
        for i, j in np.ndindex(size, old):
            weights[i, j] = cubic(((i + 0.5) * old / size - 0.5 - j) / stretch)
        weights /= weights.sum(axis=1, keepdims=True)
        table = np.moveaxis(np.tensordot(weights, table, (1, axis)), 0, axis)
    return table
