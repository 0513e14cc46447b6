"""Multiply-adds by formula."""

import flax.linen as nn
import jax.numpy as jnp

from relattn.evaluation.counts import count_parameters, multiply_adds
from relattn.evaluation.sizes_translution import agrees

SIZES = {"num_tokens": 7, "dim": 6, "num_layers": 3, "heads": 2, "mlp_dim": 11}
REST = 7 * (6 * 6 + 2 * 6 * 11)


def test_the_formula_by_hand():
    def per_layer(attention, **options):
        cost = multiply_adds(attention, **(SIZES | options))
        assert cost % 3 == 0
        return cost // 3 - REST

    pairs, causal = 49, 28
    assert per_layer("softmax") == 3 * 7 * 36 + 2 * pairs * 6
    assert per_layer("softmax", causal=True) == 3 * 7 * 36 + 2 * causal * 6
    assert per_layer("translution") == pairs * (3 * 36 + 2 * 6)
    assert per_layer("translution", causal=True) == causal * (3 * 36 + 2 * 6)
    assert per_layer("translution(absolute=True)") == per_layer("translution")
    relative = per_layer("translution(relative='qk')")
    assert relative == 2 * pairs * 36 + 7 * 36 + 2 * pairs * 6
    low = 3 * 7 * 6 * 8 + pairs * (3 * 64 + 2 * 8) + 7 * 8 * 6
    assert per_layer("lor_translution(rank=4, base=False)") == low
    assert per_layer("lor_translution(rank=4)") == per_layer("softmax") + low
    score = 2 * 7 * 6 * 8 + pairs * (64 + 8)
    value = 7 * 6 * 8 + pairs * (64 + 8) + 7 * 8 * 6
    for relative, expected in (("k", score), ("v", value), ("qv", score + value)):
        subset = per_layer(f"lor_translution(rank=4, relative='{relative}')")
        assert subset == per_layer("softmax") + expected


def test_nothing_is_allocated_to_count():
    class Huge(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            assert tokens.shape == (1, 5)
            table = self.param("table", nn.initializers.zeros, (10**6, 10**7))
            return jnp.take(table, tokens, axis=0)

    assert count_parameters(Huge(), num_tokens=5) == 10**13


def test_printed_digits_are_rounded_or_cut_off():
    assert agrees(4_685_032, "4.69M") and agrees(4_685_032, "4.68M")
    assert not agrees(4_685_032, "4.70M") and not agrees(4_685_032, "4.67M")
    assert agrees(116_164_138, "116.2M") and not agrees(59_940_096, "60.0M")
