"""How long a build takes, of given measurements."""

import pytest

from memload import machine
from memload.planning.disk import DiskRates
from memload.planning.duration import at_once, duration, range_factor
from memload.planning.measuring import Conversion

MB = 1_000_000


def conversion(seconds_per_record: float, *, relative_error: float = 0.0) -> Conversion:
    """Workers that start in 1 s, and an index that is written in 2 s."""
    return Conversion(
        seconds_per_record,
        num_workers=2,
        relative_error=relative_error,
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
        # A disk of unknown rate keeps up.
        (0.01, 1, 1000 * MB, 1000 * MB, None, 5 + 1 + 10 + 2),
    ],
)
def test_a_thousand_records_take_what_converting_or_writing_them_takes(
    seconds_per_record: float,
    scale: float,
    data: int,
    unwritten: int,
    write: float | None,
    expected: float,
) -> None:
    found = duration(
        conversion(seconds_per_record),
        DiskRates(write, None, False),
        records=1000,
        data_bytes=data,
        unwritten_bytes=unwritten,
        listing_seconds=5,
        scale=scale,
        range_factor=1.1,
    )
    assert found.seconds == pytest.approx(expected)


def test_starting_may_take_twice_as_long_or_half_and_converting_what_is_uncertain() -> None:
    found = duration(
        conversion(0.097),
        DiskRates(MB, None, False),
        records=1000,
        data_bytes=0,
        unwritten_bytes=0,
        listing_seconds=7,
        scale=1,
        range_factor=1.25,
    )
    assert found == pytest.approx((10 + 97, 5 + 97 / 1.25, 20 + 97 * 1.25))


@pytest.mark.parametrize(
    ("of_sample", "load", "is_other_machine", "factor"),
    [
        (0, 0, False, 1.1),
        (0.25, 0, False, 1.25),
        (0, 1, False, 2.2),
        (0, 0, True, 1.65),
        (1, 0.5, True, 2 * 1.5 * 1.5),
    ],
)
def test_other_records_other_processes_and_other_cores_are_uncertain(
    of_sample: float, load: float, is_other_machine: bool, factor: float
) -> None:
    measured = conversion(1, relative_error=of_sample)
    found = range_factor(measured, load=load, is_other_machine=is_other_machine)
    assert found == pytest.approx(factor)


@pytest.mark.parametrize(("cores", "limit", "usable"), [(4, None, 4), (4, 2.5, 2.5), (4, 8.0, 4)])
def test_a_process_may_use_its_cores_or_what_its_control_group_allows(
    monkeypatch: pytest.MonkeyPatch, cores: int, limit: float | None, usable: float
) -> None:
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    monkeypatch.setattr(machine, "core_limit", lambda: limit)
    assert machine.usable_cores() == usable
