import os
from pathlib import Path

import numpy as np
import pytest

import memload
from memload.building import journal
from memload.building.journal import (
    DONE,
    REJECTED,
    Journal,
    is_intact,
    record_type,
)
from memload.building.sources import Column

TYPE = record_type(3, {"label": Column("<i8"), "points": Column("<f4", (2, 2), points=True)})


def records(count: int, status: int = DONE) -> np.ndarray:
    made = np.zeros(count, TYPE)
    made["status"] = status
    made["crc32"] = np.arange(count) + 5
    made["column/label"] = np.arange(count)
    return made


@pytest.fixture
def empty(tmp_path: Path) -> Journal:
    made = Journal(tmp_path, 10, TYPE)
    made.create()
    return made


def test_what_is_written_is_read(empty: Journal) -> None:
    empty.write(3, records(4), [])
    assert [is_intact(record) for record in empty.read(0, 10)] == [
        3 <= row < 7 for row in range(10)
    ]
    assert empty.mapped()["column/label"].tolist() == [0, 0, 0, 0, 1, 2, 3, 0, 0, 0]


def test_creating_it_again_keeps_what_is_there_and_mends_its_size(empty: Journal) -> None:
    empty.write(0, records(10), [])
    empty.create()
    assert all(is_intact(record) for record in empty.read(0, 10))
    os.truncate(empty.folder / "rows", TYPE.itemsize * 4 + 5)
    empty.create()
    assert [is_intact(record) for record in empty.read(0, 10)] == [row < 4 for row in range(10)]


def test_a_record_with_any_byte_altered_is_not_intact(empty: Journal) -> None:
    empty.write(0, records(1), [])
    for position in range(TYPE.itemsize):
        record = empty.read(0, 1)
        record.view(np.uint8)[position] ^= 1
        assert not is_intact(record[0]), position


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
    with pytest.raises(memload.DecodeError, match="column 'x'"):
        journal.set_columns(record, schema, {"x": value})


def test_reasons_are_kept_and_the_last_one_counts(empty: Journal) -> None:
    empty.write(0, records(2, REJECTED), [(0, "first\nline"), (1, "é \udcff \ud800")])
    empty.write(0, records(1, REJECTED), [(0, "again")])
    assert empty.reasons() == {0: "again", 1: "é \udcff \ud800"}


@pytest.mark.parametrize("torn", [b'[3, "cut sh', b"\0" * 40, b"5", b"\xff\xfe"])
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
