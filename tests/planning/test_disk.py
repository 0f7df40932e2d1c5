"""The rates of a disk, with a clock that goes on by a second each time that somebody looks."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from memload.planning import disk
from memload.storage.file_reads import DirectFile

FILE_BYTES = 3 << 20


@pytest.fixture(autouse=True)
def small_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FILE_BYTES", FILE_BYTES)
    clock = itertools.count()
    monkeypatch.setattr(disk, "time", SimpleNamespace(perf_counter=lambda: next(clock)))


def test_what_is_written_and_read_in_a_second_is_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "open_direct", lambda file: DirectFile(os.dup(file), 4096))
    assert disk.measure_disk(tmp_path) == (FILE_BYTES, FILE_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_past_the_page_cache_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "open_direct", lambda file: None)
    assert disk.measure_disk(tmp_path) == (FILE_BYTES, None)
