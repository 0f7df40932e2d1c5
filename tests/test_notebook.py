"""docs/quickstart.ipynb runs from top to bottom, and its network learns."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
notebook.cells.append(nbformat.v4.new_code_cell("print(accuracy)"))
nbclient.NotebookClient(notebook, timeout=120).execute()
print(notebook.cells[-1].outputs[0].text)
"""


@pytest.mark.timeout(300)
def test_the_notebook_runs_and_its_network_learns(tmp_path):
    command = [sys.executable, "-c", RUN, str(NOTEBOOK)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280
    )
    assert not done.returncode, done.stderr
    assert float(done.stdout.split()[-1]) > 0.8


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [
        cell["outputs"] for cell in cells if cell["cell_type"] == "code" and cell["outputs"]
    ] == []
