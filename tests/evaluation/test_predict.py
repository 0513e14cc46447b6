"""Predictions of saved models by the command; test_run.py has those of runs."""

import csv
import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from relattn import load_pretrained
from relattn.evaluation import predict as predict_lib
from relattn.models import pretrained
from relattn.training.draws import draw_features
from relattn.training.saved_run import load_text_run
from tests.helpers.quick import normal, quick_jit
from tests.training.test_initialize import PREPROCESSING, save

MODEL = {"name": "vit", "dim": 6, "num_heads": 2, "num_layers": 1, "mlp_dim": 5}
CONFIG = {"model": {**MODEL, "patch_size": 4}, "image_shape": [8, 8, 3]}
CONFIG["preprocessing"] = PREPROCESSING


def save_vit(folder, **changes):
    return save(folder, CONFIG | changes, np.zeros((1, 8, 8, 3), np.float32))


@pytest.fixture
def photos(tmp_path):
    rng, folder = np.random.default_rng(0), tmp_path / "photos"
    folder.mkdir()
    for n in range(3):
        pixels = rng.integers(0, 256, (11 + n, 13, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{n}.png")
    return folder


def test_a_converted_model_predicts_as_it_prepares_images(tmp_path, photos, capsys):
    folder = save_vit(tmp_path / "vit", num_classes=7)
    # Two batches, of which the second is smaller.
    predict_lib.main([str(folder), str(photos), "--probabilities", "--batch_size=2"])
    header, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    with pytest.raises(ValueError, match="vit is a model of images, not of text$"):
        load_text_run(folder)
    with pytest.raises(SystemExit):
        predict_lib.main([str(folder), str(photos), "--seed=1"])
    assert "is a saved model, of one seed: leave out" in capsys.readouterr().err
    loaded = load_pretrained(folder)
    files = sorted(photos.iterdir())
    logits = loaded.model.apply(loaded.variables, loaded.preprocess(files))
    expected = jax.nn.softmax(logits)
    assert header[4:] == [f"probability of {n}" for n in range(7)]
    assert [row[0] for row in rows] == [str(file) for file in files]
    labels = [str(label) for label in expected.argmax(-1)]
    assert [row[1] for row in rows] == [row[2] for row in rows] == labels
    found = np.array([row[4:] for row in rows], np.float32)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    arrays = tmp_path / "photos.npz"
    np.savez(arrays, images=[np.asarray(Image.open(files[0]))] * 3)
    predict_lib.main([str(folder), str(arrays), "--probabilities", "--batch_size=2"])
    _, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert [row[0] for row in rows] == [f"{arrays}[{n}]" for n in range(3)]
    same = np.array([row[4:] for row in rows], np.float32)
    np.testing.assert_allclose(same, [found[0]] * 3, atol=2e-6)
    # All are named before any is predicted.
    for name in ("a.png", "b.png"):
        (photos / name).touch()
    with pytest.raises(SystemExit, match="2"):
        predict_lib.main([str(folder), str(photos)])
    message = r"^error: 2 of the 5 images .*/a.png \(not .*/b.png \(.*\): replace or"
    assert re.search(message, capsys.readouterr().err)


def test_classes_of_saved_models_have_names(tmp_path, photos, capsys):
    names = {"class_names": ["cat", "dog"]}
    info = {"name": "pets", **names, "origin": "here"}
    info |= {"image_shape": [8, 8, 3], "mean": [0.1] * 3, "std": [0.3] * 3}
    training = {"data": {"standardize": False}}
    data = {**info, "num_train": 7}
    for config in ({"data": data, "training": training}, names):
        folder = save_vit(tmp_path / "vit", num_classes=2, **config)
        predict_lib.main([str(folder), str(photos)])
        _, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
        assert [row[1] for row in rows] == [["cat", "dog"][int(row[2])] for row in rows]
    folder = save_vit(tmp_path / "other", num_classes=3, **names)
    with pytest.raises(SystemExit, match="2"):
        predict_lib.main([str(folder), str(photos)])
    assert "it has 2 class_names, expected 3" in capsys.readouterr().err


def test_a_saved_model_of_nan_warns(tmp_path, photos, monkeypatch):
    loaded = load_pretrained(save_vit(tmp_path / "vit", num_classes=7))
    undefined = jax.tree.map(lambda x: np.full_like(x, np.nan), loaded.variables)
    broken = dataclasses.replace(loaded, variables=undefined)
    monkeypatch.setattr(predict_lib, "load_pretrained", lambda *_, **__: broken)
    with pytest.warns(UserWarning, match="logits are NaN for 3 of 3 inputs, so it"):
        predict_lib.main([str(tmp_path / "vit"), str(photos)])


def test_a_saved_model_averages_the_draws_of_its_run(tmp_path, photos, capsys):
    model = {**CONFIG["model"], "attention": "favor(num_features=3)"}
    info = {"name": "pets", "class_names": ["cat", "dog"], "origin": "here"}
    info |= {"image_shape": [8, 8, 3], "mean": [0.1] * 3, "std": [0.3] * 3}
    training = {"data": {"standardize": True}, "seed": 5, "eval_draws": 3}
    config = CONFIG | {"num_classes": 2, "data": {**info, "num_train": 7}}
    config |= {"model": model, "training": training}
    shapes = pretrained.abstract(pretrained.build(config), config)
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)
    pretrained.save_pretrained(tmp_path / "vit", config, variables)
    folder = str(tmp_path / "vit")
    loaded, files = load_pretrained(folder), sorted(photos.iterdir())

    @quick_jit
    def probabilities(variables, inputs):
        features = variables["random_features"]
        drawn = draw_features(features, jax.random.key(5), 3)
        draws = (jax.tree.map(lambda x, i=i: x[i], drawn) for i in range(3))
        return jnp.stack(
            [
                jax.nn.softmax(
                    loaded.model.apply({**variables, "random_features": draw}, inputs)
                )
                for draw in draws
            ]
        )

    each = probabilities(loaded.variables, loaded.preprocess(files))
    assert np.abs(each[1:] - each[0]).max(axis=(1, 2)).min() > 1e-4
    for words, draws in (([], 3), (["--draws=1"], 1), (["--draws=2"], 2)):
        predict_lib.main([folder, str(photos), "--probabilities", *words])
        _, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
        found = np.array([row[4:] for row in rows], np.float32)
        np.testing.assert_allclose(found, each[:draws].mean(axis=0), atol=2e-6)


def test_a_saved_model_of_points_predicts_files_of_them(tmp_path, capsys):
    model = {**MODEL, "name": "point_transformer"}
    config = {"model": model, "num_classes": 3, "point_shape": [5, 2, 1]}
    folder = save(tmp_path / "saved", config, np.zeros((1, 5, 3), np.float32))
    loaded, sets, names = load_pretrained(folder), [], []
    for count, points in ((3, 4), (1, 35)):
        near = np.float64(normal(points, count, points, 2))
        file = tmp_path / f"{points}.npz"
        # Far from zero, float32 would round them.
        np.savez(file, positions=near + 1e3 * 2.0**20)
        sets.append(np.dstack([near, np.ones((count, points))]))
        np.testing.assert_allclose(loaded.preprocess(file), sets[-1], atol=1e-6)
        names += [f"{file}[{index}]" for index in range(count)]
    files = [str(tmp_path / "4.npz"), str(tmp_path / "35.npz")]
    predict_lib.main([str(folder), *files, "--batch_size=2"])
    _, *rows = csv.reader(io.StringIO(capsys.readouterr().out))
    assert [row[0] for row in rows] == names
    logits = [loaded.model.apply(loaded.variables, jnp.float32(x)) for x in sets]
    expected = jax.nn.softmax(np.concatenate(logits)).max(axis=-1)
    np.testing.assert_allclose([float(row[3]) for row in rows], expected, atol=1e-5)
    np.savez(files[1], positions=np.zeros((1, 4, 3)))
    with pytest.raises(SystemExit, match="2"):
        predict_lib.main([str(folder), *files])
    assert f"{files[1]}: points have 3 axes and 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ({"num_classes": 0}, [], "does not classify images: name a run"),
        ({"num_classes": 7}, ["--top=8"], "--top=8 must be from 1 to 7"),
        ({"num_classes": 7}, ["--draws=2"], "draws=2 needs random features"),
    ],
)
def test_what_a_saved_model_cannot_do(tmp_path, photos, capsys, config, words, message):
    folder = save_vit(tmp_path / "vit", **config)
    with pytest.raises(SystemExit, match="2"):
        predict_lib.main([str(folder), str(photos), *words])
    assert message in capsys.readouterr().err
