"""The README: its blocks of Python run in an empty file, and its numbers are those of benchmarks/results."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import memload

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
import readme  # noqa: E402
import report  # noqa: E402

TEXT = report.README.read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
#: Numbers that say what was measured, and not what came out.
SETTINGS = {
    *("200", "2", "16", "64"),  # H200, and numbers of cores
    *("18", "50"),  # ResNet-18 and ResNet-50
    *("3.11", "2.4", "12.8"),  # versions
    *("10", "3", "224", "256", "352", "8"),  # CIFAR-10, channels, sides, KiB of a row
}


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_python_runs_in_an_empty_file(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, containers: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    memload.build(containers.directory(), "out.bin", size=256, num_workers=0)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_the_tables_are_those_of_the_results() -> None:
    lines = report.newest(ROOT / "benchmarks" / "results")
    assert readme.with_tables(TEXT, lines) == TEXT, "run python benchmarks/report.py"
    assert all(table in TEXT for table in readme.tables(lines).values())


def test_other_numbers_are_in_the_results_too() -> None:
    lines = report.newest(ROOT / "benchmarks" / "results")
    text = re.sub(r"```.*?```|<!-- \w+ -->.*?<!-- end -->|\]\([^)]*\)", "", TEXT, flags=re.DOTALL)
    for phrase in readme.phrases(lines).values():
        assert phrase in text
        text = text.replace(phrase, "")
    assert set(re.findall(r"\d+(?:[.,]\d+)*", text)) <= SETTINGS
