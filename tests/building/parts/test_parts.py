"""Builds in parts: the flow of one part, and the same bytes as those of one machine."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

import memload


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["ascending", "mixed"])
def test_parts_in_turn_have_the_bytes_of_one_machine(
    pictures: Path,
    tmp_path: Path,
    shard_bytes: Callable[[int], int],
    digests: Callable[[Path], dict[str, str]],
    order: tuple[int, ...],
) -> None:
    options = {"size": 8, "shard_size": shard_bytes(6), "num_workers": 0}
    alone, shared = tmp_path / "alone" / "out.bin", tmp_path / "shared" / "out.bin"
    for output in (alone, shared):
        output.parent.mkdir()
    memload.build(pictures, alone, **options)
    reports = [memload.build(pictures, shared, part=(i, 3), **options) for i in order]
    assert [report.is_published for report in reports] == [False, False, True]
    assert sum(report.converted for report in reports) == 40
    assert digests(shared) == digests(alone)
    assert len(list(itertools.chain(digests(shared)))) == 7 + 1
