"""The notebooks run as they stand."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_new_kernel_and_is_kept_without_results(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells), "results in the file would be of yesterday"
    NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in cells for output in cell.outputs if "data" in output]
    assert any("text/html" in output["data"] and "diversifed" in output["data"]["text/html"] for output in shown)
    assert any("image/png" in output["data"] for output in shown)
