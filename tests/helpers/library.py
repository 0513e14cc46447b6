"""Uses the library where only its requirements are installed."""

import importlib

import jax
import jax.numpy as jnp

import relattn


def main():
    q = jax.random.normal(jax.random.key(0), (2, 5, 4))
    assert relattn.kernels.softmax_attention(q, q, q).shape == q.shape
    assert relattn.nn.attention.MultiHeadAttention
    model = relattn.build_model(
        {"name": "performer", "dim": 8, "num_heads": 2},
        num_classes=3,
        image_shape=(4, 4, 1),
    )
    images = jnp.zeros((2, 4, 4, 1))
    variables = model.init(jax.random.key(0), images)
    assert model.apply(variables, images).shape == (2, 3)
    for name in ("data", "training", "evaluation"):
        try:
            importlib.import_module(f"relattn.{name}")
        except ImportError as error:
            message = str(error)
        assert message.startswith(f"relattn.{name} needs "), message
        assert message.endswith(": pip install 'relattn[train]'"), message


if __name__ == "__main__":
    main()
