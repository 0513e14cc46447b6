from unittest.mock import Mock

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from relattn import training
from relattn.kernels.random_projections import redraw
from relattn.models import ViT
from relattn.nn import registry
from relattn.nn.attention import MultiHeadAttention
from relattn.training.checkpoint import CHECKPOINTS, checkpoint_steps
from relattn.training.devices import choose_devices, make_parallel
from relattn.training.mesh import MeshParallel, split_axes
from relattn.training.parallel import process_shard
from relattn.training.pmap import DataParallel
from relattn.training.seeds import make_task
from relattn.training.step import create_state, make_eval_step, make_train_step
from tests.helpers.export import unchecked_annotations
from tests.helpers.interrupted import final_state, train_until
from tests.training.conftest import TinyModel, make_data


def to_float(batch):
    return batch["image"].astype(np.float32) / 255


def batches(count, size=20):
    train = make_data(num_train=count * size).train
    for i in range(count):
        rows = slice(i * size, (i + 1) * size)
        yield {"image": train.images[rows], "label": train.labels[rows]}


def redraw_every_two(features, key, step):
    return redraw(features, key, step // 2)


def run(parallel, optimizer, model=None, *, steps=5, dropout=0.0, accumulate_steps=1):
    chex.clear_trace_counter()
    model = model or TinyModel(num_classes=3, dropout=dropout)
    key = jax.random.key(7)
    step = make_train_step(
        model,
        optimizer,
        to_float,
        accumulate_steps=accumulate_steps,
    )
    mapped = parallel.compile_train_step(chex.assert_max_traces(step, n=1))
    state = parallel.create(lambda: create_state(model, optimizer, key, (5, 3, 1)))
    compiled = parallel.compile_redraw(chex.assert_max_traces(redraw_every_two, n=1))
    history = []
    for done, batch in enumerate(batches(steps), 1):
        state, metrics = mapped(state, parallel.shard(batch), key)
        history.append(metrics)
        if done % 2 == 0:
            features = compiled(state.random_features, key, state.step)
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
        step = make_train_step(model, optimizer, to_float)
        mapped = devices.compile_train_step(step)
        state = devices.place(create_state(model, optimizer, key, (5, 3, 1)))
        for batch in batches(2):
            state, metrics = mapped(state, devices.shard(batch), key)
            seen.append(float(devices.fetch(metrics)["noise"]))
    assert len(set(seen)) == 4


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_old_state_is_donated_except_on_cpus(platform, monkeypatch):
    monkeypatch.setattr(DataParallel, "platform", platform)
    parallel, key = DataParallel(), jax.random.key(0)
    model, optimizer = TinyModel(num_classes=3), optax.sgd(0.1)
    step = make_train_step(model, optimizer, to_float)
    state = parallel.place(create_state(model, optimizer, key, (5, 3, 1)))
    kept = parallel.fetch(state)
    mapped = parallel.compile_train_step(step)
    for batch in batches(2):
        old, (state, _) = state, mapped(state, parallel.shard(batch), key)
        assert old.params["head"]["kernel"].is_deleted() == (platform == "tpu")
    fresh = create_state(model, optimizer, key, (5, 3, 1))
    chex.assert_trees_all_equal(kept, jax.tree.map(np.asarray, fresh))


@pytest.mark.quick("1")
@pytest.mark.parametrize("count", [1, 4])
def test_evaluation_sums_leave_padding_out(count):
    chex.clear_trace_counter()
    parallel = DataParallel(jax.local_devices()[:count])
    model, key = TinyModel(num_classes=3), jax.random.key(0)
    state = create_state(model, optax.sgd(0.1), key, (5, 3, 1))
    step = parallel.compile_eval_step(
        chex.assert_max_traces(make_eval_step(model, to_float), n=1)
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
        assert sums["accuracy"] == np.sum(np.argmax(logits, -1) == labels)
        np.testing.assert_allclose(sums["loss"], losses.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    "batch_size, message", [(6, "set it to 4 or 8"), (3, "set it to 4$")]
)
def test_a_batch_that_does_not_divide(batch_size, message):
    parallel = DataParallel(jax.local_devices()[:4])
    with pytest.raises(ValueError, match=f"b={batch_size} is not divisible.*{message}"):
        parallel.check_batch("b", batch_size)
    parallel.check_batch("b", 8)


KEY = jax.random.key(7)


def vit(attention, **options):
    sizes = {"dim": 8, "num_layers": 2, "num_heads": 2, "mlp_dim": 12, "patch_size": 2}
    options |= {"attention": attention, "position": "none", "num_classes": 3}
    return ViT(**sizes, **options)


@pytest.mark.slow
def test_tables_are_split_by_their_offsets():
    parallel = MeshParallel(model_axis=2)
    assert parallel.num_shards == 2

    def make():
        # 2x2 patches and a class token have 3 * 3 + 3 = 12 offsets.
        return create_state(vit("translution"), optax.adam(0.1), KEY, (4, 4, 1))

    state = parallel.create(make)
    chex.assert_trees_all_equal(parallel.fetch(state), jax.device_get(make()))
    moments = state.opt_state[0].mu
    for tree in (state.params, moments):
        table = tree["blocks_0"]["attention"]["q_table"]
        part = list(table.shape)
        part[-4] //= 2
        assert {shard.data.shape for shard in table.addressable_shards} == {tuple(part)}
        hidden = tree["blocks_0"]["feed_forward"]["hidden"]["kernel"]
        assert hidden.addressable_shards[0].data.shape == (2, 8, 6)
    local = parallel.local_shapes(state)
    chex.assert_trees_all_equal_shapes(
        local, jax.tree.map(lambda x: x.addressable_shards[0].data, state)
    )


class Mixing(MultiHeadAttention):
    """An attention of a user, whose parameter a mesh splits."""

    split_axes = {"mixing": (-1, -2)}

    @nn.compact
    def attend(self, q, k, v, context):
        init = nn.initializers.normal()
        mixing = self.param("mixing", init, (6, self.head_dim))
        return v * mixing.sum(axis=0)


@pytest.mark.usefixtures("registries")
def test_a_registered_attention_declares_what_is_split():
    registry.register_attention("mixing", Mixing)
    model = vit("mixing", scan_layers=False)
    params = jax.eval_shape(model.init, KEY, jnp.zeros((1, 4, 4, 1)))["params"]
    attention = params["block_0"]["attention"]
    shapes = {
        count: MeshParallel(jax.local_devices()[:count], model_axis=count).local_shapes(
            params
        )["block_0"]["attention"]
        for count in (3, 4)
    }
    # 4 values of a head are split over 4 devices; 3 divides only the 6 rows.
    assert attention["mixing"].shape == (6, 4)
    assert shapes[4]["mixing"].shape == (6, 1)
    assert shapes[3]["mixing"].shape == (2, 4)
    chex.assert_trees_all_equal(shapes[3]["q"], attention["q"])


@pytest.mark.usefixtures("registries")
def test_attentions_that_split_a_parameter_differently_are_refused():
    class Other(Mixing):
        split_axes = {"mixing": (-2,)}

    registry.register_attention("mixing", Mixing)
    registry.register_attention("other", Other)
    message = "Other.split_axes has 'mixing': .*another module has .*rename the param"
    with pytest.raises(ValueError, match=message):
        split_axes()


@pytest.mark.slow
def test_dropout_in_micro_batches_does_not_depend_on_the_devices():
    one, four = (
        run(
            MeshParallel(jax.local_devices()[:count]),
            optax.sgd(0.3),
            dropout=0.5,
            accumulate_steps=5,
        )
        for count in (1, 4)
    )
    chex.assert_trees_all_close(one[1:], four[1:], atol=1e-6)


@pytest.mark.slow
def test_a_run_resumes_with_pmap_and_on_a_mesh(config, tmp_path, tiny):
    config.model.dropout = 0.0
    config.optimizer.name = "sgd"
    config.checkpoint_every_steps = 3
    config.early_stopping_epochs = 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    devices = jax.local_devices()
    training.train_and_evaluate(config, whole, devices=devices[:1])
    for stop, parallel, model_axis, count in (
        (4, "pmap", 1, 1),
        (8, "pmap", 1, 4),
        (11, "mesh", 2, 4),
    ):
        config.update(parallel=parallel, model_axis=model_axis)
        train_until(stop, config, parts, devices=devices[:count])
    assert checkpoint_steps(parts / CHECKPOINTS)[-1] == 10
    config.update(parallel="pmap", model_axis=1)
    training.train_and_evaluate(config, parts, devices=devices[:1])
    expected, state = final_state(whole), final_state(parts)
    chex.assert_trees_all_close(expected.params, state.params, atol=1e-6)
    assert expected.step == state.step


@pytest.mark.slow
def test_a_run_of_a_mesh_is_evaluated_on_any_devices(config, tmp_path, tiny):
    config.update(parallel="mesh", model_axis=2, num_steps=3)
    training.train_and_evaluate(config, tmp_path)
    run, split = training.load_run(tmp_path), make_data().test
    # 7 rounds up to 8 on the mesh's 2 shards and to 9 on 3 devices.
    results = [
        training.evaluate(run, split, batch_size=7, devices=jax.local_devices()[:n])
        for n in (4, 3, 1)
    ]
    assert results[0] == pytest.approx(results[2])
    assert results[1] == pytest.approx(results[2])


@pytest.mark.slow
def test_seeds_train_together_on_a_mesh(config, tiny):
    config.update(num_seeds=2)
    config.model.dropout = 0.0
    task = make_task(config, make_data().info)
    batch = next(batches(1))
    batch = {name: np.stack([value, value[::-1]]) for name, value in batch.items()}
    results = []
    for parallel in (
        DataParallel(jax.local_devices()[:1]),
        MeshParallel(model_axis=2),
    ):
        step = parallel.compile_train_step(task.train_step)
        state = parallel.create(task.create_state)
        state, metrics = step(state, parallel.shard(batch, axis=1), task.key)
        results.append(parallel.fetch((state.params, metrics)))
    chex.assert_trees_all_close(*results, atol=1e-6)


def test_meshes_that_do_not_fit_are_refused(config, tmp_path, tiny):
    config.model_axis = 3
    with pytest.raises(ValueError, match="model_axis=3 needs config.parallel='mesh'"):
        training.train_and_evaluate(config, tmp_path)
    config.parallel = "mesh"
    config.num_devices = 4
    with pytest.raises(ValueError, match="does not divide the 4 devices.*1, 2, 4"):
        training.train_and_evaluate(config, tmp_path)
    config.update(model_axis=1, parallel="mash")
    with pytest.raises(ValueError, match="unknown config.parallel 'mash'.*'mesh'"):
        training.train_and_evaluate(config, tmp_path)
    config.update(parallel="mesh", batch_size=22, model_axis=1)
    with pytest.raises(ValueError, match="batch_size=22 is not divisible by the 4"):
        training.train_and_evaluate(config, tmp_path)


def devices_of(*owners):
    return [Mock(spec=jax.Device, process_index=owner) for owner in owners]


ONE, TWO, ODD = [0] * 8, [0] * 4 + [1] * 4, [0] * 3 + [1] * 3


@pytest.mark.parametrize(
    "owners, changes, chosen",
    [
        (ONE, {"batch_size": 32}, range(8)),
        (ONE, {"batch_size": 22}, range(2)),
        (ONE, {"batch_size": 23}, range(1)),
        (ONE, {"batch_size": 24, "accumulate_steps": 4}, range(6)),
        (ONE, {"batch_size": 6, "model_axis": 2}, range(6)),
        (ONE, {"batch_size": 22, "num_devices": 3}, range(3)),
        (TWO, {"batch_size": 30}, [0, 1, 2, 4, 5, 6]),
        (TWO, {"batch_size": 30, "num_devices": 4}, [0, 1, 4, 5]),
        # No number divides the batch: all devices, so that check_batch refuses it.
        (TWO, {"batch_size": 21}, range(8)),
        # No copy may span the last device of one process and the first of the next.
        (ODD, {"batch_size": 12, "model_axis": 2}, [0, 1, 3, 4]),
    ],
)
def test_a_run_takes_the_most_devices_that_its_batch_fits(owners, changes, chosen):
    config = training.default_config()
    config.update(changes)
    devices = devices_of(*owners)
    assert choose_devices(config, devices) == [devices[index] for index in chosen]


@pytest.mark.parametrize(
    "owners, count, message",
    [
        (ONE, 9, "the 8 devices: set it to at most 8, or to 0"),
        (TWO, 3, "the 8 devices of 2 processes: set it to a multiple of 2, at most 8"),
        (TWO, 10, "the 8 devices of 2 processes: set it to a multiple of 2, at most 8"),
    ],
)
def test_more_devices_than_available_are_refused(owners, count, message):
    config = training.default_config()
    config.num_devices = count
    with pytest.raises(ValueError, match=f"num_devices={count} does not fit {message}"):
        choose_devices(config, devices_of(*owners))


@pytest.mark.parametrize("devices", [2, "cpu", [], ["cpu"], ONE[:1], devices_of(0) * 2])
def test_what_are_no_devices_is_refused(devices):
    config = training.default_config()
    message = "devices must be a list of different JAX devices, such as jax.devices"
    for choose in (choose_devices, make_parallel):
        with unchecked_annotations(), pytest.raises(ValueError, match=message):
            choose(config, devices)


def test_a_model_axis_that_does_not_fit_the_processes():
    message = "model_axis=3 must divide the 2 devices of a process, or be a multiple"
    with pytest.raises(ValueError, match=message):
        MeshParallel(devices_of(0, 0, 1, 1, 2, 2), model_axis=3)


def test_devices_are_taken_process_by_process():
    parallel = DataParallel(devices_of(0, 1, 0, 1))
    assert [device.process_index for device in parallel.devices] == [0, 0, 1, 1]
    assert parallel.shard_index == (0, 2)


@pytest.mark.parametrize(
    "num_processes, local, num_shards, shards",
    [
        (1, 8, 8, [(0, 1)]),
        (2, 4, 8, [(0, 2), (1, 2)]),
        (2, 4, 4, [(0, 2), (1, 2)]),
        # Four devices share a shard; their two processes read the same.
        (4, 2, 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        (4, 2, 1, [(0, 1)] * 4),
    ],
)
def test_process_shard(num_processes, local, num_shards, shards):
    owners = [index for index in range(num_processes) for _ in range(local)]
    found = [
        process_shard(owners, process, num_shards) for process in range(num_processes)
    ]
    assert found == shards
