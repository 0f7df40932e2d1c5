import ctypes
import errno
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import memload
from memload.building import journal
from memload.building.journal import (
    DONE,
    REJECTED,
    Journal,
    differences,
    intact,
    listing_changes,
    locked,
    record_type,
    seal,
)
from memload.building.sources import Column
from memload.storage.keys import Keys

TYPE = record_type(3, {"label": Column("<i8"), "points": Column("<f4", (2, 2), points=True)})


def records(count: int, status: int = DONE) -> np.ndarray:
    made = np.zeros(count, TYPE)
    made["status"] = status
    made["crc32"] = np.arange(count) + 5
    made["column/label"] = np.arange(count)
    seal(made)
    return made


@pytest.fixture
def empty(tmp_path: Path) -> Journal:
    made = Journal(tmp_path, 10, TYPE)
    made.create()
    return made


def test_a_new_journal_says_that_nothing_is_done(empty: Journal) -> None:
    assert not any(intact(record) for record in empty.read(0, 10))
    assert empty.mapped().shape == (10,)
    assert empty.reasons() == {}


def test_what_is_written_is_read(empty: Journal) -> None:
    empty.write(3, records(4), [])
    assert [intact(record) for record in empty.read(0, 10)] == [3 <= row < 7 for row in range(10)]
    assert empty.mapped()["column/label"].tolist() == [0, 0, 0, 0, 1, 2, 3, 0, 0, 0]


def test_creating_it_again_keeps_what_is_there_and_mends_its_size(empty: Journal) -> None:
    empty.write(0, records(10), [])
    empty.create()
    assert all(intact(record) for record in empty.read(0, 10))
    os.truncate(empty.folder / "rows", TYPE.itemsize * 4 + 5)
    empty.create()
    assert [intact(record) for record in empty.read(0, 10)] == [row < 4 for row in range(10)]


def test_a_record_with_any_byte_altered_is_not_intact() -> None:
    for position in range(TYPE.itemsize):
        record = records(1)
        record.view(np.uint8)[position] ^= 1
        assert not intact(record[0]), position


def test_columns_are_put_into_a_record_as_they_are() -> None:
    schema = {
        "label": Column("<i8"),
        "f": Column("<f4", (2,)),
        "b": Column("|b1"),
        "u": Column("|u1"),
        "big": Column(">i2"),
    }
    record = np.zeros(1, record_type(1, schema))[0]
    journal.set_columns(
        record,
        schema,
        {"label": 3.0, "f": [1e-3, np.nan], "b": True, "u": np.int64(255), "big": -7},
    )
    assert record["column/label"] == 3
    assert record["column/f"][0] == np.float32(1e-3)
    assert np.isnan(record["column/f"][1])
    assert (record["column/b"], record["column/u"], record["column/big"]) == (True, 255, -7)
    journal.set_columns(
        record, schema, {"label": 2**62 + 1, "f": [1, 2], "b": False, "u": 0, "big": True}
    )
    assert record["column/label"] == 2**62 + 1


@pytest.mark.parametrize(
    ("descr", "value"),
    [
        *(
            ("<i8", value)
            for value in (
                0.9,
                2.5,
                np.nan,
                np.inf,
                "1",
                1j,
                None,
                2**63,
                [1],
                np.datetime64(5, "s"),
            )
        ),
        *(("|u1", value) for value in (-1, 256, np.int64(300), 0.5)),
        *(("|b1", value) for value in (2, 0.5)),
        *(("<f8", value) for value in ("1.5", 1j, np.ma.masked_array(1.0, mask=True))),
        ("<f4", 1e39),
        ("<f2", 70000.0),
    ],
)
def test_a_value_that_would_become_another_is_refused(descr: str, value: object) -> None:
    schema = {"x": Column(descr)}
    record = np.zeros(1, record_type(1, schema))[0]
    with pytest.raises(memload.DecodeError, match="column 'x': expected"):
        journal.set_columns(record, schema, {"x": value})


def test_records_that_are_not_all_there_are_told(empty: Journal) -> None:
    os.truncate(empty.folder / "rows", TYPE.itemsize * 4 + 5)
    for read in (lambda: empty.read(3, 6), empty.mapped):
        with pytest.raises(OSError, match="truncated by somebody else"):
            read()
    assert len(empty.read(0, 4)) == 4


def test_folders_are_left_when_an_unfinished_build_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "out.building"
    with locked(folder):
        (folder / "rows").touch()
        (folder / "@eaDir").mkdir()
        journal.remove(folder)
    assert [path.name for path in folder.iterdir()] == ["@eaDir"]
    assert "found folders (@eaDir), which are left" in caplog.text


def test_a_record_of_zeros_is_not_intact() -> None:
    blank = np.zeros(1, TYPE)
    seal(blank)
    assert not intact(blank[0])


def test_reasons_are_kept_and_the_last_one_counts(empty: Journal) -> None:
    empty.write(0, records(2, REJECTED), [(0, "first\nline"), (1, "é \udcff \ud800")])
    empty.write(0, records(1, REJECTED), [(0, "again")])
    assert empty.reasons() == {0: "again", 1: "é \udcff \ud800"}


@pytest.mark.parametrize(
    "torn", [b'[3, "cut sh', b"\0" * 40, b"5", b"\xff\xfe", b'\n{"a"', b"[1]", b"null", b"[]"]
)
def test_a_reason_cut_short_by_a_crash_costs_itself_alone(empty: Journal, torn: bytes) -> None:
    empty.write(0, records(1, REJECTED), [(0, "before")])
    with (empty.folder / "rejects.jsonl").open("ab") as file:
        file.write(b"\n" + torn)
    empty.write(1, records(1, REJECTED), [(7, "after")])
    assert empty.reasons() == {0: "before", 7: "after"}


def test_the_reason_is_kept_before_the_record(empty: Journal) -> None:
    (empty.folder / "rows").unlink()
    with pytest.raises(FileNotFoundError):
        empty.write(0, records(1, REJECTED), [(0, "why")])
    assert empty.reasons() == {0: "why"}


def test_the_lock_is_held_by_one_and_says_by_whom(tmp_path: Path) -> None:
    folder = tmp_path / "out.building"
    with (
        locked(folder),
        pytest.raises(memload.BuildError, match=f"found one running \\(process {os.getpid()}\\)"),
        locked(folder),
    ):
        pass
    with locked(folder):
        pass


def test_the_lock_of_a_process_that_ended_anyhow_does_not_matter(tmp_path: Path) -> None:
    folder = tmp_path / "out.building"
    code = f"""
import os, signal
from pathlib import Path
from memload.building.journal import locked
with locked(Path({str(folder)!r})):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert (folder / "lock").exists()
    with locked(folder):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("how", ["python", "other"])
def test_the_lock_does_not_outlive_its_build_in_a_child_of_the_process(
    tmp_path: Path, how: str
) -> None:
    folder = tmp_path / "out.building"
    with locked(folder):
        if how == "python":
            child = os.fork()
            if not child:
                signal.pause()
        else:  # that runs none of Python's hooks, and so keeps all descriptors
            child = ctypes.CDLL(None).fork()
            if not child:
                ctypes.CDLL(None).pause()
    try:
        with locked(folder):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_the_lock_of_a_killed_build_is_not_held_by_its_child(tmp_path: Path) -> None:
    folder = tmp_path / "out.building"
    code = f"""
import os, signal
from pathlib import Path
from memload.building.journal import locked
with locked(Path({str(folder)!r})):
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, b"here")
        signal.pause()
    os.read(reads, 4)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait() == -signal.SIGKILL
        try:
            with locked(folder):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("again", [False, True])
def test_a_lock_whose_folder_went_away_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    folder = tmp_path / "out.building"
    usual = journal._lock

    def late(descriptor: int) -> None:  # the other one ends, and a third may begin, just before
        (folder / "lock").unlink()
        if again:
            (folder / "lock").touch()
        usual(descriptor)

    monkeypatch.setattr(journal, "_lock", late)
    with pytest.raises(memload.BuildError, match="has just ended"), locked(folder):
        pass


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without locks."""

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(journal, "_lock", refuse)


@pytest.mark.usefixtures("lockless")
def test_without_locks_a_file_says_who_builds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "out.building"
    with locked(folder):
        assert "this filesystem has no locks (No locks available)" in caplog.text
        told = f"found one by process {os.getpid()} .*if it was killed, remove"
        with pytest.raises(memload.BuildError, match=told), locked(folder):
            pass
    assert [path.name for path in folder.iterdir()] == ["lock"]
    with locked(folder):
        pass


@pytest.mark.usefixtures("lockless")
@pytest.mark.parametrize(
    ("owner", "recognised"),
    [
        ("{ended} {here}", True),
        ("{ended} elsewhere", False),
        ("1 {here}", False),
        ("", False),
        ("x {here}", False),
    ],
)
def test_without_locks_one_that_was_killed_is_recognised_on_the_same_machine(
    owner: str, recognised: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "out.building"
    folder.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    text = owner.format(ended=ended.pid, here=platform.node())
    (folder / "owner").write_text(text)
    if recognised:
        with locked(folder):
            assert (folder / "owner").read_text() == f"{os.getpid()} {platform.node()}"
    else:
        with pytest.raises(memload.BuildError, match="found one by process"), locked(folder):
            pass
        assert (folder / "owner").read_text() == text


@pytest.mark.usefixtures("lockless")
def test_without_locks_one_that_was_killed_is_recognised_under_this_processs_own_number(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "out.building"  # as in a container, where each is the first process
    folder.mkdir()
    (folder / "owner").write_text(f"{os.getpid()} {platform.node()}")
    for _ in range(2):
        with locked(folder):
            with pytest.raises(memload.BuildError, match="found one by process"), locked(folder):
                pass
            (folder / "owner").rename(folder / "kept")
        (folder / "kept").rename(folder / "owner")


@pytest.mark.usefixtures("lockless")
def test_without_locks_the_name_of_another_build_that_has_begun_since_stays(tmp_path: Path) -> None:
    folder = tmp_path / "out.building"
    with locked(folder):
        (folder / "owner").write_text("1 elsewhere")
    assert (folder / "owner").read_text() == "1 elsewhere"


def test_a_lock_that_fails_otherwise_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(journal, "_lock", refuse)
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path / "out.building"):
        pass


def test_records_that_the_disk_does_not_give_raise_and_do_not_end_the_process(
    empty: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(address: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(journal, "fault_in", fails)
    with pytest.raises(OSError, match="Input/output error"):
        empty.mapped()


def test_json_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    journal.write_json(path, {"a": 1})

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal, "sync", fail)
    with pytest.raises(OSError, match="No space"):
        journal.write_json(path, {"a": 2})
    assert journal.read_json(path) == {"a": 1}
    assert journal.read_json(tmp_path / "none.json") is None


def test_differences_are_named_with_both_values() -> None:
    before = {"settings": {"size": [8, 8], "fit": "crop"}, "classes": ["a"], "old": 1}
    now = {"settings": {"size": [9, 8], "fit": "crop"}, "classes": ["a"] * 100, "new": 2}
    told = differences(before, now)
    assert "size: was [8, 8], now [9, 8]" in told
    assert any(
        text.startswith("classes: was ['a'], now ['a', ") and text.endswith("…") for text in told
    )
    assert "old: was 1, now None" in told
    assert "new: was None, now 2" in told
    assert len(told) == 4
    assert differences(before, before) == []


def listing(**files: int) -> dict[str, np.ndarray]:
    keys = Keys.of(list(files))
    stat = np.array([(size, 0) for size in files.values()], np.int64)
    return {"key/offsets": keys.offsets, "key/bytes": keys.data, "stat": stat}


def test_changes_of_the_source_are_counted_and_named(tmp_path: Path) -> None:
    journal.write_listing(tmp_path, listing(a=1, b=2, c=3))
    assert listing_changes(tmp_path, listing(a=1, b=2, c=3)) == ""
    assert listing_changes(tmp_path, listing(a=1, b=2)) == "1 removed (c)"
    assert listing_changes(tmp_path, listing(a=9, b=2, c=3, d=4)) == "1 added (d); 1 changed (a)"
    assert "other labels or another order" in listing_changes(tmp_path, listing(b=2, a=1, c=3))
    many = listing(a=1, b=2, c=3, **{f"x{i}": 0 for i in range(1000)})
    assert listing_changes(tmp_path, many) == "1,000 added (x0, x1, x10, …)"


def test_names_with_newlines_are_told_in_one_line(tmp_path: Path) -> None:
    journal.write_listing(tmp_path, listing(a=1))
    assert "\n" not in listing_changes(tmp_path, listing(**{"a": 1, "new\nline\udcff": 2}))


def test_columns_with_nan_are_the_same_as_themselves(tmp_path: Path) -> None:
    journal.write_listing(tmp_path, {"column/x": np.array([np.nan, 1])})
    assert listing_changes(tmp_path, {"column/x": np.array([np.nan, 1])}) == ""
    assert listing_changes(tmp_path, {"column/x": np.array([np.nan, 2])})
    assert listing_changes(tmp_path, {"column/x": np.array([np.nan, 1], np.float32)})


def test_a_listing_that_is_lost_counts_as_changed(tmp_path: Path) -> None:
    assert "not known any more" in listing_changes(tmp_path, listing(a=1))
    (tmp_path / "source").write_bytes(b"\0" * 100)
    assert "not known any more" in listing_changes(tmp_path, listing(a=1))
