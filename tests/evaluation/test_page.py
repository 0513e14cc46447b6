"""The page on which you move test images."""

import base64
import dataclasses
import html
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from configs import demo
from relattn import cli, models, training
from relattn.data import load_data, preprocess
from relattn.evaluation import page as page_lib
from relattn.evaluation.compare import compare
from relattn.evaluation.page import Page, write_page
from relattn.evaluation.shift import shift_images
from relattn.evaluation.shift_runs import open_shift_runs
from relattn.training.saved_run import SavedRun
from tests.helpers import browser
from tests.helpers.export import unchecked_annotations

MAX_SHIFT = 2
HEIGHT, WIDTH = 16, 20


def train(folder, dataset="fashion_mnist", **model):
    config = demo.get_config("invariant")
    with config.unlocked():
        config.model.update(num_layers=1, dim=8, num_heads=2, mlp_dim=7)
        config.model.update(attention="softmax", **model)
        config.update(num_steps=8, num_epochs=0, progress=False)
        config.schedule.warmup_steps = 0
        config.optimizer.learning_rate = 0.05
        config.data.update(name=dataset, num_validation=25)
        with config.ignore_type():
            config.data.image_size = (HEIGHT, WIDTH)
    training.train_and_evaluate(config, folder, devices=jax.local_devices()[:1])
    return folder


@pytest.fixture(scope="module")
def invariant(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "invariant")


@pytest.fixture(scope="module")
def workdirs(invariant):
    plain = {"anchor": "none", "periodic": False, "pool": "mean"}
    return [invariant, train(invariant.parent / "plain", **plain)]


@pytest.fixture(scope="module")
def page(workdirs):
    path = workdirs[0].parent / "page.html"
    write_page(
        open_shift_runs(workdirs),
        path,
        descriptions=["Same <everywhere>.", "Knows places."],
        max_shift=MAX_SHIFT,
        num_shown=3,
        num_images=5,
    )
    return path


def read(page):
    text = page.read_text("utf-8")
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])


def decode(text, *shape, dtype=np.uint8):
    return np.frombuffer(base64.b64decode(text), dtype).reshape(*shape)


def test_runs_that_do_not_fit_together_raise(invariant):
    with pytest.raises(ValueError, match="no run: name at least one"):
        open_shift_runs([])
    with pytest.raises(ValueError, match="--data_dir=here does not apply"):
        open_shift_runs([invariant], data_dir="here")
    for call in (Page, compare):
        for runs, got in (([], "no run"), ([training.load_run(invariant)], "a Run")):
            message = f"got {got}: pass a list of runs, from relattn.*open_shift_runs"
            with unchecked_annotations(), pytest.raises(ValueError, match=message):
                call(runs)
    runs = open_shift_runs([invariant] * 2)
    with pytest.raises(ValueError, match="got 1 names for 2 runs: pass one for each"):
        Page(runs, names=["one"])
    with pytest.raises(ValueError, match="got 3 descriptions for 2 runs"):
        Page(runs, descriptions=["", "", ""])
    with pytest.raises(ValueError, match="no test image can move 8 pixels"):
        Page(runs, boundary="zeros")
    with pytest.raises(ValueError, match="max_shift=16 does not fit images of 20x16"):
        Page(runs, max_shift=16)
    for key in ("num_shown", "num_images"):
        with pytest.raises(ValueError, match=f"{key}=0 must be an integer of at least"):
            Page(runs, **{key: 0})


@pytest.mark.parametrize(
    ("size", "change", "message"),
    [
        (32, {}, r"image size \(32, 32\), .* has \(16, 20\): a page needs"),
        ((HEIGHT, WIDTH), {"dataset": "mnist"}, "set 'mnist', .* has 'fashion_mnist'"),
    ],
)
def test_a_run_on_other_images_raises(size, change, message, invariant):
    (run,) = open_shift_runs([invariant])
    (other,) = open_shift_runs([invariant], image_size=size)
    with pytest.raises(ValueError, match=message):
        Page([run, dataclasses.replace(other, **change)], max_shift=MAX_SHIFT)


def test_a_run_on_photographs_raises(invariant):
    (run,) = open_shift_runs([invariant])
    info = dataclasses.replace(run.info, streamed=True)
    task = dataclasses.replace(run.saved.task, info=info)
    saved = dataclasses.replace(run.saved, task=task)
    with pytest.raises(ValueError, match="a page needs images in memory"):
        Page([dataclasses.replace(run, saved=saved)])


def test_a_split_of_another_type_raises(invariant):
    """A data set of one's own needs only the methods of the protocol."""
    (run,) = open_shift_runs([invariant])
    split = Lazy(run.split)
    with unchecked_annotations():
        run = dataclasses.replace(run, split=split)
        with pytest.raises(ValueError, match="a page needs images in memory"):
            Page([run])
        with pytest.raises(ValueError, match="num_images=3 needs .* got Lazy: leave"):
            compare([run], num_images=3)


class Lazy:
    def __init__(self, split):
        self.batches, self.length = split.batches, len(split)

    def __len__(self):
        return self.length


@pytest.mark.slow
def test_a_run_is_read_once_for_its_curves_and_its_page(
    workdirs, page, tmp_path, monkeypatch
):
    load, read_seeds = SavedRun.load, []

    def counted(self, *args):
        read_seeds.append(self.workdir)
        return load(self, *args)

    monkeypatch.setattr(SavedRun, "load", counted)
    options = ["--max_shift=2", "--boundary=circular", "--num_images=5", "--page"]
    folders = [f"--workdir={folder}" for folder in workdirs]
    cli.eval_shift([*folders, f"--output={tmp_path}", *options])
    assert read_seeds == workdirs
    models = read(tmp_path / "page.html")["models"]
    for model, expected in zip(models, read(page)["models"], strict=True):
        assert model["name"] == expected["name"]
        shown = decode(expected["probabilities"], 3, -1)
        np.testing.assert_array_equal(decode(model["probabilities"], 30, -1)[:3], shown)


def test_the_page_has_what_the_runs_predict(page, workdirs):
    data = read(page)
    size = 2 * MAX_SHIFT + 1
    assert data["labels"] == [0, 1, 2] and data["numImages"] == 5
    descriptions = [model["description"] for model in data["models"]]
    assert descriptions == ["Same <everywhere>.", "Knows places."]
    images = decode(data["images"], 3, HEIGHT, WIDTH, 1)
    for model, workdir in zip(data["models"], workdirs, strict=True):
        run = training.load_run(workdir)
        assert model["name"] == workdir.name
        found = decode(model["probabilities"], 3, size, size, 10)
        split = load_data(run.config.data).test
        chosen = [np.flatnonzero(split.labels == label)[0] for label in range(5)]
        resized = preprocess(split.images[np.array(chosen)], image_size=(HEIGHT, WIDTH))
        np.testing.assert_array_equal(images, np.round(255 * resized[:3]))
        correct, predict = [], training.make_predict_fn(run)
        for dy, dx in ((-2, 1), (0, 0), (2, -2)):
            logits = predict(np.roll(resized, (dy, dx), axis=(1, 2)))
            expected = np.asarray(jax.nn.softmax(logits))
            row, column = dy + MAX_SHIFT, dx + MAX_SHIFT
            np.testing.assert_allclose(
                found[:, row, column] / 255, expected[:3], atol=0.51 / 255
            )
            correct = (expected.argmax(-1) == np.arange(5)).mean()
            assert model["accuracy"][row * size + column] == pytest.approx(correct)
    exact = data["models"][0]
    assert len(set(exact["accuracy"])) == 1


def test_attention_maps_belong_to_the_moved_patches(page):
    exact, plain = read(page)["models"]
    size = 2 * MAX_SHIFT + 1
    assert (exact["reader"], plain["reader"]) == ("CLS", "all patches")
    assert exact["grid"] == [4, 5]
    packed = decode(exact["maps"], 3, size, size, 10)
    # The same map for every shift; its patches move with the image.
    np.testing.assert_array_equal(
        packed, np.broadcast_to(packed[:, :1, :1], packed.shape)
    )
    assert (packed.max() >> 4) == 15 or (packed & 15).max() == 15
    starts = decode(exact["starts"], 3, size, size, 2, dtype="<u2").astype(int)
    shifts = np.indices((size, size)).transpose(1, 2, 0)
    expected = (starts[:, :1, :1] + shifts) % (HEIGHT, WIDTH)
    np.testing.assert_array_equal(starts, expected)
    assert not decode(plain["starts"], 3, size, size, 2, dtype="<u2").any()


def test_the_page_names_the_predicted_class_and_starts_beyond_a_byte(invariant):
    found = np.full((2, 600), 1 / 600)
    found[0, :2] = 0.3999, 0.4001
    found[1, -1] += 1e-5
    starts = np.array([[0, 299], [300, 7]])
    steps = [(found, np.ones((2, 1, 1)), starts)]
    run, bar = training.load_run(invariant), tqdm(disable=True)
    model, correct = page_lib._model(run, steps, np.array([1]), 1, bar)
    assert correct.tolist() == [[True, False]]
    # Rounded to a byte, the probabilities of several classes would be equal.
    assert decode(model["probabilities"], 2, 600).argmax(axis=-1).tolist() == [1, 599]
    assert decode(model["starts"], 2, 2, dtype="<u2").tolist() == starts.tolist()


def test_models_without_maps_take_no_room_for_them(invariant):
    (run,) = open_shift_runs(invariant)
    task = dataclasses.replace(run.saved.task, model=models.AlexNet(10))
    saved = dataclasses.replace(run.saved, task=task)
    assert page_lib._num_patches(run) == 20
    assert page_lib._num_patches(dataclasses.replace(run, saved=saved)) == 0


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path):
    with pytest.raises(OSError, match="the page .* is a folder: name a file in it"):
        write_page([], tmp_path)


def test_logits_of_nan_are_refused(invariant):
    run = training.load_run(invariant)
    undefined = jax.tree.map(lambda x: np.full_like(x, np.nan), run.variables)
    page = Page(open_shift_runs([invariant]), max_shift=0, num_images=1)
    with pytest.raises(ValueError, match="logits of shifted images are NaN: look for"):
        page.add(dataclasses.replace(run, variables=undefined))


@pytest.mark.slow
def test_with_zeros_every_image_can_move_by_every_shift(tmp_path):
    workdir, path = train(tmp_path / "digits", "mnist"), tmp_path / "page.html"
    options = {"max_shift": 1, "num_shown": 3, "num_images": 3}
    write_page(open_shift_runs([workdir]), path, boundary="zeros", **options)
    data = read(path)
    (model,) = data["models"]
    images = jnp.float32(decode(data["images"], 3, HEIGHT, WIDTH, 1)) / 255
    assert images[:, 1:-1, 1:-1].any(axis=(1, 2, 3)).all()
    border = np.ones((HEIGHT, WIDTH), bool)
    border[1:-1, 1:-1] = False
    assert not images[:, border].any()
    predict = training.make_predict_fn(training.load_run(workdir))
    found = decode(model["probabilities"], 3, 3, 3, 10) / 255
    for dy, dx in np.ndindex(3, 3):
        logits = predict(shift_images(images, (dx - 1, dy - 1), "zeros"))
        expected = jax.nn.softmax(logits)
        np.testing.assert_allclose(found[:, dy, dx], expected, atol=1 / 255)


def test_the_page_is_small_for_models_of_the_demo(page):
    size = page_lib._page_bytes(np.zeros((3, HEIGHT, WIDTH, 1)), 25, [10, 10], [20, 40])
    assert size == pytest.approx(page.stat().st_size, abs=2000)
    shown = np.zeros((30, 32, 32, 1))
    assert page_lib._page_bytes(shown, 17**2, [10] * 4, [128] * 4) < 5e6


@pytest.mark.slow
def test_maps_are_left_out_of_a_page_that_is_too_large(
    page, workdirs, tmp_path, monkeypatch
):
    options = {"max_shift": MAX_SHIFT, "num_shown": 3, "num_images": 5}
    shown = np.zeros((3, HEIGHT, WIDTH, 1))
    smaller = page_lib._page_bytes(shown, 25, [10, 10], [0, 0])
    monkeypatch.setattr(page_lib, "MAX_BYTES", smaller)
    path = tmp_path / "page.html"
    write_page(open_shift_runs(workdirs), path, **options)
    assert read(path)["mapsLeftOut"] and not read(page)["mapsLeftOut"]
    for model, complete in zip(read(path)["models"], read(page)["models"], strict=True):
        assert "maps" not in model and "maps" in complete
        assert model["probabilities"] == complete["probabilities"]
    monkeypatch.setattr(page_lib, "MAX_BYTES", smaller - 1)
    with pytest.raises(ValueError, match="choose a smaller max_shift or fewer runs"):
        write_page(open_shift_runs(workdirs), path, **options)


@pytest.mark.quick("1400")
@pytest.mark.skipif(not browser.CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("width", [browser.DESKTOP, browser.PHONE])
def test_dragging_an_image_changes_the_text(width, page, tmp_path):
    script = """<script>
    const where = () => document.getElementById("position").textContent;
    const says = () => data.models[1].says.textContent;
    state.image = 0; show();
    const box = stage.getBoundingClientRect();
    const one = box.width / data.shape[1], seen = [[where(), says()]];
    const send = (type, x, y) => stage.dispatchEvent(new PointerEvent(type,
      {clientX: box.x + x * one, clientY: box.y + y * one, pointerId: 1}));
    send("pointerdown", 5, 5); send("pointermove", 6, 3);
    seen.push([where(), says()]);
    send("pointermove", 9, 5); send("pointerup", 9, 5); send("pointermove", 2, 2);
    seen.push([where()]);
    stage.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft"}));
    seen.push([where()]);
    document.querySelectorAll("#images button")[1].click();
    seen.push([where()]);
    seen.push([document.documentElement.scrollWidth <= innerWidth], [innerWidth]);
    const within = id => {
      const box = get(id).getBoundingClientRect();
      return box.top >= 0 && box.bottom <= 640;
    };
    document.body.style.minHeight = "3000px";
    scrollTo(0, 300);
    seen.push([scrollY], [within("stage") && within("answers")]);
    seen.push([document.querySelectorAll(".answers dd").length]);
    seen.push([Array.from(document.querySelectorAll(".model p"), p => p.textContent)]);
    document.body.id = JSON.stringify(seen);
    </script></body>"""
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text("utf-8").replace("</body>", script), "utf-8")
    opened = browser.open_page(copy, width)
    assert "CONSOLE" not in opened.stderr
    found = re.search(r'<body id="([^"]*)"', opened.stdout)[1]
    seen = json.loads(html.unescape(found))
    assert [row[0] for row in seen] == [
        "T-shirt/top, not moved",
        "T-shirt/top, moved 1 px right, 2 px up",
        "T-shirt/top, moved 2 px right",
        "T-shirt/top, moved 1 px right",
        "Trouser, not moved",
        True,
        width,
        300,
        True,
        2,
        ["Same <everywhere>.", "Knows places."],
    ]
    assert seen[0][1] != seen[1][1]


@pytest.mark.skipif(not browser.CHROMIUM, reason="needs chromium")
def test_an_error_on_the_console_is_found(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("<html><script>throw Error('boom')</script></html>")
    (message,) = browser.console_errors(page, browser.PHONE)
    assert "boom" in message


def test_the_page_opens_on_an_image_that_one_run_loses_in_moves():
    # Runs x images x shifts; no shift is the second of three.
    steady = np.array([[1, 1, 1], [1, 1, 1], [0, 1, 0], [1, 1, 1]], bool)
    fragile = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [0, 1, 0]], bool)
    # At image 1 they differ most, but one run gets it wrong unmoved.
    assert page_lib._first_shown(np.stack([steady, fragile]), 1) == 3
    assert page_lib._first_shown(np.stack([fragile, steady]), 1) == 3
    assert page_lib._first_shown(np.stack([~steady, ~steady]), 1) == 0
    # With a third run like the fragile one, the others keep image 0 alone.
    third = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 1, 0]], bool)
    assert page_lib._first_shown(np.stack([steady, fragile, third]), 1) == 0
    assert page_lib._first_shown(fragile[None], 1) == 2


def test_the_page_names_itself_and_its_scales(page):
    text = page.read_text("utf-8")
    assert text.count("Move the image: who still recognises it?") == 2
    assert '<a href="https://github.com/relattn/relattn">' in text
    data = read(page)
    unmoved = (2 * MAX_SHIFT + 1) ** 2 // 2
    found = [decode(model["probabilities"], 3, -1, 10) for model in data["models"]]
    right = np.stack([p.argmax(-1) == np.arange(3)[:, None] for p in found])
    assert data["first"] == page_lib._first_shown(right, unmoved)
