"""The HTML report of a run."""

import dataclasses
import importlib
import re

import jax
import numpy as np
import pytest

from relattn import training
from relattn.data import ImageData
from relattn.data import load as load_lib
from relattn.evaluation import report as report_lib
from relattn.evaluation.report import confusion_matrix, report
from tests.helpers import browser
from tests.helpers.export import unchecked_annotations

NAMES = ("<cat>", r"$\frac$", "bird & co")


def load_noise(config):
    rng = np.random.default_rng(0)
    return ImageData.from_arrays(
        "noise",
        rng.integers(0, 256, (61, 8, 8, 1), dtype=np.uint8),
        rng.integers(0, 3, 61),
        NAMES,
        num_validation=11,
        test_images=rng.integers(0, 256, (23, 8, 8, 1), dtype=np.uint8),
        test_labels=rng.integers(0, 3, 23),
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    config = importlib.import_module("configs.performer").get_config("mnist,smoke")
    with config.unlocked():
        config.model.update(
            num_layers=1, dim=8, num_heads=2, mlp_dim=7, patch_size=4, position="none"
        )
        config.model.attention = "softmax"
        config.data.update(source="noise_for_reports", name="noise", image_size=8)
        config.update(batch_size=10, eval_batch_size=7, num_steps=4, progress=False)
        config.eval_every_steps = 2
    load_lib.register_data("noise_for_reports", load_noise)
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    training.train_and_evaluate(config, folder, devices=jax.local_devices()[:1])
    yield folder
    del load_lib.LOADERS["noise_for_reports"]


def test_the_page_is_complete_and_needs_no_other_file(workdir, capsys):
    report_lib.main([f"--workdir={workdir}"])
    assert capsys.readouterr().out == f"Written to {workdir}/report.html\n"
    page = (workdir / "report.html").read_text("utf-8")
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings == [
        "Results",
        "Curves",
        "Confusion matrix",
        "Accuracy of each class",
        "The most confident errors",
        "Attention maps",
        "Configuration",
    ]
    sources = re.findall(r'(?:src|href)="([^"]{,22})', page)
    assert len(sources) == 5
    assert all(source.startswith("data:") for source in sources)
    assert all(re.findall(r'<img alt="([^"]*)"', page))
    assert "Attention weights of the CLS token in the last layer" in page
    assert "<td>&lt;cat&gt;</td>" in page and "<cat>" not in page
    assert "<td>model.attention</td><td>softmax" in page


def test_a_model_of_nan_warns_and_classifies_nothing_correctly(workdir):
    run = training.load_run(workdir)
    undefined = jax.tree.map(lambda x: np.full_like(x, np.nan), run.variables)
    with pytest.warns(UserWarning, match="logits are NaN for 7 of 7 inputs, so it"):
        page = report(dataclasses.replace(run, variables=undefined), num_images=7)
    assert "7 test images, 0.00% of them classified correctly" in page
    counts = [int(n) for n in re.findall(r"<td>0.0%</td><td>(\d+)</td>", page)]
    assert sum(counts) == 7 and "<p>There are none.</p>" in page


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_images_of_any_channels_are_drawn(channels, monkeypatch):
    image = np.arange(6 * channels, dtype=np.uint8).reshape(2, 3, channels)
    shown = []
    monkeypatch.setattr(
        report_lib, "_image", lambda figure, alt: shown.append(figure) or alt
    )
    report_lib._gallery([image], ["a"], "Errors")
    pixels = shown[0].axes[0].images[0].get_array()
    expected = [0, 1, 1] if channels == 2 else [0, 1, 2]
    expected = image[..., 0] if channels == 1 else image[..., expected]
    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": "runs/a"}, r"must be a run, such as load_run\('runs/a'\), got str"),
        ({"num_images": 0}, "num_images=0 must be an integer of at least 1"),
        ({"num_images": 2.5}, "num_images=2.5 must be an integer of at least 1"),
        ({"data": load_noise(None).test}, "data must be a data set, .* ImageSplit"),
    ],
)
def test_other_arguments_raise(options, message, workdir):
    run = training.load_run(workdir)
    with unchecked_annotations(), pytest.raises(ValueError, match=message):
        report(**{"run": run, **options})


def test_data_that_have_moved_are_read_where_they_are(workdir, monkeypatch):
    read = []

    def load(config):
        read.append(config.data_dir)
        return load_noise(config)

    monkeypatch.setitem(load_lib.LOADERS, "noise_for_reports", load)
    report_lib.main([f"--workdir={workdir}", "--num_images=3", "--data_dir=moved"])
    assert read == ["moved"]


@pytest.mark.slow
@pytest.mark.skipif(not browser.CHROMIUM, reason="needs chromium")
@pytest.mark.parametrize("width", [browser.DESKTOP, browser.PHONE])
def test_the_page_opens_without_errors(width, workdir, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(report(training.load_run(workdir)), "utf-8")
    assert browser.dead_links([page]) == []
    assert browser.console_errors(page, width) == []


@pytest.mark.slow
def test_the_numbers_are_those_of_the_evaluation(workdir):
    run = training.load_run(workdir)
    page = report(run)
    test = load_noise(None).test
    predicted = run.predict(test.images).labels
    assert f"23 test images, {100 * np.mean(predicted == test.labels):.2f}%" in page
    for label, name in enumerate(("&lt;cat&gt;", r"$\frac$", "bird &amp; co")):
        chosen = test.labels == label
        accuracy = 100 * np.mean(predicted[chosen] == label)
        row = f"<td>{name}</td><td>{accuracy:.1f}%</td><td>{chosen.sum()}</td>"
        assert row in page
    few = 100 * np.mean(predicted[:10] == test.labels[:10])
    assert f"<p>10 test images, {few:.2f}%" in report(run, num_images=10)


def test_confusions_count_rows_of_true_classes():
    labels, predicted = np.array([0, 0, 2, 2, 2]), np.array([1, 0, 2, 1, 1])
    expected = [[1, 1, 0], [0, 0, 0], [0, 2, 1]]
    assert confusion_matrix(labels, predicted, 3).tolist() == expected


def test_many_classes_are_a_list_of_the_most_frequent_confusions():
    counts = np.eye(37, dtype=int) * 5
    counts[3, 11], counts[7, 2] = 2, 4
    shown = report_lib._confusions(counts, [f"c{i}" for i in range(37)])
    assert "<img" not in shown
    rows = re.findall("<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", shown)
    assert rows == [("c7", "c2", "4"), ("c3", "c11", "2")]
