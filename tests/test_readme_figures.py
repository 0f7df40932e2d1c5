"""The README: its blocks of Python run in an empty file, and its numbers are settings, or come from results."""

import re
from pathlib import Path
from typing import Any

import pytest

import memload

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
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
    for name in ("out.bin", "train.bin", "val.bin"):
        memload.build(containers.directory(), name, size=256, num_workers=0)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_other_numbers_are_settings():
    text = re.sub(r"```.*?```|<!-- compared -->.*<!-- end -->", "", TEXT, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->[^<]*<!---->|<!--.*?-->|\]\([^)]*\)", "", text)
    text = re.sub(
        r"^\|.*disk.*?\n\n", "", text, flags=re.MULTILINE | re.DOTALL
    )  # what is arithmetic
    assert set(re.findall(r"\d+(?:[.,]\d+)*", text)) <= SETTINGS
