"""The notebooks' code runs from top to bottom, and they are kept without what they printed.

Here as programs, without Jupyter; `make notebooks` runs them in kernels of their own.
"""

import json
from pathlib import Path

import pytest
from programs import run_program

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.ipynb"))}


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    # in a process of its own: a notebook chooses its own devices
    code = "\n".join("".join(cell["source"]) for cell in code_cells(NOTEBOOKS[name]))
    status, out, err = run_program(code, tmp_path)
    assert status == 0, err
    assert out


def test_a_cell_that_fails_is_found(tmp_path):
    assert run_program("assert 1 == 2", tmp_path)[0] == 1


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_what_it_printed(name):
    notebook = NOTEBOOKS[name]
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 20_000
    for cell in code_cells(notebook):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert "".join(notebook["cells"][0]["source"]).startswith("# ")


def test_there_are_three_notebooks():
    assert set(NOTEBOOKS) == {"find_the_mistake", "uneven_data", "epoch_as_one_program"}
