"""The notebooks run from top to bottom, and are stored with what they show."""

import pathlib

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = [
    pytest.param(path, id=path.stem, marks=marks)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    # The others take half a minute or more.
    for marks in [[] if path.stem.startswith("01") else [pytest.mark.slow]]
]


def cells_with_figures(notebook):
    return {
        cell.id
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_runs_and_stores_its_figures(path, tmp_path):
    """The first runs outside the checkout too; the others use the studies."""
    outside = path.stem.startswith("01")
    folder = tmp_path if outside else path.parent
    notebook = nbformat.read(path, as_version=4)
    stored = cells_with_figures(notebook)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    assert stored == cells_with_figures(notebook) != set()
    for cell in notebook.cells:
        if cell.id in stored:
            assert cell.metadata.mystnb.image.alt
    if outside:
        said = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
        assert said == "no results here: run this notebook in a clone of relattn\n"
