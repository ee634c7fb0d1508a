"""The notebooks: they run from top to bottom in a fresh kernel, and open in Colab.

What a notebook claims is checked by its author when it is executed and committed; here it must run without an error.
"""

import os
import pathlib
import tomllib

import pytest

nbformat = pytest.importorskip("nbformat", reason="notebooks are read by nbformat (the dev extra)")
nbclient = pytest.importorskip("nbclient", reason="notebooks are executed by nbclient (the dev extra)")
pytest.importorskip("ipykernel", reason="notebooks need a kernel, ipykernel (the dev extra)")

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ADDRESS = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
COLAB = f"https://colab.research.google.com/{ADDRESS.removeprefix('https://').replace('.com', '')}/blob/main/notebooks/"
INSTALL = f'%pip install -q "apgrad[experiments] @ git+{ADDRESS}"'
# A notebook should take less than 90 seconds on two cores. The bound is on a single cell and generous: it ends what
# hangs, and does not fail on a busy machine.
SECONDS_A_CELL = 300
# These notebooks take less time in all where they are compiled quickly, as they compile much and compute little.
COMPILED_QUICKLY = ["01_monte_carlo_gradients", "02_total_propagation_and_chaos"]
COMPILED_QUICKLY += ["04_randomized_memory", "07_train_a_policy_and_a_vae"]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_tidy(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, second = notebook.cells[:2]
    assert first.cell_type == "markdown" and f"({COLAB}{path.name})" in first.source
    assert second.cell_type == "code" and INSTALL in second.source and "except ImportError" in second.source
    assert path.stat().st_size < 500_000
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert not cell.metadata
        assert cell.cell_type == "markdown" or "experiments import" not in cell.source
        for output in cell.get("outputs", []):
            assert output.output_type != "error" and output.get("name") != "stderr", cell.source


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    # The kernel imports this checkout, and has no word on frozen modules to say to debuggers.
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    if path.stem not in COMPILED_QUICKLY:  # The others are compiled as a reader's kernel compiles them.
        for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")])))
    # An error in a cell is raised as nbclient.exceptions.CellExecutionError, with the cell and its traceback.
    at = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=SECONDS_A_CELL, kernel_name="python3", resources=at).execute()
