"""Parameter counts against published and hand-computed ones."""

import collections
import csv
import json
import pathlib
import re

import flax.linen as nn
import jax.numpy as jnp
import pytest

from studies import published, sizes
from studies.sizes import agrees, count_parameters, multiply_adds

PUBLISHED = pathlib.Path(__file__).parents[3] / "shared" / "published"
CLS = 256
GOLDEN = {
    ("favor", "32x32x1"): 4741642,
    ("favor", "32x32x3"): 4742154,
    ("favor + learnable_sincos", "32x32x1"): 4741706,
    ("favor + learnable_sincos", "32x32x3"): 4742218,
    ("favor + constrained_sincos(num_scales=4)", "32x32x1"): 4742414,
    ("favor + constrained_sincos(num_scales=4)", "32x32x3"): 4742926,
    ("favor + constrained_sincos(num_scales=16)", "32x32x1"): 4744730,
    ("banded(clip=2)", "32x32x1"): 4544842,
    ("banded(clip=4)", "32x32x1"): 4545226,
    ("banded(clip=6)", "32x32x1"): 4545610,
    ("banded(clip=4)", "32x32x3"): 4545738,
}


# Linformer by hand: 12 layers of four products of 256 x 256, two projections of 2 x 64,
# an MLP of width 1,024 and two norms; plus the patch embedding, CLS, a position, a norm
# and the head.
LAYER = 4 * 256**2 + 256 + 2 * 2 * 64 + 2 * 256 * 1024 + 1024 + 256 + 4 * 256
REST = 256 + 256 + 256 + 2 * 256 + 257 * 10
PUBLISHED_BASELINES = {
    ("alexnet", "32x32x1"): 2_456_778,
    ("alexnet", "32x32x3"): 2_472_266,
    ("vgg16", "32x32x1"): 134_300_362,
    ("vgg16", "32x32x3"): 134_301_514,
    ("resnet18", "32x32x1"): 11_175_370,
    ("resnet18", "32x32x3"): 11_181_642,
    ("linformer", "32x32x1"): 12 * LAYER + 32 * 32 * 256 + REST,
    ("linformer", "32x32x3"): 12 * LAYER + 32 * 32 * 3 * 256 + REST,
}
assert PUBLISHED_BASELINES["linformer", "32x32x3"] == 10_261_258

SLIPS = {
    ("B/32", "translution"): "223.1M",
    ("C/16", "lor_translution"): "85.4M",
    ("A/56", "lor_translution rank=4"): "4.89M",
    ("GPT-C-160", "self_attention"): "60.0M",
}


@pytest.fixture(scope="module")
def rows():
    return list(sizes._performer_counts())


@pytest.fixture(scope="module")
def baselines():
    return list(sizes._baseline_counts())


@pytest.fixture(scope="module")
def translution_rows():
    return list(sizes.translution_counts())


@pytest.fixture
def all_rows(rows, baselines, translution_rows, monkeypatch):
    """The rows that the command prints, counted once for all tests."""
    monkeypatch.setattr(sizes, "_performer_counts", lambda: rows)
    monkeypatch.setattr(sizes, "_baseline_counts", lambda: baselines)
    monkeypatch.setattr(sizes, "translution_counts", lambda: translution_rows)
    return sizes.parameter_counts()


@pytest.mark.slow
def test_performer_counts_are_published_plus_cls_token(rows):
    counts = {(row.method, row.image): row.params for row in rows}
    assert counts == {key: count + CLS for key, count in GOLDEN.items()}
    assert all(row.params == row.published + CLS for row in rows)


@pytest.mark.slow
def test_baseline_counts_match_the_printed_digits(baselines):
    models = {row.model for row in baselines}
    assert models == {"alexnet", "vgg16", "resnet18", "linformer", "routing"}
    published = {
        (row.model, row.image): row.params
        for row in baselines
        if row.size == "published"
    }
    assert published == PUBLISHED_BASELINES
    for row in baselines:
        gray = (row.model, row.size, row.image) == ("linformer", "published", "32x32x1")
        assert agrees(row.params, row.printed) != gray, (row.model, row.image)
    images = collections.Counter(row.image for row in baselines)
    assert images["32x32x1"] == images["32x32x3"] == len(baselines) / 2


def count_by_hand(row):
    """Counts a row's parameters from the shapes of the arrays."""
    letter, number = re.fullmatch(r"(?:GPT-)?([ABC])[/-](\d+)", row.size).groups()
    layers, dim, num_heads, number = {
        "A": (6, 192, 3, int(number)),
        "B": (12, 192, 3, int(number)),
        "C": (12, 384, 6, int(number)),
    }[letter]
    method, *options = row.method.split(" ")
    if row.model == "gpt":
        # Embedding, head, two norms.
        total = 2 * 50257 * dim + 4 * dim
        tokens = table = number
    else:
        side, channels = (84, 1) if row.image == "84x84x1" else (224, 3)
        patch, grid = number**2 * channels, side // number
        # Norm, linear, norm of a patch; CLS; last norm; head.
        total = 2 * patch + patch * dim + dim + 2 * dim + dim + 2 * dim
        total += (dim + 1) * (10 if channels == 1 else 1000)
        tokens, table = grid**2, (2 * grid - 1) ** 2 + 3
        if "absolute" in options:
            table = (tokens + 1) ** 2
    if "position=learned" in options or method in (
        "self_attention",
        "relative_key",
        "relative_value",
    ):
        total += tokens * dim
    # Two norms, output projection, feed-forward network of width 4 dim.
    layer = 4 * dim + dim**2 + dim + 8 * dim**2 + 5 * dim
    if method == "translution":
        layer += 3 * table * dim**2
    elif "base=False" not in options:
        layer += 3 * dim**2
    if method == "lor_translution":
        ranks = [word for word in options if word.startswith("rank")]
        inner = num_heads * int(ranks[0][5:] if ranks else 8)
        layer += 4 * dim * inner + 3 * table * inner**2
    offsets = 2 * tokens - 1 if row.model == "gpt" else table - 3
    if method in ("relative_key", "relative_value"):
        layer += offsets * dim
    elif method == "relative_bias":
        layer += num_heads * (offsets + 3 * (row.model == "vit"))
    elif method == "gated_positional":
        layer += num_heads * (1 + (2 if row.model == "gpt" else 6))
    return total + layers * layer


@pytest.mark.slow
def test_all_rows_of_the_tables_are_present(translution_rows):
    tables = collections.Counter(row.table for row in translution_rows)
    expected = {"2": 6, "3": 27, "4": 9, "5": 4, "6, 11": 6, "11": 5}
    assert tables == expected | {"7": 15, "8": 9, "10": 4}
    methods = {row.method for row in translution_rows}
    assert {"translution absolute", "lor_translution rank=2 base=False"} <= methods


@pytest.mark.slow
def test_counts_equal_those_by_hand(translution_rows):
    for row in translution_rows:
        assert row.params == count_by_hand(row), (row.size, row.method)


@pytest.mark.slow
def test_translution_counts_match_the_printed_digits(translution_rows):
    slips = {}
    for row in translution_rows:
        if row.published is not None and not agrees(row.params, row.printed):
            slips[row.size, row.method] = row.printed
            assert "authors' code" in row.note
    assert slips == SLIPS
    counts = {(row.size, row.method): row.params for row in translution_rows}
    assert counts["B/32", "translution"] == 233_056_360
    assert counts["C/16", "lor_translution"] == 83_563_240
    assert counts["A/56", "lor_translution rank=4"] == 4_875_112
    assert counts["GPT-C-160", "self_attention"] == 59_940_096


@pytest.mark.slow
def test_relative_vectors_have_a_note_on_learned_positions(translution_rows):
    vectors = [row for row in translution_rows if "combined with learned" in row.note]
    assert [row.method for row in vectors] == ["relative_key", "relative_value"] * 2


@pytest.mark.slow
def test_rows_out_of_memory_are_counted(translution_rows):
    counts = {
        row.size: row.params
        for row in translution_rows
        if row.printed == "out of memory"
    }
    assert counts == {
        "C/32": 930_591_976,
        "A/16": 488_065_384,
        "B/16": 975_787_624,
        "C/16": 3_902_415_592,
        "GPT-B-160": 235_640_448,
        "GPT-C-160": 903_916_800,
        "GPT-A-512": 361_040_256,
        "GPT-B-512": 702_781_056,
    }


@pytest.mark.slow
def test_multiply_adds_count_a_projection_per_pair(translution_rows):
    rows = {(row.size, row.method): row for row in translution_rows}
    translution = {
        size: rows[size, "translution"].multiply_adds
        for size in ("A/56", "A/12", "A/7")
    }
    # The paper prints 75.86M, 140.5M and 436.6M.
    assert translution == {
        "A/56": 255_366_912,
        "A/12": 1_765_529_472,
        "A/7": 14_289_624_192,
    }
    assert rows["A/7", "translution"].paper_flops == "436.6M"
    # For self-attention the paper also counts norms and the softmax.
    for size, printed in (("A/56", 75.86e6), ("A/16", 644.8e6), ("C/16", 4.609e9)):
        ours = rows[size, "self_attention"].multiply_adds
        assert 0.98 * printed < ours < printed
    row = rows["GPT-A-160", "translution"]
    assert row.multiply_adds_per_token == row.multiply_adds // 160


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs ../shared/published")
@pytest.mark.parametrize(
    "path", sorted(PUBLISHED.glob("translution*.csv")), ids=lambda path: path.stem
)
def test_published_tables_are_complete_copies(path):
    assert (published.FOLDER / path.name).read_text() == path.read_text()


@pytest.mark.slow
@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs ../shared/published")
def test_published_counts_are_complete(rows):
    with (PUBLISHED / "performer_param_counts.csv").open() as file:
        published = [int(row["params"]) for row in csv.DictReader(file)]
    assert [row.published for row in rows] == published


@pytest.mark.slow
def test_json_lists_the_rows(all_rows, capsys):
    sizes.main(["--json"])
    printed = json.loads(capsys.readouterr().out)
    assert len(printed) == len(all_rows)
    assert {"model", "size", "method", "image", "params", "published"} <= set(
        printed[0]
    )


@pytest.mark.slow
def test_table_shows_our_and_published_counts(all_rows, capsys):
    sizes.main([])
    out = capsys.readouterr().out
    assert "CLS token" in out
    lines = [line.split() for line in out.splitlines()]
    row = "Horn et al. performer 6 layers of dim 256 favor 32x32x1"
    assert [*row.split(), "4,741,898", "4,741,642", "+256"] in lines
    row = "3 vit B/32 translution 224x224x3 233,056,360 223.1M +9.96M 3,557.4M 308.0M"
    assert row.split() in lines
    row = "Horn et al. resnet18 modern 32x32x3 11,173,962 11.2M"
    assert row.split() in lines
    row = "Horn et al. resnet18 published 32x32x3 11,181,642 11.2M"
    assert row.split() in lines
    row = "Horn et al. routing modern routing(clusters=8) 32x32x1 11,428,490 11.4M"
    assert row.split() in lines
    assert "paper's counter misses" in out
    assert "out of memory" in out


SIZES = {"num_tokens": 7, "dim": 6, "num_layers": 3, "num_heads": 2, "mlp_dim": 11}
OTHER_PRODUCTS = 7 * (6 * 6 + 2 * 6 * 11)


def test_multiply_adds_by_hand():
    def per_layer(attention, **options):
        cost = multiply_adds(attention, **(SIZES | options))
        assert cost % 3 == 0
        return cost // 3 - OTHER_PRODUCTS

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


def test_count_parameters_allocates_nothing():
    class Huge(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            assert tokens.shape == (1, 5)
            table = self.param("table", nn.initializers.zeros, (10**6, 10**7))
            return jnp.take(table, tokens, axis=0)

    assert count_parameters(Huge(), num_tokens=5) == 10**13


def test_agrees_accepts_rounded_and_truncated_digits():
    assert agrees(4_685_032, "4.69M") and agrees(4_685_032, "4.68M")
    assert not agrees(4_685_032, "4.70M") and not agrees(4_685_032, "4.67M")
    assert agrees(116_164_138, "116.2M") and not agrees(59_940_096, "60.0M")
