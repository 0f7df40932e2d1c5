"""How long a build takes, of given measurements."""

import pytest

from memload import machine
from memload.planning.disk import DiskRates
from memload.planning.duration import at_once, duration
from memload.planning.measuring import Conversion

MB = 1_000_000


def conversion(seconds_per_record: float, *, uncertainty: float = 0.0) -> Conversion:
    """Workers that start in 1 s, and an index that is written in 2 s."""
    return Conversion(
        seconds_per_record,
        uncertainty=uncertainty,
        start_seconds=1,
        finish_seconds=2,
        records=200,
        rejected=0,
        reasons="",
    )


@pytest.mark.parametrize(
    ("workers", "cores", "records"),
    [(0, 8, 1), (1, 8, 1), (4, 8, 4), (16, 8, 8), (16, 2.5, 2.5), (0, 0.5, 0.5)],
)
def test_as_many_records_are_converted_at_once_as_there_are_workers_with_a_core(
    workers: int, cores: float, records: float
) -> None:
    assert at_once(workers, cores) == records


@pytest.mark.parametrize(
    ("seconds_per_record", "scale", "data", "unwritten", "write", "expected"),
    [
        # The disk keeps up: 5 s of imports and listing, 1 to start, 10 to convert, 2 for the index.
        (0.01, 1, 0, 0, 50 * MB, 5 + 1 + 10 + 2),
        # On a quarter of the cores.
        (0.01, 4, 0, 0, 50 * MB, 5 + 1 + 40 + 2),
        # What is in RAM at the end is written then: 50 of 100 MB, or all 100 of them.
        (0.01, 1, 100 * MB, 50 * MB, 50 * MB, 5 + 1 + 10 + 1 + 2),
        (0.01, 1, 100 * MB, 900 * MB, 50 * MB, 5 + 1 + 10 + 2 + 2),
        # The disk does not keep up: it writes 1 GB in 20 s, whatever of that is in RAM meanwhile.
        (0.002, 1, 1000 * MB, 0, 50 * MB, 5 + 1 + 20 + 2),
        (0.002, 1, 1000 * MB, 300 * MB, 50 * MB, 5 + 1 + 20 + 2),
        # What is converted in 2 s is in RAM then, and takes 20 s to write.
        (0.002, 1, 1000 * MB, 1000 * MB, 50 * MB, 5 + 1 + 22 + 2),
    ],
)
def test_a_thousand_records_take_what_converting_or_writing_them_takes(
    seconds_per_record: float,
    scale: float,
    data: int,
    unwritten: int,
    write: float,
    expected: float,
) -> None:
    found = duration(
        conversion(seconds_per_record),
        DiskRates(write, None),
        records=1000,
        data_bytes=data,
        unwritten_bytes=unwritten,
        begin_seconds=5,
        scale=scale,
    )
    assert found.seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("uncertainty", "low", "high"), [(0, 90, 110), (0.25, 75, 125), (1.5, 0, 250)]
)
def test_the_range_is_that_of_the_sample_and_10_percent_at_least(
    uncertainty: float, low: float, high: float
) -> None:
    found = duration(
        conversion(0.097, uncertainty=uncertainty),
        DiskRates(MB, None),
        records=1000,
        data_bytes=0,
        unwritten_bytes=0,
        begin_seconds=0,
        scale=1,
    )
    assert found == pytest.approx((100, low, high))


@pytest.mark.parametrize(("cores", "limit", "usable"), [(4, None, 4), (4, 2.5, 2.5), (4, 8.0, 4)])
def test_a_process_may_use_its_cores_or_what_its_control_group_allows(
    monkeypatch: pytest.MonkeyPatch, cores: int, limit: float | None, usable: float
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    monkeypatch.setattr(machine, "core_limit", lambda: limit)
    assert machine.usable_cores() == usable
