"""What of a record's troubles is kept, and that none of them passes for a value."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload


class Broken:
    """A data set whose second sample raises something of 50 MB."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if number == 1:
            raise self.error("x" * 50_000_000)
        return np.full((4, 4, 3), number, np.uint8), number


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [ValueError, memload.DecodeError])
def test_a_reason_of_any_length_is_a_line_in_the_ledger(
    tmp_path: Path, num_workers: int, error: type[Exception]
) -> None:
    report = memload.build(Broken(error), tmp_path / "out.bin", size=4, num_workers=num_workers)
    assert report.ledger is not None
    text = report.ledger.read_text()
    assert "xxx" in text
    assert "…" in text
    assert len(text) < 1100


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_a_process_that_runs_out_of_something_rejects_no_picture(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    usual = os.open

    def full(path: Any, *arguments: Any) -> int:
        if str(path).endswith("03.jpg"):
            raise OSError(number, os.strerror(number))
        return usual(path, *arguments)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(memload.BuildError, match=r"03\.jpg cannot be read: "):
        memload.build(folder, tmp_path / "out.bin", size=8, num_workers=0)
    monkeypatch.setattr(os, "open", usual)
    assert memload.build(folder, tmp_path / "out.bin", size=8, num_workers=0).samples == 12


class Masked:
    """A data set of masked arrays, of which the second has something masked."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[Any, int]:
        pixels = np.ma.masked_array(np.full((4, 4, 3), number, np.uint8), mask=False)
        if number == 1:
            pixels[2, 2, 1] = np.ma.masked
        return pixels, number


@pytest.mark.parametrize("mode", ["RGB", "array"])
def test_a_masked_array_does_not_lose_its_mask_in_silence(tmp_path: Path, mode: Any) -> None:
    options = {} if mode == "array" else {"size": 4}
    report = memload.build(Masked(), tmp_path / "out.bin", mode=mode, num_workers=0, **options)
    assert report.ledger is not None
    assert "masked" in report.ledger.read_text()
    assert memload.MemmapDataset(tmp_path / "out.bin").labels.tolist() == [0, 2]
