import re

import jax
import optax
import pytest

from relattn import training
from relattn.training import loop, memory
from relattn.training.state import create_state
from tests.training.conftest import TinyModel

SHAPE = (5, 3, 1)


def abstract_state(optimizer):
    return jax.eval_shape(
        lambda key: create_state(TinyModel(num_classes=3), optimizer, key, SHAPE),
        jax.random.key(0),
    )


@pytest.mark.parametrize(
    "optimizer, copies", [(optax.sgd(0.1), 2), (optax.adam(0.1), 4)]
)
def test_parameters_gradients_and_the_optimisers_state_count(optimizer, copies):
    state = abstract_state(optimizer)
    params = 15 * 11 + 11 + (11 + 7) * 3 + 3
    features = memory.tree_bytes(state.random_features)
    assert features == 4 * 7 * 11
    least = 4 * copies * params + features
    assert least <= memory.state_bytes(state) <= least + 8


def test_the_warning_has_the_figures(monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda device: 123456789)
    state = jax.eval_shape(
        lambda key: create_state(
            TinyModel(num_classes=3, width=10**6), optax.adam(0.1), key, SHAPE
        ),
        jax.random.key(0),
    )
    # 19 M parameters four times, and 7 M random features.
    message = re.escape("need 0.3 GB, but cpu has 0.1 GB: expect to run out of memory")
    with pytest.warns(UserWarning, match=message):
        memory.warn_if_too_large(state, jax.local_devices()[:1])


@pytest.mark.usefixtures("tiny")
def test_a_model_that_cannot_fit_is_announced_before_it_is_built(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(memory, "device_bytes", lambda device: 2000)

    class Stop(Exception):
        pass

    def stop(*args):
        raise Stop

    monkeypatch.setattr(loop, "_Loop", stop)
    message = r"state need 0.0 MB on 2 devices, but cpu has 0.0 MB: .* config.model or"
    with pytest.warns(UserWarning, match=message), pytest.raises(Stop):
        training.train_and_evaluate(config, tmp_path, devices=jax.local_devices()[:2])


def test_what_fits_is_no_warning(monkeypatch):
    state = abstract_state(optax.adam(0.1))
    devices = jax.local_devices()
    needed = len(devices) * memory.state_bytes(state)
    for available in (needed, None):
        monkeypatch.setattr(
            memory, "device_bytes", lambda device, available=available: available
        )
        memory.warn_if_too_large(state, devices)
    monkeypatch.setattr(memory, "device_bytes", lambda device: needed - 1)
    with pytest.warns(UserWarning, match="expect to run out of memory"):
        memory.warn_if_too_large(state, devices)


class Accelerator:
    platform = "gpu"
    device_kind = "a GPU"

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_the_memory_of_devices(tmp_path, monkeypatch):
    assert memory.device_bytes(Accelerator({"bytes_limit": 7})) == 7
    assert memory.device_bytes(Accelerator({})) is None
    assert memory.device_bytes(Accelerator(None)) is None
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMIT", limit)
    (cpu,) = jax.local_devices()[:1]
    total = memory.device_bytes(cpu)
    assert total > 10**8
    limit.write_text("max\n")
    assert memory.device_bytes(cpu) == total
    limit.write_text("1000003\n")
    assert memory.device_bytes(cpu) == 1000003
    devices = [Accelerator({"bytes_limit": 900})] * 3
    with pytest.warns(UserWarning, match=r"state need 0.0 MB, but a GPU has"):
        memory.warn_if_too_large(abstract_state(optax.sgd(0.1)), devices)
