"""The limits of memory that a Loader is given, and what is counted under them."""

import math
from typing import Any

import numpy as np
import pytest

from memload.feeds import limits
from memload.feeds.interface import ReadCounts
from memload.feeds.limits import NO_LIMITS, MemoryLimits


def test_a_limit_is_a_whole_number_of_bytes_or_a_text() -> None:
    assert MemoryLimits.of("64GB", None) == (64 * 10**9, None)
    assert MemoryLimits.of(np.int64(5), " 2 MiB ") == (5, 2 << 20)
    assert MemoryLimits.of(0, "0") == (0, 0)


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        (64e9, TypeError, r"a whole number of bytes or a text such as '64GB', not 64000000000\.0"),
        (math.nan, TypeError, "a whole number of bytes or a text such as '64GB', not nan"),
        (True, TypeError, "a whole number of bytes or a text such as '64GB', not True"),
        (b"64GB", TypeError, "a whole number of bytes or a text such as '64GB', not b'64GB'"),
        (-1, ValueError, "at least 0, not -1"),
        ("-1GB", ValueError, "'-1GB' is not a size"),
        ("64 apples", ValueError, "'64 apples' is not a size"),
        ("", ValueError, "'' is not a size"),
        ("nan", ValueError, "'nan' is not a size"),
    ],
)
def test_what_is_no_size_is_refused(size: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"^cache_bytes.* {message}"):
        MemoryLimits.of(size, None)
    with pytest.raises(error, match=rf"^resident_bytes.* {message}"):
        MemoryLimits.of(None, size)


@pytest.mark.parametrize(
    ("feed", "refused"),
    [
        ("auto", []),
        ("disk", []),
        ("resident", ["cache_bytes"]),
        ("dma", ["resident_bytes"]),
        ("uva", ["resident_bytes"]),
        ("pinned", ["resident_bytes"]),
        ("cpu", ["resident_bytes"]),
    ],
)
def test_a_limit_without_effect_on_the_feed_is_refused(feed: str, refused: list[str]) -> None:
    NO_LIMITS.check_effect(feed)
    for name in ("cache_bytes", "resident_bytes"):
        given = MemoryLimits.of(**{"cache_bytes": None, "resident_bytes": None, name: 5})
        if name in refused:
            with pytest.raises(ValueError, match=f"^{name} has no effect on feed='{feed}'. Leave"):
                given.check_effect(feed)
        else:
            given.check_effect(feed)


def test_by_default_a_part_of_the_available_ram_is_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 60 * 10**9)
    assert NO_LIMITS.in_ram("disk") == (30 * 10**9, "50% of the 60 GB of available RAM")
    for feed in ("cpu", "pinned"):
        assert NO_LIMITS.in_ram(feed) == (48 * 10**9, "80% of the 60 GB of available RAM")
    assert NO_LIMITS.in_ram("dma").size == math.inf
    given = MemoryLimits.of("7GB", None)
    for feed in ("disk", "cpu", "pinned", "dma", "uva"):
        assert given.in_ram(feed) == (7 * 10**9, "the 7 GB of cache_bytes")


def test_a_limit_beyond_the_available_ram_is_cut_down_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 60 << 30)
    given = MemoryLimits.of("500GB", None)
    for feed in ("disk", "cpu", "pinned", "dma", "uva"):
        size, text = given.in_ram(feed)
        assert (size, text) == (57 << 30, "the 61.2 GB to which cache_bytes was cut down")
        assert given.cut_down(feed) == (
            "cache_bytes=500_000_000_000 was cut down to 61.2 GB, so that enough of the 64.4 GB of "
            "available RAM is left to other uses"
        )
    assert not MemoryLimits.of(57 << 30, None).cut_down("disk")
    assert not NO_LIMITS.cut_down("disk")
    monkeypatch.setattr(limits, "available_memory", lambda: None)  # the system does not report it
    assert given.in_ram("disk").size == 500 * 10**9


def test_a_limit_is_not_cut_down_below_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 3 * 10**9)  # of a small container
    given = MemoryLimits.of("500GB", None)
    assert [given.in_ram(feed).size for feed in ("disk", "dma")] == [1.5e9, 1.5e9]
    assert [given.in_ram(feed).size for feed in ("cpu", "pinned")] == [2.4e9, 2.4e9]


def test_rows_may_stay_in_the_page_cache_where_the_system_does_not_report_its_ram(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: None)
    assert NO_LIMITS.in_ram("cpu").size == math.inf
    assert NO_LIMITS.in_ram("disk").size == 0


def test_counts_are_told_in_a_sentence() -> None:
    counts = ReadCounts(2000, rows_held=600, rows_to_hold=1000)
    assert str(counts) == "600 of 2,000 rows are held, and 400 more will be"
    counts = counts._replace(rows_held=1000, rows_on_device=200, served=50, hits=24)
    assert str(counts) == (
        "1,000 of 2,000 rows are held, 200 of them on the device; of 50 rows so far, 24 came from "
        "memory and 26 from the files"
    )
    read = counts._replace(bytes_read=3 * 10**9, seconds_reading=2.0, rows_on_device=0)
    assert str(read).endswith("and 26 from the files; 3 GB read at 1.5 GB/s")
    assert str(read._replace(problem="RAM runs short")).endswith("; RAM runs short")
    unknown = read._replace(hits=None)
    assert str(unknown) == (
        "1,000 of 2,000 rows stay in the page cache; 50 rows so far; 3 GB read at 1.5 GB/s"
    )


def test_counts_of_several_arrays_are_added_and_they_are_read_at_the_same_time() -> None:
    one = ReadCounts(20, 10, 10, 0, served=5, hits=3, bytes_read=100, seconds_reading=2.0)
    other = ReadCounts(30, 5, 6, 1, served=5, hits=2, bytes_read=300, seconds_reading=1.0)
    assert ReadCounts.of_all([one, other]) == (50, 15, 16, 1, 10, 5, 400, 2.0, "")
    unknown = other._replace(hits=None, problem="no room")
    assert ReadCounts.of_all([one, unknown, unknown])[5:] == (None, 700, 2.0, "no room")
