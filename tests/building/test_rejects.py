"""A data set of which many samples cannot be used is not published."""

import numpy as np
import pytest
from click.testing import CliRunner

import memload
from memload.cli import main

TOTAL = 40


class Mixed:
    """A data set of 40 samples. ``reasons`` says what is raised for the first ones."""

    def __init__(self, *reasons):
        self.reasons = dict(enumerate(reasons))
        self.read: list[int] = []

    def __len__(self):
        return TOTAL

    def __getitem__(self, row):
        self.read.append(row)
        if row in self.reasons:
            raise memload.DecodeError(self.reasons[row])
        return np.full((8, 8, 3), row, np.uint8), row


def build(source, folder, **options):
    return memload.build(source, folder / "out.bin", **{"size": 8, "num_workers": 0} | options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_than_a_tenth_rejected_publishes_nothing(num_workers, tmp_path):
    assert build(Mixed(*4 * ["bad"]), tmp_path, num_workers=num_workers).rejected == 4
    before = np.load(tmp_path / "out.bin")
    mixed = Mixed(*5 * ["bad"])
    with pytest.raises(
        memload.BuildError, match=r"5 of 40 samples cannot be used: .* At most 10% may"
    ):
        build(mixed, tmp_path, num_workers=num_workers, overwrite=True)
    assert np.array_equal(np.load(tmp_path / "out.bin"), before)
    report = build(mixed, tmp_path, num_workers=num_workers, overwrite=True, max_rejects="13%")
    assert (report.samples, report.rejected, report.converted) == (35, 5, 5)


def test_the_three_most_frequent_reasons_are_shown_with_their_counts(tmp_path):
    lines = [f"line {line} is 'bad'" for line in range(9)]
    with pytest.raises(memload.BuildError) as caught:
        build(Mixed(*lines, *6 * ["b"], "rare", *7 * ["c"], "line 12 is 'odd'"), tmp_path)
    shown = "10 × line 0 is 'bad' (such as 0); 7 × c (such as 16); 6 × b (such as 9)"
    assert shown in str(caught.value)
    assert "rare" not in str(caught.value)
    ledger = tmp_path / "out.building" / "out.rejects.csv"
    assert str(ledger) in str(caught.value)
    assert len(ledger.read_text().splitlines()) == 25


def test_mended_samples_are_taken_by_the_same_command(tmp_path):
    with pytest.raises(memload.BuildError):
        build(Mixed(*7 * ["bad"]), tmp_path)
    report = build(Mixed(), tmp_path)
    assert (report.samples, report.rejected, report.converted) == (40, 0, 7)
    assert {path.name for path in tmp_path.iterdir()} == {"out.bin", "out.idx"}


@pytest.mark.parametrize(
    ("limit", "most"),
    [("50%", 20), ("50", 40), (20, 20), ("0", 0), (0, 0), (0.5, 20), (1.0, 40), ("7.5 %", 3)],
)
def test_limits_are_shares_and_counts(limit, most, tmp_path):
    rejected = min(most, TOTAL - 1)
    assert build(Mixed(*rejected * ["x"]), tmp_path, max_rejects=limit).rejected == rejected
    if most + 1 < TOTAL:
        with pytest.raises(memload.MemloadError, match="--max-rejects"):
            build(Mixed(*(most + 1) * ["x"]), tmp_path, max_rejects=limit, overwrite=True)


@pytest.mark.parametrize("limit", [-1, "x", "101%", 1.5, "0.5", True, None, "-1%", float("nan")])
def test_what_is_no_limit_is_an_error(limit, tmp_path):
    with pytest.raises(ValueError, match=r"max_rejects: .* neither a share"):
        build(Mixed(), tmp_path, max_rejects=limit)
    assert not list(tmp_path.iterdir())


def test_the_command_ends_with_status_1_and_takes_a_limit(folder, tmp_path):
    for path in sorted(folder.glob("*/*.jpg"))[:2]:
        path.write_bytes(b"")
    arguments = ["build", str(folder), str(tmp_path / "out.bin"), "-s", "8", "-j", "1"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1
    assert "2 of 12 samples cannot" in done.output
    assert "2 × the file is empty (such as ant/00.jpg)" in done.output
    assert not (tmp_path / "out.idx").exists()
    assert CliRunner().invoke(main, [*arguments, "--max-rejects", "2"]).exit_code == 0
    assert memload.verify(tmp_path / "out.bin").rows == 12
