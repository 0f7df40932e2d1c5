"""Builds of every source, killed and run again: the same bytes, and what was done is kept."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Server

pytestmark = pytest.mark.slow

#: Builds argv[1] in this process, which is killed at the third chunk if argv[2] says so.
SCRIPT = """
import os, signal, sys
import memload
from memload.building.worker import RowWork

convert = RowWork.__call__

def interrupted(self, chunk, note_row):
    if chunk.start >= 14 and sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return convert(self, chunk, note_row)

RowWork.__call__ = interrupted
print(memload.build(sys.argv[1], "out.bin", size=16, num_workers=0).converted)
"""


def build(folder: Path, source: str, when: str) -> "subprocess.CompletedProcess[str]":
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", SCRIPT, source, when]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "kind", ["table", "tar", "zip", "parquet", "folder on a server", "tar on a server"]
)
def test_a_killed_build_goes_on_and_gives_the_same_bytes(
    containers: Any, tmp_path: Path, serve: Callable[[Path], Server], kind: str
) -> None:
    containers.directory()
    if kind == "folder on a server":
        source = f"{serve(containers.folder).url}/images"
    elif kind == "tar on a server":
        source = f"{serve(containers.folder).url}/{containers.tar().name}"
    else:
        source = str(getattr(containers, kind)())
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert build(whole, source, "whole").stdout == "30\n"
    assert build(parts, source, "killed").returncode == -9
    resumed = build(parts, source, "resumed")
    assert resumed.stdout == "16\n", resumed.stderr
    for name in ("out.bin", "out.idx"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()
