"""What others do to an unfinished build, and to the place that it is meant for."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import memload
from memload.building.journal import Journal
from memload.building.sources import Column, Record
from memload.building.unfinished import Unfinished


class Numbered:
    """A data set of small pictures with a label; ``act`` is called with the number of each first."""

    def __init__(
        self, act: Callable[[int], object] | None = None, change: Callable[[int], int] | None = None
    ) -> None:
        self.act, self.change = act, change

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        if self.act:
            self.act(number)
        value = self.change(number) if self.change else number
        return np.full((4, 4, 3), value, np.uint8), number % 3


class Stop(BaseException):
    """Ends a build as Ctrl-C does."""


def stop_at(stop: int) -> Callable[[int], None]:
    def act(number: int) -> None:
        if number == stop:
            raise Stop

    return act


def stopped(job: Unfinished) -> None:
    raise Stop


def waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data set of 4×4, beside which a finished one of 6×6 waits to be published."""
    output = folder / "out.bin"
    build(Numbered(), output, size=4)
    with monkeypatch.context() as patched:
        patched.setattr(Unfinished, "publish", stopped)
        with pytest.raises(Stop):
            build(Numbered(), output, size=6, overwrite=True)
    return output


def build(source: Any, output: Path, **options: Any) -> memload.BuildReport:
    return memload.build(source, output, **{"size": 4, "num_workers": 0} | options)


def interrupted(output: Path, **options: Any) -> None:
    """Leave an unfinished build with its first ten rows done."""
    with pytest.raises(Stop):
        build(Numbered(stop_at(10)), output, **options)
    assert output.with_suffix(".building").exists()


# The place of the output


@pytest.mark.parametrize("name", ["out.bin", "out.idx", "out.rejects.csv"])
def test_a_file_that_appears_while_a_build_runs_is_not_replaced(tmp_path: Path, name: str) -> None:
    output, precious = tmp_path / "out.bin", tmp_path / name

    def act(number: int) -> None:
        if number == 5:
            precious.write_text("precious")
            if name == "out.rejects.csv":
                raise ValueError("rejected, so that there is a ledger")

    with pytest.raises(
        memload.BuildError, match=rf"{name}: expected no such file, found one that was made while"
    ):
        build(Numbered(act), output)
    assert precious.read_text() == "precious"
    assert [path.name for path in tmp_path.glob("out*") if path.is_file()] == [name]
    with pytest.raises(memload.BuildError, match="move that file away, or say --overwrite"):
        build(Numbered(), output)
    precious.rename(tmp_path / "mine")
    report = build(Numbered(), output)
    assert report.converted == 0
    assert report.samples == (19 if name == "out.rejects.csv" else 20)
    assert memload.verify(output).ok
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_ledger_that_is_somebody_elses_stays_where_nothing_was_rejected(tmp_path: Path) -> None:
    mine = tmp_path / "out.rejects.csv"
    build(Numbered(lambda number: number == 5 and mine.write_text("mine")), tmp_path / "out.bin")
    assert mine.read_text() == "mine"


def test_a_file_that_appears_while_a_build_runs_is_replaced_where_that_was_said(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.bin"
    build(Numbered(lambda number: number == 5 and output.write_text("old")), output, overwrite=True)
    assert memload.verify(output).ok


def test_a_finished_build_is_published_over_a_file_that_appeared_once_that_is_said(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out.bin"
    with pytest.raises(memload.BuildError, match="found one that was made while"):
        build(Numbered(lambda number: number == 5 and output.write_text("old")), output)
    assert build(Numbered(), output, overwrite=True).converted == 0
    assert memload.verify(output).ok


@pytest.mark.parametrize("name", ["x" * 300 + "/out.bin", "a\0b.bin"])
def test_a_place_that_cannot_be_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises((memload.BuildError, ValueError), match="expected"):
        build(Numbered(), tmp_path / name)


def test_a_process_that_may_start_no_workers_is_told_before_anything_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(daemon=True))
    with pytest.raises(memload.BuildError, match="found a daemonic one"):
        build(Numbered(), tmp_path / "out.bin", num_workers=1)
    assert list(tmp_path.iterdir()) == []
    build(Numbered(), tmp_path / "out.bin", num_workers=0)


# The data set


def test_another_data_set_of_the_same_length_is_not_gone_on_with(tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    interrupted(output)
    with pytest.raises(memload.BuildError, match="its sample 0 has other pixels"):
        build(Numbered(change=lambda number: 100 + number), output)
    report = build(Numbered(change=lambda number: 100 + number), output, overwrite=True)
    assert report.converted == 20
    assert int(memload.MemmapDataset(output)[19][0].max()) == 119


@pytest.mark.parametrize("changed", [0, 9])
def test_the_first_and_the_last_sample_that_is_done_are_looked_at(
    tmp_path: Path, changed: int
) -> None:
    output = tmp_path / "out.bin"
    interrupted(output)
    with pytest.raises(memload.BuildError, match=f"its sample {changed} has other pixels"):
        build(Numbered(change=lambda number: 100 if number == changed else number), output)


def test_samples_between_are_looked_at(tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    interrupted(output)
    with pytest.raises(memload.BuildError, match="has other pixels"):
        build(Numbered(change=lambda number: number if number in (0, 9) else 100), output)


def test_a_data_set_that_fails_where_it_did_not_is_not_gone_on_with(tmp_path: Path) -> None:
    output, fails = tmp_path / "out.bin", False

    def act(number: int) -> None:
        if number == (4 if fails else 10):
            raise ValueError("broken") if fails else Stop

    with pytest.raises(Stop):
        build(Labelled([0] * 20, act), output)
    fails = True
    with pytest.raises(
        memload.BuildError, match="its sample 4 could be used, and now cannot: ValueError: broken"
    ):
        build(Labelled([0] * 20, act), output)


class Labelled:
    """A source that is no folder of files, with labels of its own."""

    classes, notes = None, ()
    schema = {"label": Column("<i8")}  # noqa: RUF012  # a property for all that is asked of it

    def __init__(self, labels: list[int], act: Callable[[int], object] | None = None) -> None:
        self.labels, self.act, self.keys = (
            labels,
            act,
            [str(number) for number in range(len(labels))],
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Record:
        if self.act:
            self.act(index)
        return Record(str(index), np.zeros((4, 4, 3), np.uint8), {"label": self.labels[index]})

    def listing(self) -> dict[str, np.ndarray]:
        return {"length": np.array([len(self.labels)])}


def test_other_labels_of_the_same_pictures_are_not_gone_on_with(tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    with pytest.raises(Stop):
        build(Labelled([0] * 20, stop_at(10)), output)
    with pytest.raises(memload.BuildError, match="its sample 0 has another 'label'"):
        build(Labelled([1] * 20), output)


def test_the_same_data_set_is_gone_on_with(tmp_path: Path) -> None:
    output = tmp_path / "out.bin"
    interrupted(output)
    assert build(Numbered(), output).converted == 10
    assert memload.verify(output).ok


# The folder


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_a_file_server_made_is_left_and_in_nobodys_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, overwrite: bool
) -> None:
    output, theirs = tmp_path / "out.bin", tmp_path / "out.building" / "@eaDir"

    def act(number: int) -> None:
        if number == 5:
            (theirs / "inner").mkdir(parents=True)

    with caplog.at_level(logging.WARNING, "memload"):
        report = build(Numbered(act), output)
    assert report.samples == 20
    assert "found folders (@eaDir), which are left" in caplog.text
    assert (theirs / "inner").is_dir()
    assert [path.name for path in theirs.parent.iterdir()] == ["@eaDir"]
    if overwrite:
        build(Numbered(change=lambda number: 9), output, overwrite=True)
    else:
        for path in tmp_path.glob("out.*"):
            if path.is_file():
                path.unlink()
        build(Numbered(), output)
    assert memload.verify(output).ok


def test_a_shard_that_was_truncated_while_a_build_ran_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, usual = tmp_path / "out.bin", Unfinished.complete

    def truncated(self: Unfinished, *arguments: Any) -> None:
        os.truncate(self.folder / "out.bin", 4096 + 48)
        usual(self, *arguments)

    monkeypatch.setattr(Unfinished, "complete", truncated)
    with pytest.raises(memload.BuildError, match="expected 5,056 bytes, found 4,144"):
        build(Numbered(), output)
    monkeypatch.setattr(Unfinished, "complete", usual)
    assert not output.with_suffix(".idx").exists()
    assert build(Numbered(), output).converted == 19  # the first row was whole
    assert memload.verify(output).ok


@pytest.mark.parametrize("size", [0, 100])
def test_records_that_were_truncated_while_a_build_ran_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    output, usual = tmp_path / "out.bin", Journal.mapped

    def truncated(self: Journal) -> np.ndarray:
        os.truncate(self.folder / "rows", size)
        return usual(self)

    monkeypatch.setattr(Journal, "mapped", truncated)
    with pytest.raises(memload.BuildError, match="truncated by somebody else"):
        build(Numbered(), output)
    monkeypatch.setattr(Journal, "mapped", usual)
    build(Numbered(), output)
    assert memload.verify(output).ok


@pytest.mark.skipif(sys.platform != "linux", reason="processes are spawned, and get copies")
def test_a_data_set_is_not_indexed_in_the_process_that_workers_are_forked_from(
    tmp_path: Path,
) -> None:
    """As those that open a file at the first sample: its place would be moved by all workers at once."""

    def note(number: int) -> None:
        with (tmp_path / "processes").open("a") as file:
            file.write(f"{os.getpid()}\n")

    output = tmp_path / "out.bin"
    interrupted(output)
    build(Numbered(note), output, num_workers=2)  # goes on, and looks at samples that are done
    arrays = tmp_path / "arrays.bin"
    memload.build(Numbered(note), arrays, mode="array", num_workers=1)
    done = (tmp_path / "processes").read_text().split()
    assert len(done) > 20
    assert str(os.getpid()) not in done
    assert int(memload.MemmapDataset(output)[19][0].max()) == 19


@pytest.mark.parametrize("kills", [1, 2, 3, 4])
def test_a_build_that_is_cleared_away_never_passes_for_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    output = waiting(tmp_path, monkeypatch)
    unlink, left = Path.unlink, iter(range(kills))

    def killed(path: Path, missing_ok: bool = False) -> None:
        if path.parent.suffix == ".building" and next(left, None) is None:
            raise Stop
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(Stop):
            build(Numbered(), output, size=8, overwrite=True)
    report = build(Numbered(), output, size=6, overwrite=True)
    assert (report.samples, report.rejected) == (20, 0)
    assert memload.MemmapDataset(output).shape == (3, 6, 6)
    assert memload.verify(output).ok


def test_a_shard_that_is_gone_when_it_is_to_be_published_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = waiting(tmp_path, monkeypatch)
    (tmp_path / "out.building" / "out.bin").unlink()
    with pytest.raises(memload.BuildError, match="that wait to be published, found none"):
        build(Numbered(), output, size=6, overwrite=True)
    assert memload.MemmapDataset(output).shape == (3, 4, 4)  # the old one, whole


def test_shards_that_came_while_a_build_ran_go_when_it_is_published_over_them(
    tmp_path: Path,
) -> None:
    def appear(number: int) -> None:
        if number == 15:
            other = tmp_path / "other"
            other.mkdir()
            build(Numbered(), other / "out.bin", shard_size=4096 + 48 * 7)
            for path in other.iterdir():
                path.rename(tmp_path / path.name)

    output = tmp_path / "out.bin"
    with pytest.raises(memload.BuildError, match="made while the build ran"):
        build(Numbered(appear), output)
    build(Numbered(), output, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out.bin", "out.idx"]
