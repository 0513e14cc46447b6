import chex
import jax
import numpy as np
import optax
import pytest

from relattn.kernels.feature_maps import redraw
from relattn.training.parallel import DataParallel
from relattn.training.state import create_state
from relattn.training.step import make_eval_step, make_train_step
from tests.training.conftest import TinyModel, make_data


def to_float(batch):
    return batch["image"].astype(np.float32) / 255


def batches(count, size=20):
    train = make_data(num_train=count * size).train
    for i in range(count):
        rows = slice(i * size, (i + 1) * size)
        yield {"image": train.images[rows], "label": train.labels[rows]}


def run(parallel, optimizer, model=None, *, steps=5, dropout=0.0, accumulate_steps=1):
    chex.clear_trace_counter()
    model = model or TinyModel(num_classes=3, dropout=dropout)
    key = jax.random.key(7)
    step = make_train_step(
        model,
        optimizer,
        to_float,
        accumulate_steps=accumulate_steps,
        axis_name=parallel.axis_name,
    )
    mapped = parallel.train_step(chex.assert_max_traces(step, n=1))
    state = parallel.create(lambda: create_state(model, optimizer, key, (5, 3, 1)))
    compiled = parallel.redraw(chex.assert_max_traces(redraw, n=1))
    history = []
    for done, batch in enumerate(batches(steps), 1):
        state, metrics = mapped(state, parallel.shard(batch), key)
        history.append(metrics)
        if done % 2 == 0:
            features = compiled(state.random_features, key, done // 2)
            state = state.replace(random_features=features)
    return state, parallel.fetch(state), parallel.fetch(history)


def test_one_device_and_four_give_the_same_parameters():
    _, one, one_metrics = run(DataParallel(jax.local_devices()[:1]), optax.sgd(0.3))
    _, four, four_metrics = run(DataParallel(), optax.sgd(0.3))
    chex.assert_trees_all_close(one.params, four.params, atol=1e-6)
    chex.assert_trees_all_close(one_metrics, four_metrics, atol=1e-5)
    chex.assert_trees_all_close(one.random_features, four.random_features, atol=1e-6)
    assert one.step == four.step == 5


def test_every_device_holds_the_same_state():
    replicated, _, _ = run(DataParallel(), optax.adam(0.01), dropout=0.3)

    def check(leaf):
        copies = np.asarray(leaf)
        assert len(copies) == len(jax.local_devices())
        np.testing.assert_array_equal(copies, np.broadcast_to(copies[:1], copies.shape))

    jax.tree.map(check, replicated)


def test_dropout_keys_differ_by_device_and_step():
    parallel, key = DataParallel(), jax.random.key(0)
    seen = []

    class Recorder(TinyModel):
        def __call__(self, images, *, deterministic=True):
            if not deterministic:
                self.sow(
                    "intermediates",
                    "noise",
                    jax.random.normal(self.make_rng("dropout")),
                )
            return super().__call__(images, deterministic=deterministic)

    model = Recorder(num_classes=3)
    optimizer = optax.sgd(0.0)
    single = DataParallel(jax.local_devices()[:1])
    for devices in (parallel, single):
        step = make_train_step(model, optimizer, to_float, axis_name=devices.axis_name)
        mapped = devices.train_step(step)
        state = devices.place(create_state(model, optimizer, key, (5, 3, 1)))
        for batch in batches(2):
            state, metrics = mapped(state, devices.shard(batch), key)
            seen.append(float(devices.fetch(metrics)["noise"]))
    assert len(set(seen)) == 4


def test_the_old_state_is_donated():
    parallel, key = DataParallel(), jax.random.key(0)
    model, optimizer = TinyModel(num_classes=3), optax.sgd(0.1)
    step = make_train_step(model, optimizer, to_float, axis_name=parallel.axis_name)
    state = parallel.place(create_state(model, optimizer, key, (5, 3, 1)))
    kept = parallel.fetch(state)
    mapped = parallel.train_step(step)
    for batch in batches(2):
        old, (state, _) = state, mapped(state, parallel.shard(batch), key)
        assert old.params["head"]["kernel"].is_deleted()
    fresh = create_state(model, optimizer, key, (5, 3, 1))
    chex.assert_trees_all_equal(kept, jax.tree.map(np.asarray, fresh))


@pytest.mark.parametrize("count", [1, 4])
def test_evaluation_sums_leave_filling_out(count):
    chex.clear_trace_counter()
    parallel = DataParallel(jax.local_devices()[:count])
    model, key = TinyModel(num_classes=3), jax.random.key(0)
    state = create_state(model, optax.sgd(0.1), key, (5, 3, 1))
    step = parallel.eval_step(
        chex.assert_max_traces(
            make_eval_step(model, to_float, axis_name=parallel.axis_name), n=1
        )
    )
    variables = parallel.place(state.variables)
    weight = np.array([1.0] * 13 + [0.0] * 7, np.float32)
    for batch in batches(2):
        sums = parallel.fetch(
            step(variables, parallel.shard({**batch, "weight": weight}))
        )
        logits = model.apply(state.variables, to_float(batch))[:13]
        labels = batch["label"][:13]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        assert sums["count"] == 13
        assert sums["correct"] == np.sum(np.argmax(logits, -1) == labels)
        np.testing.assert_allclose(sums["loss"], losses.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "batch_size, message", [(6, "set it to 4 or 8"), (3, "set it to 4$")]
)
def test_a_batch_that_does_not_divide(batch_size, message):
    parallel = DataParallel(jax.local_devices()[:4])
    with pytest.raises(ValueError, match=f"b={batch_size} does not divide.*{message}"):
        parallel.check_batch("b", batch_size)
    parallel.check_batch("b", 8)
