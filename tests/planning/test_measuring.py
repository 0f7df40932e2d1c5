"""What the times of a sample's pieces say. A worker begins one where it has ended another."""

from collections.abc import Sequence

import pytest

from memload.building.pool import Chunk
from memload.planning.measuring import Conversion, Piece, summary


def pieces(worker: int, seconds: Sequence[float], *, rows: int = 1, blocks: int = 0) -> list[Piece]:
    """Return pieces that a worker did one after the other, from a time of its own on."""
    ends = [sum(seconds[: number + 1]) + worker for number in range(len(seconds))]
    return [
        Piece(worker, rows, end - took, end, blocks, ())
        for end, took in zip(ends, seconds, strict=True)
    ]


class Letters:
    """Stands in for a sample of five records."""

    keys: Sequence[str] = "abcde"

    def __init__(self, groups: Sequence[Chunk] | None) -> None:
        self.groups = groups

    def __len__(self) -> int:
        return 5


def measured(
    first: list[list[Piece]],
    again: list[list[Piece]],
    *,
    num_workers: int = 1,
    groups: Sequence[Chunk] | None = None,
) -> Conversion:
    """Return what is known of conversions that began at 0.25, after which 7 s were needed."""
    return summary(Letters(groups), first, again, num_workers, started=0.25, finish_seconds=7)


def alone(*parts: Sequence[Piece]) -> list[list[Piece]]:
    """Return chunks that consist of one piece each."""
    return [[piece] for part in parts for piece in part]


@pytest.mark.parametrize(
    ("first", "again", "seconds"),
    [
        # The first piece of each worker is left out. Two workers share the rows.
        (alone(pieces(1, [9, 2, 4]), pieces(2, [8, 6])), [], 4 / 2),
        # A piece counts for its rows.
        (alone(pieces(1, [9, 2], rows=1), pieces(2, [9, 10], rows=4)), [], 12 / 5 / 2),
        # Nothing else is there.
        (alone(pieces(1, [9]), pieces(2, [5])), [], 7 / 2),
        # What is done again counts alone.
        (alone(pieces(1, [9, 2, 4])), alone(pieces(1, [7, 1, 1])), 1),
        # Unless files came from a disk the first time: a block for each row, or more.
        (alone(pieces(1, [9, 2, 4], blocks=1)), alone(pieces(1, [7, 1, 1])), 3),
        (alone(pieces(1, [9, 2, 4], rows=2, blocks=1)), alone(pieces(1, [7, 1, 1], rows=2)), 1 / 2),
        # Or unless it is less than the sample.
        (alone(pieces(1, [9, 2, 4])), alone(pieces(1, [7, 1])), 3),
        (alone(pieces(1, [1, 1, 1]), pieces(2, [1, 1])), alone(pieces(1, [50])), 1 / 2),
    ],
)
def test_a_record_takes_what_workers_need_for_it_once_they_are_at_work(
    first: list[list[Piece]], again: list[list[Piece]], seconds: float
) -> None:
    assert measured(first, again, num_workers=2).seconds_per_record == pytest.approx(seconds)


def test_of_each_group_the_first_piece_is_left_out() -> None:
    groups = [pieces(1, [9, 2, 4]), pieces(1, [9, 3, 3]), pieces(2, [8, 4, 2])]
    found = measured(groups, [], num_workers=8, groups=[Chunk(0, 5)])
    assert found.seconds_per_record == pytest.approx(3 / 2)
    assert found.num_workers == 2  # for the others there was nothing to do


@pytest.mark.parametrize(
    ("seconds", "relative_error"),
    [
        ([9, 2, 2, 2, 2], 0),
        ([9, 1, 3, 1, 3, 1, 3, 1, 3], 0.378),
        ([9, 2, 2, 2], 1),
        ([9, 2], 1),
    ],
)
def test_the_relative_error_is_two_standard_errors_or_all_if_little_is_known(
    seconds: list[float], relative_error: float
) -> None:
    again = alone(pieces(1, [1.0] * 9))  # which says nothing of other records
    found = measured(alone(pieces(1, seconds)), again).relative_error
    assert found == pytest.approx(relative_error, abs=0.001)


@pytest.mark.parametrize(("num_workers", "busy"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_a_worker_that_was_replaced_is_not_another_one(num_workers: int, busy: int) -> None:
    first = alone(*(pieces(process, [9, 2, 4]) for process in (1, 2, 3)))
    found = measured(first, [], num_workers=num_workers)
    assert (found.num_workers, found.seconds_per_record) == (busy, pytest.approx(3 / busy))


def test_workers_begin_after_a_while_and_rejects_are_counted() -> None:
    first = alone(pieces(1, [9, 2, 4]), pieces(2, [8, 3]))
    first[0] = [first[0][0]._replace(rejects=[(0, "damaged")])]
    found = measured(first, [])
    assert (found.start_seconds, found.finish_seconds) == (0.75, 7)
    assert (found.records, found.rejected) == (5, 1)
    assert found.reasons == "1 × damaged (such as a)"
