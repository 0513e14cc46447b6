"""Specs of attentions for small models, and lists that follow from the registry."""

from relattn.nn.registry import ATTENTIONS, POSITIONS

# Attentions whose defaults do not fit a few tokens, or would take long.
_SMALL = {
    "favor": "favor(num_features=5)",
    "relu": "relu(num_features=5)",
    "banded": "banded(clip=2, num_features=5)",
    "linformer": "linformer(k=5)",
    "routing": "routing(clusters=2)",
    "lor_translution": "lor_translution(rank=2)",
}
CAUSAL = [name for name, entry in ATTENTIONS.items() if entry.has_causal_form]
# Positions that need a grid of height and width.
ON_PLANES = [name for name, entry in POSITIONS.items() if entry.needs_plane]


def small(attention):
    """Returns the spec of an attention for a small model."""
    return _SMALL.get(attention, attention)


def with_others(pairs, attentions=ATTENTIONS, positions=()):
    """Adds a pair for each attention and position that no pair names.

    Args:
        pairs: Specs of attentions and positions.
        attentions: Names of attentions; by default all.
        positions: Names of positions, which are added with softmax.

    Returns:
        The pairs, the new ones at the end.
    """
    named = {_name(attention) for attention, _ in pairs}
    pairs = [*pairs, *((small(a), "none") for a in attentions if a not in named)]
    named = {_name(term) for _, position in pairs for term in position.split("+")}
    return [*pairs, *(("softmax", p) for p in positions if p not in named)]


def _name(spec):
    return spec.partition("(")[0].strip()
