"""Names of users are drawn as they are."""

import dataclasses
import io
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from relattn.evaluation.figures import plain, save_figure
from relattn.evaluation.report import _confusions, _gallery
from relattn.evaluation.shift_curves import curves_of
from relattn.evaluation.shift_plots import Panel, plot
from relattn.evaluation.shift_tables import table
from tests.helpers.shift_results import ONE, TWO, result

SVG = "{http://www.w3.org/2000/svg}"
NAMES = [
    "cat",
    r"$\frac$",
    "$x^2$",
    "cost $5 or $6",
    "$",
    "$$",
    r"\$5 and $6",
    r"a\$b$",
    "{$}_^%&#~",
    "\udcff\ud800",
    "a\x00b\x1b[31m",
    "tab\tand\rreturn",
    "\u202egnp.exe",
    "a\nb",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_name_is_drawn_as_it_is(name):
    figure = Figure(figsize=(1, 1))
    figure.text(0, 0, plain(name))
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    texts = ElementTree.fromstring(file.getvalue()).iter(f"{SVG}text")
    drawn = ["".join(text.itertext()) for text in texts]
    lines = name.split("\n")
    assert drawn == [
        line if line.isprintable() else line.encode("unicode_escape").decode()
        for line in lines
        if line
    ]


@pytest.mark.parametrize("name", ["a.xyz", "a"])
def test_unknown_formats_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="end the name with .png"):
        save_figure(Figure(), tmp_path / name)


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", [r"$\frac$", "\udcff", "\x1b[31m"])
def test_figures_have_any_name(name, tmp_path):
    assert "png" in _confusions(np.eye(2, dtype=int), [name, "b"])
    assert "png" in _gallery([np.ones((3, 3, 1))], [f"{name} predicted as\nb"], "a")
    runs = [result(ONE), result(TWO, recipe="b")]
    runs = [dataclasses.replace(run, dataset=name, run=name) for run in runs]
    panel = Panel(f"{name}, all classes", curves_of(runs, 1))
    plot([panel], tmp_path / "shift.png")
    assert (tmp_path / "shift.png").read_bytes()[1:4] == b"PNG"
    text = table(panel.curves)
    assert "\x1b" not in text and "$" not in text.replace("\\$", "")
