"""Evaluations average probabilities over draws of the random features."""

import csv
import functools
import io
import zlib

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from PIL import Image

from relattn import training
from relattn.evaluation import predict as predict_lib
from relattn.kernels import draw_random_features, positive_features
from relattn.kernels.random_projections import redraw
from relattn.training.devices import make_parallel
from relattn.training.draws import average_draws, draw_features, stream_key
from relattn.training.evaluator import Evaluator
from relattn.training.seeds import make_task
from relattn.training.step import make_eval_step
from relattn.training.task import Task
from tests.helpers.quick import quick_jit
from tests.training.conftest import make_data

pytestmark = pytest.mark.usefixtures("tiny")
NUM_DRAWS = 3


def softmax(logits):
    shifted = np.exp(np.float64(logits) - np.max(logits, axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


@functools.cache
def all_draws(model):
    """The stored draw, and those of a stream of their own with the indices from 1."""

    def logits(variables, inputs, key):
        key = jax.random.fold_in(key, zlib.crc32(b"draws"))
        stored = variables["random_features"]
        others = [redraw(stored, key, index) for index in range(1, NUM_DRAWS)]
        return [
            model.apply({**variables, "random_features": features}, inputs)
            for features in (stored, *others)
        ]

    return quick_jit(logits)


def probabilities(model, variables, inputs, seed):
    """Returns those of each of `NUM_DRAWS` draws."""
    found = all_draws(model)(variables, inputs, jax.random.key(seed))
    return np.stack([softmax(logits) for logits in found])


@pytest.mark.slow
def test_predictions_are_the_mean_over_the_draws(finished):
    run = training.load_run(finished[0])
    images = make_data().test.images
    inputs = run.preprocess({"image": images})
    each = probabilities(run.model, run.variables, inputs, run.config.seed)
    for draws in (1, np.int64(NUM_DRAWS)):
        found = run.predict(images, draws=draws, batch_size=7).probabilities
        np.testing.assert_allclose(found, each[:draws].mean(axis=0), atol=1e-6)
    # The draws differ by more than rounding.
    assert np.abs(each[1:] - each[0]).max(axis=(1, 2)).min() > 1e-3
    # One draw is the model that was saved.
    np.testing.assert_array_equal(
        run.predict(images[:7], draws=1, batch_size=7).probabilities,
        run.predict(images[:7], batch_size=7).probabilities,
    )


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs simulated devices")
def test_draws_are_averaged_in_shard_map():
    def apply(variables, inputs):
        return inputs * variables["random_features"]

    rng = np.random.default_rng(0)
    variables, inputs = {"random_features": rng.normal(size=3)}, rng.normal(size=(2, 5))
    variables, inputs = jax.tree.map(np.float32, (variables, inputs))
    everywhere, batch = PartitionSpec(), PartitionSpec("d")
    shared = jax.shard_map(
        functools.partial(average_draws, apply),
        mesh=Mesh(jax.devices()[:2], "d"),
        in_specs=(everywhere, batch),
        out_specs=batch,
    )
    found = quick_jit(shared)(variables, inputs)
    each = [softmax(inputs * draw) for draw in variables["random_features"]]
    np.testing.assert_allclose(softmax(found), np.mean(each, axis=0), atol=1e-6)


@pytest.mark.quick("1-pmap")
@pytest.mark.parametrize("parallel", ["pmap", "mesh"])
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_every_seed_and_device_averages_its_own_draws(config, parallel, num_seeds):
    config.update(parallel=parallel, num_seeds=num_seeds, eval_draws=NUM_DRAWS)
    data = make_data()
    task = make_task(config, data.info)
    devices = make_parallel(config)
    state = devices.create(task.create_state)
    evaluate = Evaluator.of_task(task, devices)
    # The last batch is padded.
    found = evaluate(state.variables, data.test, 16, key=task.key)
    inputs = task.preprocess({"image": data.test.images})
    rows = np.arange(len(data.test))
    states = task.unstack(devices.fetch(state))
    for seed, one, result in zip(task.seeds, states, found, strict=True):
        mean = probabilities(task.model, one.variables, inputs, seed).mean(axis=0)
        loss = -np.log(mean[rows, data.test.labels]).mean()
        accuracy = (mean.argmax(axis=-1) == data.test.labels).mean()
        np.testing.assert_allclose(result["loss"], loss, rtol=1e-5)
        np.testing.assert_allclose(result["accuracy"], accuracy)


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [1, 2])
def test_a_run_is_evaluated_as_in_training(config, tmp_path, one_device, num_seeds):
    config.update(eval_draws=NUM_DRAWS, num_seeds=num_seeds, num_epochs=1)
    result = training.train_and_evaluate(config, tmp_path, devices=one_device)
    runs = training.load_runs(tmp_path)
    for run, expected in zip(runs, result.get("runs", [result]), strict=True):
        found = run.evaluate()
        np.testing.assert_allclose(found["loss"], expected["test_loss"], rtol=1e-5)
        one = run.evaluate(draws=1)
        assert abs(one["loss"] - found["loss"]) > 1e-4
        images, labels = vars(make_data().test).values()
        mean = run.predict(images).probabilities
        right = mean[np.arange(len(labels)), labels]
        np.testing.assert_allclose(-np.log(right).mean(), found["loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_more_draws_begin_with_fewer(impl):
    def draw(key):
        first = draw_random_features(key, layer=2, num_features=11, head_dim=5)
        # Training draws from the key itself.
        trained = [redraw(first, key, index) for index in range(4)]
        stream = stream_key(key, "draws")
        alone = [redraw(first, stream, index).projection for index in (1, 2, 3)]
        drawn = (draw_features(first, key, n) for n in (2, 4))
        return first, trained, alone, *drawn

    first, trained, alone, two, four = quick_jit(draw)(jax.random.key(3, impl=impl))
    two, four = np.asarray(two.projection), np.asarray(four.projection)
    np.testing.assert_allclose(two, four[:2], atol=1e-6)
    np.testing.assert_array_equal(four[0], first.projection)
    np.testing.assert_allclose(four[1:], alone, atol=1e-6)
    for drawn in four[1:]:
        assert all(np.abs(drawn - other.projection).max() > 0.1 for other in trained)


def test_a_probability_of_zero_leaves_the_mean_finite():
    """The sum of probabilities, not of their logarithms, is in float32 range."""
    logits = np.float32([[0.0, -200.0], [0.0, -300.0]])
    found = average_draws(
        lambda variables, inputs: variables["random_features"] + inputs,
        {"random_features": logits},
        np.zeros(2, np.float32),
    )
    np.testing.assert_allclose(found, [0.0, -200.0 - np.log(2)], rtol=1e-6)


class Bigrams(nn.Module):
    """Maps each token to logits of the next, by random features."""

    vocab_size: int

    @nn.compact
    def __call__(self, tokens, *, deterministic=True):
        x = nn.Embed(self.vocab_size, 5)(tokens)
        drawn = self.variable(
            "random_features",
            "drawn",
            lambda: draw_random_features(
                self.make_rng("random_features"), layer=0, num_features=7, head_dim=5
            ),
        )
        features = positive_features(x, drawn.value.projection).dense()
        return nn.Dense(self.vocab_size)(features)


@pytest.mark.slow
def test_perplexity_is_that_of_the_mean_probabilities():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 13, (3, 8)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "label": tokens[:, 1:]}
    weight = rng.integers(0, 2, batch["label"].shape).astype(np.float32)
    model, key = Bigrams(13), jax.random.key(0)
    step = make_eval_step(
        model, lambda batch: batch["tokens"], metrics=("perplexity",), draws=NUM_DRAWS
    )

    def evaluate(key, batch):
        rngs = {"params": key, "random_features": key}
        variables = model.init(rngs, batch["tokens"])
        drawn = draw_features(variables["random_features"], key, NUM_DRAWS)
        return variables, step({**variables, "random_features": drawn}, batch)

    variables, sums = quick_jit(evaluate)(key, {**batch, "weight": weight})
    mean = probabilities(model, variables, batch["tokens"], 0).mean(axis=0)
    right = np.take_along_axis(mean, batch["label"][..., None], -1)[..., 0]
    assert sums["count"] == weight.sum() > 0
    expected = -(weight * np.log(right)).sum()
    np.testing.assert_allclose(sums["perplexity"], expected, rtol=1e-5)


def test_several_draws_need_random_features(config, finished, text_config):
    run = training.load_run(finished[0])
    image = make_data().test.images[0]
    for draws in (0, -1, True):
        with pytest.raises(ValueError, match=f"draws must be an integer .*got {draws}"):
            run.predict(image, draws=draws)
    without = {"params": run.variables["params"], "random_features": {}}
    object.__setattr__(run, "variables", without)
    message = "draws=2 needs random features to draw, but the model has none: leave"
    for call in (run.predict, training.evaluate, training.make_predict_fn):
        arguments = [image] if call == run.predict else [run]
        arguments += [make_data().test] if call is training.evaluate else []
        with pytest.raises(ValueError, match=message):
            call(*arguments, draws=2)
    text_config.eval_draws = 2
    source = training.task.data_lib.load_data(text_config.data)
    with pytest.raises(ValueError, match=f"config.eval_{message}"):
        Task.build(text_config, source.info)
    config.eval_draws = 0
    with pytest.raises(ValueError, match="eval_draws must be at least 1, got 0"):
        training.check_config(config)


@pytest.mark.slow
def test_the_command_averages(finished, tmp_path, capsys):
    image = make_data().test.images[0]
    Image.fromarray(image[..., 0]).save(tmp_path / "a.png")
    arguments = [f"--workdir={finished[0]}", f"--input={tmp_path / 'a.png'}"]
    predict_lib.main([*arguments, f"--draws={NUM_DRAWS}"])
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    found = training.load_run(finished[0]).predict(image, draws=NUM_DRAWS).probabilities
    assert float(row["probability"]) == pytest.approx(found.max(), abs=1e-6)


@pytest.mark.slow
def test_one_draw_is_evaluated_without_a_loop(config):
    """The program is the one that a run without draws has."""
    data, loops = make_data(), []
    batch = next(data.test.batches(4))
    for draws in (1, 2):
        config.eval_draws = draws
        task = Task.build(config, data.info)
        variables = task.abstract_state.variables
        if draws > 1:
            features = variables["random_features"]
            drawn = jax.eval_shape(task.draw, features, task.key)
            variables = {**variables, "random_features": drawn}
        program = jax.make_jaxpr(task.eval_step)(variables, batch)
        loops.append("scan" in str(program))
    assert loops == [False, True]
