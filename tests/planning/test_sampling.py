"""Which records are a sample."""

from collections.abc import Sequence

import numpy as np
import pytest

from memload.building.sources.record import Record
from memload.planning.sampling import Sample


class Numbers:
    """A source of so many records, whose keys are their positions. It may have groups."""

    classes, schema, notes = (), {}, ()

    def __init__(self, count: int, group_rows: int | None = None) -> None:
        self.keys = [f"{position:06d}" for position in range(count)]
        self.group_starts = None if group_rows is None else list(range(0, count, group_rows))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> Record:
        return Record(f"{index:06d}", index, {})


def positions(sample: Sample) -> np.ndarray:
    assert [sample[row].image for row in range(len(sample))] == [int(key) for key in sample.keys]
    return np.array([int(key) for key in sample.keys])


@pytest.mark.parametrize(
    ("records", "workers", "size"), [(10_000, 0, 200), (10_000, 64, 1024), (150, 2, 150)]
)
@pytest.mark.parametrize("group_rows", [None, 75, 5000])  # two of 75 would be too few
def test_a_sample_has_200_records_or_16_for_each_worker(
    records: int, workers: int, size: int, group_rows: int | None
) -> None:
    assert len(set(positions(Sample(Numbers(records, group_rows), workers)))) == size


def test_it_is_from_everywhere_in_random_order_and_the_same_each_time() -> None:
    found = positions(Sample(Numbers(10_000), 2))
    assert len(set(found.tolist())) == 200
    for half in (found[:100], found[100:]):
        counts, _ = np.histogram(half, bins=5, range=(0, 10_000))
        assert counts.min() >= 10
    np.testing.assert_array_equal(found, positions(Sample(Numbers(10_000), 2)))


def test_of_groups_it_has_the_first_records_of_random_ones() -> None:
    sample = Sample(Numbers(10_000, group_rows=100), 25)
    assert sample.groups is not None
    assert len(sample.groups) == 8
    found = positions(sample)
    starts = [found[group.start] for group in sample.groups]
    assert starts not in (sorted(starts), sorted(starts, reverse=True))
    for group, start in zip(sample.groups, starts, strict=True):
        assert start % 100 == 0
        np.testing.assert_array_equal(found[group.start : group.stop], start + np.arange(50))
    assert sample.first_chunks(25) == sample.chunks(25) == sample.groups


def test_of_a_group_that_a_build_divides_the_sample_is_divided_too() -> None:
    sample = Sample(Numbers(10_000, group_rows=5000), 2)
    assert sample.groups is None
    assert len(sample.first_chunks(2)) == 50


def test_records_that_are_read_together_stay_together() -> None:
    class Together(Numbers):
        def __getitems__(self, indices: Sequence[int]) -> list[Record]:
            return [self[index] for index in indices]

    sample = Sample(Together(10_000), 2)
    assert sample.first_chunks(2) == sample.chunks(2)


def test_chunks_hold_all_rows_and_the_first_ones_are_small() -> None:
    sample = Sample(Numbers(10_000), 2)
    for chunks in (sample.first_chunks(2), sample.chunks(2)):
        assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == [*range(200)]
    assert len(sample.first_chunks(2)) > len(sample.chunks(2))
