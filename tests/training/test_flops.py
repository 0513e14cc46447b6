"""Counting the arithmetic of a step, and what a device could do of it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from relattn.evaluation.counts import multiply_adds
from relattn.models import GPT
from relattn.training.flops import matmul_flops, peak_flops, training_flops
from relattn.training.task import Task
from relattn.training.window import throughput
from tests.training.conftest import make_data

W = jnp.ones((5, 5))


def test_a_scan_counts_as_often_as_it_runs():
    def scan(x):
        return jax.lax.scan(lambda x, _: (x @ W, None), x, length=7)[0].sum()

    assert matmul_flops(scan, jnp.ones((3, 5))) == 7 * 2 * 3 * 5 * 5
    # The backward pass: one product by the matrix; it is a constant.
    gradient = jax.grad(jax.jit(scan))
    assert matmul_flops(gradient, jnp.ones((3, 5))) == 2 * 7 * 2 * 3 * 5 * 5


def test_batched_products_convolutions_and_branches():
    x = jnp.ones((2, 3, 5))
    assert matmul_flops(lambda x: jnp.einsum("bij,bkj->bik", x, x), x) == 2 * 2 * 9 * 5
    image, kernel = jnp.ones((2, 7, 7, 4)), jnp.ones((3, 3, 2, 6))

    def convolve(image):
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )

    assert matmul_flops(convolve, image) == 2 * (2 * 5 * 5 * 6) * (3 * 3 * 2)

    def choose(x):
        return jax.lax.cond(x.sum() > 0, lambda x: x @ W @ W, lambda x: x @ W, x)

    assert matmul_flops(choose, jnp.ones((3, 5))) == 2 * 2 * 3 * 5 * 5


@pytest.mark.parametrize(
    "kind, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GB200", 2250e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v4 lite", 138e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peaks_by_the_name_of_a_device(kind, peak):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize("remat", [False, True])
def test_training_counts_each_multiply_add_of_the_model_six_times(remat):
    sizes = {"dim": 6, "num_layers": 2, "heads": 3, "mlp_dim": 7}
    model = GPT(vocab_size=11, context_length=5, remat=remat, **sizes)
    tokens = jax.ShapeDtypeStruct((1, 5), "int32")
    # Causal softmax attention weighs all pairs, and masks.
    layers = multiply_adds("softmax", num_tokens=5, **sizes)
    assert training_flops(model, tokens) == 3 * 2 * (layers + 5 * 6 * 11)


@pytest.mark.usefixtures("tiny")
def test_utilization_is_of_the_peaks_of_all_devices(config):
    task = Task.build(config, make_data().info)
    devices = [types.SimpleNamespace(device_kind="TPU v5p")] * 4
    row = throughput(6000.0, task, devices)
    assert row["examples_per_second"] == 6000
    assert row["examples_per_second_per_device"] == 1500
    np.testing.assert_allclose(
        row["model_flops_utilization"], 6000 * task.flops_per_example / (4 * 459e12)
    )
    assert "model_flops_utilization" not in throughput(1.0, task, jax.devices())
