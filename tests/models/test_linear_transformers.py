"""Tests the sizes of the pixel Linformer and Routing Transformer."""

import pytest

from relattn.models import build_model
from studies.sizes import count_parameters


@pytest.mark.parametrize(
    ("name", "channels", "count"),
    [
        ("linformer", 1, 10_189_418),
        ("linformer", 3, 10_190_186),
        ("routing", 1, 11_428_490),
        ("routing", 3, 11_429_130),
    ],
)
def test_parameter_counts_are_as_published(name, channels, count):
    shape = (32, 32, channels)
    model = build_model({"name": name}, num_classes=10, image_shape=shape)
    assert count_parameters(model, shape) == count
    published = {"linformer": "10.2M", "routing": "11.4M"}[name]
    assert f"{count / 1e6:.1f}M" == published


def test_parameter_counts_equal_counts_by_hand():
    # Blocks, embedding, CLS and head; the rest is projections and positions.
    def rest(dim, layers):
        block = 4 * dim * (dim + 1) + 8 * dim**2 + 5 * dim + 4 * dim
        return layers * block + 2 * dim + dim + 10 * (dim + 1)

    assert rest(384, 5) + 5 * 256 * 1025 + 384 // 4 == 10_189_418
    assert rest(320, 9) + 1024 * 320 == 11_428_490
