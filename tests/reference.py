"""Naive float64 references of every kernel, written to be read.

Each function takes and returns arrays without leading axes, spells its equation out
pair by pair, and is never compiled. Run them under ``jax.enable_x64(True)``.
"""

import jax.numpy as jnp


def sinusoids(positions, frequencies):
    """[sin w p, cos w p] for every axis of a position, then every frequency."""
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
    """Lemma 1: sum of a cos w (p_i - p_j) + b sin w (p_i - p_j); [n, m] scores.

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
