"""The operations of a step, and the peak of a device."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn import training
from relattn.models import GPT
from relattn.training import cost, loop
from relattn.training.cost import matmul_flops, peak_flops, training_flops
from relattn.training.metrics_window import throughput
from relattn.training.step import create_state
from relattn.training.task import Task
from studies.sizes import multiply_adds
from tests.training.conftest import TinyModel, make_data

W = jnp.ones((5, 5))


def test_a_scan_counts_every_iteration():
    def scan(x):
        return jax.lax.scan(lambda x, _: (x @ W, None), x, length=7)[0].sum()

    assert matmul_flops(scan, jnp.ones((3, 5))) == 7 * 2 * 3 * 5 * 5
    # The backward pass has one product: the matrix is a constant.
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
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_by_the_name_of_a_device(kind, peak):
    assert peak_flops(kind) == peak


@pytest.mark.parametrize("remat", [False, True])
def test_training_counts_each_multiply_add_of_the_model_six_times(remat):
    sizes = {"dim": 6, "num_layers": 2, "num_heads": 3, "mlp_dim": 7}
    model = GPT(vocab_size=11, context_length=5, remat=remat, **sizes)
    tokens = jax.ShapeDtypeStruct((1, 5), "int32")
    # Causal softmax attention computes all pairs, then masks.
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


SHAPE = (5, 3, 1)


def abstract_state(optimizer):
    return jax.eval_shape(
        lambda key: create_state(TinyModel(num_classes=3), optimizer, key, SHAPE),
        jax.random.key(0),
    )


@pytest.mark.parametrize(
    "optimizer, copies", [(optax.sgd(0.1), 2), (optax.adam(0.1), 4)]
)
def test_state_bytes_include_gradients(optimizer, copies):
    state = abstract_state(optimizer)
    params = 15 * 11 + 11 + (11 + 7) * 3 + 3
    features = cost.tree_bytes(state.random_features)
    assert features == 4 * 7 * 11
    least = 4 * copies * params + features
    assert least <= cost.state_bytes(state) <= least + 8


def test_the_warning_has_the_figures(monkeypatch):
    monkeypatch.setattr(cost, "device_bytes", lambda device: 123456789)
    state = jax.eval_shape(
        lambda key: create_state(
            TinyModel(num_classes=3, width=10**6), optax.adam(0.1), key, SHAPE
        ),
        jax.random.key(0),
    )
    # 19 M parameters four times, and 7 M random features.
    message = re.escape("need 0.3 GB, but cpu has 0.1 GB: expect to run out of memory")
    with pytest.warns(UserWarning, match=message):
        cost.warn_if_too_large(state, jax.local_devices()[:1])


@pytest.mark.usefixtures("tiny")
def test_a_model_that_does_not_fit_is_warned_about_first(config, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "device_bytes", lambda device: 2000)

    class Stop(Exception):
        pass

    def stop(*args):
        raise Stop

    monkeypatch.setattr(loop, "TrainLoop", stop)
    message = r"state need 0.0 MB on 2 devices, but cpu has 0.0 MB: .* config.model or"
    with pytest.warns(UserWarning, match=message), pytest.raises(Stop):
        training.train_and_evaluate(config, tmp_path, devices=jax.local_devices()[:2])


def test_a_model_that_fits_gives_no_warning(monkeypatch):
    state = abstract_state(optax.adam(0.1))
    devices = jax.local_devices()
    needed = len(devices) * cost.state_bytes(state)
    for available in (needed, None):
        monkeypatch.setattr(
            cost, "device_bytes", lambda device, available=available: available
        )
        cost.warn_if_too_large(state, devices)
    monkeypatch.setattr(cost, "device_bytes", lambda device: needed - 1)
    with pytest.warns(UserWarning, match="expect to run out of memory"):
        cost.warn_if_too_large(state, devices)


class Accelerator:
    platform = "gpu"
    device_kind = "a GPU"

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_the_memory_of_devices(tmp_path, monkeypatch):
    assert cost.device_bytes(Accelerator({"bytes_limit": 7})) == 7
    assert cost.device_bytes(Accelerator({})) is None
    assert cost.device_bytes(Accelerator(None)) is None
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(cost, "CGROUP_LIMIT", limit)
    (cpu,) = jax.local_devices()[:1]
    total = cost.device_bytes(cpu)
    assert total > 10**8
    limit.write_text("max\n")
    assert cost.device_bytes(cpu) == total
    limit.write_text("1000003\n")
    assert cost.device_bytes(cpu) == 1000003
    devices = [Accelerator({"bytes_limit": 900})] * 3
    with pytest.warns(UserWarning, match=r"state need 0.0 MB, but a GPU has"):
        cost.warn_if_too_large(abstract_state(optax.sgd(0.1)), devices)
