import numpy as np
import pytest
from matplotlib.figure import Figure

from relattn.evaluation.shift_curves import curves_of
from relattn.evaluation.shift_plots import CONSISTENCY, Panel, plot
from tests.helpers.shift_results import ONE, TWO, find_published, result


@pytest.fixture
def figure(monkeypatch):
    """The saved figure, not its file."""
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self))
    return saved


def test_curves_of_both_measures_share_a_color(figure, tmp_path):
    runs = [result(ONE), result(TWO, seed=1, recipe="b")]
    curves = curves_of(runs, 1, find_published)
    plot([Panel("mnist", curves)], tmp_path / "shift.png")
    top, bottom = figure[0].axes
    assert (top.get_ylabel(), bottom.get_ylabel()) == ("accuracy", CONSISTENCY)
    for i, curve in enumerate(curves):
        line, random = bottom.lines[2 * i : 2 * i + 2]
        assert line.get_ydata().tolist() == curve.metrics.consistency.tolist()
        assert set(random.get_ydata()) == {float(curve.random.consistency)}
        assert line.get_color() == random.get_color() == top.lines[2 * i].get_color()
        published = top.lines[2 * i + 1]
        assert list(published.get_xdata()) == [-2, -1, 0, 1]
        assert list(published.get_ydata()) == [0.125, 0.25, 0.75, 0.5]
    (legend,) = figure[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "favor [run0]",
        "Known (published)",
        "favor [run1]",
        "consistency under random shifts along x and y",
    ]


def test_curves_along_y_are_plotted_by_dy(figure, tmp_path):
    curves = curves_of([result(ONE, axis="y")], 1)
    plot([Panel("mnist", curves)], tmp_path / "shift.png", axis="y")
    for ax in figure[0].axes:
        assert list(ax.lines[0].get_xdata()) == [-1, 0, 1]


def test_maps_have_a_row_for_each_dy(figure, tmp_path):
    correct = np.random.default_rng(0).random((9, 4)) < 0.5
    correct[4] = True
    curves = curves_of([result(correct, axis="xy")], None)
    plot([Panel("mnist", curves)], tmp_path / "shift.png", axis="xy")
    accuracy, consistency, colors = figure[0].axes
    for ax, measure in (accuracy, "accuracy"), (consistency, "consistency"):
        (image,) = ax.images
        values = image.get_array()
        for dx, dy in curves[0].shifts:
            expected = getattr(curves[0].at((dx, dy)), measure)
            # Down is positive, as in an image.
            assert values[1 + dy, 1 + dx] == expected
        assert image.get_clim() == (0, 1)
        assert image.get_extent() == [-1.5, 1.5, 1.5, -1.5]
        assert "3 to 4 images, by shift" in ax.get_xlabel()
    assert CONSISTENCY in colors.get_ylabel()
    low, high = (f"{x(curves[0].metrics.accuracy):.1%}" for x in (np.min, np.max))
    assert (
        f"mnist\nfavor\naccuracy {low} to {high}; random shifts: "
        in accuracy.get_title()
    )
