"""Golden parameter counts."""

import csv
import json
import pathlib

import pytest

from relattn.evaluation import sizes

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


@pytest.fixture(scope="module")
def rows():
    return sizes.sizes()


def test_counts_are_the_published_ones_and_the_cls_token(rows):
    counts = {(row.method, row.image): row.params for row in rows}
    assert counts == {key: count + CLS for key, count in GOLDEN.items()}
    assert all(row.params == row.published + CLS for row in rows)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs ../shared/published")
def test_the_published_counts_are_transcribed_whole(rows):
    with (PUBLISHED / "performer_param_counts.csv").open() as file:
        published = [int(row["params"]) for row in csv.DictReader(file)]
    assert [row.published for row in rows] == published


def test_json_lists_the_rows(rows, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "sizes", lambda: rows)
    sizes.main(["--json"])
    printed = json.loads(capsys.readouterr().out)
    assert len(printed) == len(rows)
    assert {"model", "size", "method", "image", "params", "published"} <= set(
        printed[0]
    )


def test_table_shows_both_counts(rows, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "sizes", lambda: rows)
    sizes.main([])
    out = capsys.readouterr().out
    assert "4,741,898  4,741,642        +256" in out
    assert "CLS token" in out
