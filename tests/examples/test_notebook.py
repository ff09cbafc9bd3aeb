"""The notebook, in a real kernel, interrupted once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="nbclient (extra test) is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat (extra test) is not installed")

NOTEBOOK = Path(__file__).parents[2] / "scripts" / "examples" / "notebook.ipynb"
LIMIT = 50
pytestmark = [pytest.mark.process, pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def shown(cell: Any) -> str:
    """Return the text that a cell shows."""
    parts = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return "".join(parts)


async def test_all_cells_run_and_an_interrupted_one_leaves_the_world_usable() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, 4)
    client = nbclient.NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": NOTEBOOK.parent}})
    async with client.async_setup_kernel():
        for place, cell in enumerate(notebook.cells):
            if cell.cell_type != "code":
                continue
            executing = asyncio.create_task(client.async_execute_cell(cell, place))
            if "interrupted" in cell.source:
                while "waiting for rank 3" not in shown(cell):  # noqa: ASYNC110  # what it shows is only kept here
                    await asyncio.sleep(0.05)
                await client.km.interrupt_kernel()
            await executing
    texts = [shown(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "<node: rank 0 of 4>" in texts[0]
    assert texts[1:3] == ["array([6., 6., 6.])", "waiting for rank 3\ninterrupted\n"]
    assert "PeerCancelled" in texts[3]
    assert "array([24., 24., 24.])" in texts[3]
    assert texts[4] == "array([1., 1.])"


def test_it_is_kept_without_outputs() -> None:
    notebook: Any = nbformat.read(NOTEBOOK, 4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
