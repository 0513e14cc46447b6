"""The notebooks run from top to bottom."""

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


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_runs_and_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "clear the outputs before a commit"
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(notebook, timeout=300, resources=resources).execute()
    assert any("image/png" in str(cell.outputs) for cell in cells)
