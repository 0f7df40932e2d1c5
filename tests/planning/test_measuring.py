"""What the times of a sample's pieces say. A worker begins one where it has ended another."""

from collections.abc import Sequence

import pytest

from memload.planning.measuring import Piece, seconds_per_row, summary


def pieces(worker: int, seconds: Sequence[float], *, rows: int = 1, blocks: int = 0) -> list[Piece]:
    """Return pieces that a worker did one after the other, from a time of its own on."""
    ends = [sum(seconds[: number + 1]) + worker for number in range(len(seconds))]
    return [
        Piece(worker, rows, end - took, end, blocks, ())
        for end, took in zip(ends, seconds, strict=True)
    ]


class Letters:
    """Stands in for a sample of five records."""

    groups, keys = None, list("abcde")

    def __len__(self) -> int:
        return 5


def alone(*parts: Sequence[Piece]) -> list[list[Piece]]:
    """Return chunks that consist of one piece each."""
    return [[piece] for part in parts for piece in part]


@pytest.mark.parametrize(
    ("first", "again", "seconds"),
    [
        # The first piece of each worker is left out.
        (alone(pieces(1, [9, 2, 4]), pieces(2, [8, 6])), [], 4),
        # A piece counts for its rows.
        (alone(pieces(1, [9, 2], rows=1), pieces(2, [9, 10], rows=4)), [], 12 / 5),
        # Nothing else is there.
        (alone(pieces(1, [9]), pieces(2, [5])), [], 7),
        # What is done again counts alone.
        (alone(pieces(1, [9, 2, 4])), alone(pieces(1, [7, 1, 1])), 1),
        # Unless files came from a disk the first time: a block for each row, or more.
        (alone(pieces(1, [9, 2, 4], blocks=1)), alone(pieces(1, [7, 1, 1])), 3),
        (alone(pieces(1, [9, 2, 4], rows=2, blocks=1)), alone(pieces(1, [7, 1, 1])), 1),
    ],
)
def test_a_row_takes_what_a_worker_needs_for_it_once_it_is_at_work(
    first: list[list[Piece]], again: list[list[Piece]], seconds: float
) -> None:
    assert seconds_per_row(first, again, are_groups=False)[0] == pytest.approx(seconds)


def test_of_each_group_the_first_piece_is_left_out() -> None:
    groups = [pieces(1, [9, 2, 4]), pieces(1, [9, 3, 3]), pieces(2, [8, 4, 2])]
    assert seconds_per_row(groups, [], are_groups=True)[0] == pytest.approx(3)


@pytest.mark.parametrize(
    ("seconds", "uncertainty"),
    [
        ([9, 2, 2, 2, 2], 0),
        ([9, 1, 3, 1, 3, 1, 3, 1, 3], 0.378),
        ([9, 2, 2, 2], 1),
        ([9, 2], 1),
    ],
)
def test_the_uncertainty_is_two_standard_errors_or_all_if_little_is_known(
    seconds: list[float], uncertainty: float
) -> None:
    again = alone(pieces(1, [1.0] * 9))  # which says nothing of other records
    found = seconds_per_row(alone(pieces(1, seconds)), again, are_groups=False)[1]
    assert found == pytest.approx(uncertainty, abs=0.001)


@pytest.mark.parametrize(("workers", "seconds_per_record"), [(0, 3), (1, 3), (2, 1.5)])
def test_the_workers_share_the_records_and_begin_after_a_while(
    workers: int, seconds_per_record: float
) -> None:
    first = alone(pieces(1, [9, 2, 4]), pieces(2, [8, 3]))
    first[0] = [first[0][0]._replace(rejects=[(0, "damaged")])]
    found = summary(Letters(), first, [], workers, started=0.25, finish_seconds=7)
    assert found.seconds_per_record == pytest.approx(seconds_per_record)
    assert (found.start_seconds, found.finish_seconds) == (0.75, 7)
    assert (found.records, found.rejected) == (5, 1)
    assert found.reasons == "1 × damaged (such as a)"
