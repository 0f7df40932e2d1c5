"""Shards: rows come back as they were written, and a file that is not what the index says is told by name."""

import errno
import itertools
import os
import resource
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memload
from memload.building.writer import ShardWriter
from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import DESCRS
from memload.storage.index import Index
from memload.storage.shards import Shards

Make = Callable[..., Index]
OPENERS = (Shards, lambda index: memload.MemmapDataset(index.path))
USES = (*OPENERS, lambda index: memload.info(index.path))


def all_pixels(index: Index) -> np.ndarray:
    return np.concatenate([np.load(index.path.parent / shard.file) for shard in index.image.shards])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.sampled_from(DESCRS),
    st.data(),
)
@settings(max_examples=50, deadline=None, database=None)
def test_rows_are_gathered_as_by_fancy_indexing(
    write_dataset: Make,
    rows: list[int],
    shape: tuple[int, int, int],
    descr: str,
    data: st.DataObject,
) -> None:
    total = sum(rows)
    wanted = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=9)), np.int64)
    with tempfile.TemporaryDirectory() as folder:
        shards = Shards(write_dataset(Path(folder), rows=rows, shape=shape, descr=descr))
        pixels = np.concatenate([np.load(path) for path in shards.paths])
        out = np.ones((len(wanted), *shape), descr)
        assert shards.gather(wanted, out) is out
        np.testing.assert_array_equal(out, pixels[wanted])
        del shards


def test_a_second_array_is_opened_by_its_name(make_dataset: Make, tmp_path: Path) -> None:
    image, mask = make_dataset(), make_dataset("mask.bin", shape=(2, 2, 1), descr="<u2", seed=1)
    arrays = (replace(mask.image, name="mask", kind="array"), image.image)
    checksums = {"image": image.crc32["image"], "mask": mask.crc32["image"]}
    both = Index.read(make_dataset(arrays=arrays, crc32=checksums).path)
    assert both.arrays == arrays
    np.testing.assert_array_equal(Shards(both, "mask").maps[0], np.load(tmp_path / "mask.bin"))
    np.testing.assert_array_equal(Shards(both).maps[0], np.load(tmp_path / "made.bin"))


# ---- files that are not what the index says


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("size", "state"), [(0, "truncated"), (4239, "truncated"), (4241, "too lo")]
)
def test_a_shard_of_another_size_is_told_with_both_sizes(
    use: Any, size: int, state: str, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(3, 2))
    path = tmp_path / "made-00001-of-00002.bin"
    os.truncate(path, size)
    with pytest.raises(
        FormatError,
        match=rf"00001-of-00002\.bin is {state}.*: it has {size:,} bytes instead of 4,240 "
        r"\(2 rows of 4×6×3 uint8\)\. Restore it, or run 'memload build' again\.$",
    ) as told:
        use(index)
    assert told.value.path == str(path)


@pytest.mark.parametrize("use", USES)
def test_a_missing_shard_is_told_with_its_name(
    use: Any, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(3, 2))
    (tmp_path / "made-00000-of-00002.bin").unlink()
    with pytest.raises(
        MissingError,
        match=r"00000-of-00002\.bin is missing: a shard of 4,312 bytes\. Copy it beside its index",
    ) as told:
        use(index)
    assert isinstance(told.value, FileNotFoundError)


@pytest.mark.parametrize("position", [0, 20, 200, 4095])
@pytest.mark.parametrize("seal", [b"", b"# 0123456789abcdeF\n", b"% 0123456789abcdef\n"])
def test_an_altered_header_is_told(
    seal: bytes, position: int, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    with (tmp_path / "made.bin").open("r+b") as file:
        file.seek(4096 - len(seal))
        file.write(seal)
    flip(tmp_path / "made.bin", position)
    with pytest.raises(
        FormatError, match=r"made\.bin is damaged or .* its header is not that of 5 rows of 4×6×3"
    ):
        Shards(index)


@pytest.mark.parametrize(("row", "global_row"), [(0, 3), (3, 6)])
@pytest.mark.parametrize("use", OPENERS)
def test_a_shard_whose_first_or_last_row_differs_is_of_another_data_set(
    use: Any, row: int, global_row: int, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(3, 4))
    path = tmp_path / "made-00001-of-00002.bin"
    flip(path, 4096 + row * 72 + 5)
    with pytest.raises(
        ChecksumError,
        match=rf"00001-of-00002\.bin is damaged or belongs to another data set: row {global_row} has "
        r"checksum [0-9a-f]{8} instead of [0-9a-f]{8}, as made\.idx says\. Run 'memload verify'",
    ) as told:
        use(index)
    assert told.value.rows == (global_row,)
    assert told.value.path == str(path)


def test_rows_between_the_first_and_the_last_cost_no_reading_at_open(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    flip(tmp_path / "made.bin", 4096 + 2 * 72)
    assert len(Shards(index)) == 5
    assert memload.verify(index.path).bad_rows == [2]


# ---- what happens to the files while they are open


def test_a_truncated_shard_is_noticed_among_many(make_dataset: Make) -> None:
    """Sizes of more than 16 shards are looked at every 10 ms."""
    shards = Shards(make_dataset(rows=(1,) * 40, shape=(64, 64, 3)))
    expected = whole(shards).copy()
    np.testing.assert_array_equal(whole(shards), expected)
    os.truncate(shards.paths[20], 4096)
    time.sleep(0.02)
    for rows in (np.arange(40), np.array([20])):
        with pytest.raises(FormatError, match=r"00020-of-00040\.bin was truncated while"):
            shards.gather(rows, np.empty((len(rows), 64, 64, 3), np.uint8))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("os.open", "opened: Permission denied"),
        ("memload.storage.shards.map_side_by_side", "mapped: .*Permission denied"),
        ("os.pread", "read: Permission denied"),
    ],
)
def test_a_shard_that_the_system_does_not_give_is_told(
    function: str, message: str, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_dataset()

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(function, refuse)
    with pytest.raises(FormatError, match=rf"made\.bin cannot be {message}"):
        Shards(index)


def test_what_is_no_file_in_the_place_of_a_shard_is_told(
    make_dataset: Make, tmp_path: Path
) -> None:
    index, path = make_dataset(), tmp_path / "made.bin"
    path.unlink()
    path.mkdir()
    with pytest.raises(FormatError, match=r"made\.bin is not a file"):
        Shards(index)
    path.rmdir()
    path.symlink_to("made.bin")
    with pytest.raises(FormatError, match=r"made\.bin cannot be read: .*symbolic links"):
        Shards(index)


def test_too_many_open_files_name_the_remedy(make_dataset: Make) -> None:
    index = make_dataset(rows=(1,) * 40)
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 20, usual[1]))
    try:
        with pytest.raises(FormatError, match=r"Every shard needs an open file\. .*ulimit -n"):
            Shards(index)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def whole(shards: Shards) -> np.ndarray:
    return gathered(shards, np.arange(len(shards)))


def gathered(shards: Shards, rows: Any, **options: Any) -> np.ndarray:
    out = np.empty((len(rows), *shards.array.shape), shards.array.descr)
    return shards.gather(np.array(rows, np.int64), out, **options)


READ = [
    lambda dataset: dataset.gather(range(5)),
    lambda dataset: dataset[4],
    lambda dataset: next(iter(memload.Loader(dataset, 5, device="cpu", num_threads=0))),
]


@pytest.mark.parametrize(
    ("rows", "size", "first_lost"),
    [((5,), 0, 0), ((5,), 4096 + 4 * 72, 4), ((5,), 4096 + 4 * 72 - 1, 3), ((3, 2), 4095, 3)],
)
@pytest.mark.parametrize("read", READ, ids=["gather", "sample", "Loader"])
def test_a_file_truncated_while_it_is_open_is_told_before_it_is_read(
    read: Callable[[Any], Any],
    rows: tuple[int, ...],
    size: int,
    first_lost: int,
    make_dataset: Make,
) -> None:
    index = make_dataset(rows=rows)
    dataset = memload.MemmapDataset(index.path)
    read(dataset)
    shard = dataset.shards.paths[-1]
    os.truncate(shard, size)
    with pytest.raises(
        FormatError,
        match=r"bin was truncated while it was open: it has [\d,]+ bytes instead of 4,\d+, and row "
        rf"{first_lost} is the first one that it lacks\. Restore it",
    ) as caught:
        read(dataset)
    assert caught.value.path == str(shard)


def test_a_file_replaced_or_removed_while_it_is_open_is_read_on(
    make_dataset: Make, tmp_path: Path
) -> None:
    shards = Shards(make_dataset())
    expected = whole(shards).copy()
    (tmp_path / "new").write_bytes(bytes(100))
    (tmp_path / "new").replace(shards.paths[0])
    assert np.array_equal(whole(shards), expected)
    shards.paths[0].unlink()
    assert np.array_equal(whole(shards), expected)


# ---- rows that are read from the files, because they are not in RAM


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every gather look as if it had read from the disk."""
    monkeypatch.setattr("memload.storage.shards.disk_reads", itertools.count().__next__)


def test_rows_are_read_from_the_files_as_long_as_the_disk_is_read_and_else_from_the_map(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter([0, 0, 0, 0, 0, 1] + [1] * 6)  # before and after each gather
    monkeypatch.setattr("memload.storage.shards.disk_reads", lambda: next(reads))
    monkeypatch.setattr("memload.storage.shards._COLD_GATHERS", 2)
    shards = Shards(make_dataset(rows=(3, 2)))
    in_file = np.concatenate(shards.maps).copy()
    for rows in shards.maps:
        rows ^= 0xFF  # only the map changes
    in_map = np.concatenate(shards.maps)
    # Nothing is known of the first gather, which shows that all is in RAM. The third one reads.
    for expected in (in_file, in_map, in_map, in_file, in_file, in_map):
        np.testing.assert_array_equal(gathered(shards, [4, 0, 1]), expected[[4, 0, 1]])


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3)),
    st.sampled_from(DESCRS),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 12)), max_size=6),
)
@settings(max_examples=60, deadline=None, database=None)
def test_rows_read_from_the_files_are_those_of_the_files(
    write_dataset: Make,
    rows: list[int],
    shape: tuple[int, int, int],
    descr: str,
    runs: list[tuple[int, int]],
) -> None:
    """In any order, more than once, and in runs that are read together, up to 4 KiB at a time."""
    total = sum(rows)
    wanted = [(first + number) % total for first, count in runs for number in range(count)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr("memload.storage.shards.disk_reads", itertools.count().__next__)
        patched.setattr("memload.storage.file_reads._READ_BLOCK_BYTES", 4096)
        shards = Shards(write_dataset(Path(folder), rows=rows, shape=shape, descr=descr))
        maps = [
            np.memmap(path, descr, "r", 4096, (count, *shape))
            for path, count in zip(shards.paths, rows, strict=True)
        ]
        np.testing.assert_array_equal(gathered(shards, wanted), np.concatenate(maps)[wanted])
        del shards, maps


@pytest.mark.usefixtures("cold")
def test_rows_behind_a_foreign_header_are_read_from_the_file(
    make_dataset: Make, add_array: Make
) -> None:
    values = np.random.default_rng(0).random((10, 375))
    shards = Shards(add_array(make_dataset(rows=(10,)), "features", values, "npy"), "features")
    np.testing.assert_array_equal(gathered(shards, [9, 0, 4, 5, 6]), values[[9, 0, 4, 5, 6]])


@pytest.mark.usefixtures("cold")
def test_a_gather_tells_which_rows_were_read_from_the_files(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset(rows=(3, 3)))
    read: list[list[int]] = []
    rows, expected = [5, 0, 1, 4, 5], whole(shards)
    found = gathered(shards, rows, after_read=lambda some: read.append(some.tolist()))
    np.testing.assert_array_equal(found, expected[rows])
    assert read == [rows]
    monkeypatch.setattr("memload.storage.shards.disk_reads", lambda: 0)
    for _ in range(100):
        gathered(shards, rows, after_read=lambda some: read.append(some.tolist()))
    assert len(read) < 100  # then they come from the map


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize(("byte", "row"), [(0, 4), (72 + 71, 5), (2 * 72, 6)])
def test_a_row_that_the_disk_cannot_read_is_told(
    byte: int, row: int, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernel does it: it reads as far as it can, and fails with the next call."""
    shards, preadv = Shards(make_dataset(rows=(3, 4))), os.preadv
    damaged = 4096 + 72 + byte

    def fail(descriptor: int, buffers: Any, offset: int) -> int:
        if descriptor != shards.descriptors[1] or offset + len(buffers[0]) <= damaged:
            return preadv(descriptor, buffers, offset)
        if offset == damaged:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, [buffers[0][: damaged - offset]], offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        FormatError,
        match=rf"00001-of-00002\.bin cannot be read at byte {damaged:,}, where row {row} is: "
        r"Input/output error\. Check the disk, then restore the file",
    ) as caught:
        gathered(shards, [0, 1, 4, 5, 6])
    assert caught.value.path == str(shards.paths[1])
    np.testing.assert_array_equal(gathered(shards, [1, 3]), np.concatenate(shards.maps)[[1, 3]])


@pytest.mark.usefixtures("cold")
def test_a_shard_truncated_while_it_is_read_is_told(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards, preadv = Shards(make_dataset(rows=(3, 4))), os.preadv

    def truncate(descriptor: int, buffers: Any, offset: int) -> int:
        os.truncate(shards.paths[1], 4096 + 72 + 5)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncate)
    with pytest.raises(
        FormatError,
        match=r"00001-of-00002\.bin was truncated while it was open: it has 4,173 bytes instead of "
        r"4,384, and row 4 is the first one that it lacks",
    ):
        gathered(shards, [6, 0, 3])


@pytest.mark.usefixtures("cold")
def test_a_child_that_is_forked_while_a_thread_asks_for_rows_reads_on(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset())
    expected, asks, asked = whole(shards), threading.Event(), threading.Event()

    def ask(*_: object) -> None:
        asks.set()
        assert asked.wait(30)

    with ThreadPoolExecutor(1) as pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        monkeypatch.setattr(os, "posix_fadvise", ask)
        under_way = pool.submit(whole, shards)
        assert asks.wait(30)
        child = os.fork()
        if not child:
            monkeypatch.undo()
            is_right = np.array_equal(whole(shards), expected)
            os._exit(0 if is_right else 1)
        asked.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        np.testing.assert_array_equal(under_way.result(), expected)


def test_without_posix_fadvise_rows_come_from_the_map(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr(os, "posix_fadvise")
    shards = Shards(make_dataset(rows=(3, 2)))
    shards.maps[1][1] = 7
    assert (gathered(shards, [4, 4]) == 7).all()
    assert np.array_equal(whole(shards), np.concatenate(shards.maps))


# ---- seals


@pytest.mark.parametrize("rows", [(5,), (2, 1, 2)])
def test_a_sealed_shard_is_told_from_one_of_other_rows(
    rows: tuple[int, ...], make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=rows)
    writer = ShardWriter(tmp_path, index.image)
    writer.create(index.crc32["image"])
    assert np.array_equal(np.concatenate(Shards(index).maps), all_pixels(index))
    other = index.crc32["image"].copy()
    other[2] ^= 1
    writer.create(other)
    writer.close()
    with pytest.raises(
        ChecksumError, match=r"does not belong to made\.idx: .* seal [0-9a-f]{16} in"
    ):
        Shards(index)
    report = memload.verify(index.path)
    assert (len(report.problems), report.bad_rows) == (1, [])


def test_a_subset_does_not_open_over_the_pixels_of_a_later_build(
    folder: Path, tmp_path: Path
) -> None:
    """Of which the first row and the last are the same."""
    memload.build(folder, tmp_path / "out.bin", size=16, num_workers=0)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    dataset.subset(range(6)).save(tmp_path / "val.idx")
    changed = sorted(folder.rglob("*.jpg"))[5]
    changed.write_bytes(sorted(folder.rglob("*.jpg"))[7].read_bytes())
    memload.build(folder, tmp_path / "out.bin", size=16, num_workers=0, overwrite=True)
    for open_it in (memload.MemmapDataset, memload.Loader):
        with pytest.raises(ChecksumError, match=r"out\.bin does not belong to val\.idx"):
            open_it(tmp_path / "val.idx")
    assert len(memload.MemmapDataset(tmp_path / "out.bin")) == 12


@pytest.mark.parametrize("target", ["elsewhere/made.bin", "/dev/zero", "/etc/passwd"])
def test_a_link_that_leads_out_of_the_folder_is_refused_and_not_opened(
    target: str, make_dataset: Make, tmp_path: Path
) -> None:
    index, path = make_dataset(), tmp_path / "made.bin"
    (tmp_path / "elsewhere").mkdir()
    path.rename(tmp_path / "elsewhere" / "made.bin")
    path.symlink_to(target)
    for use in USES:
        with pytest.raises(FormatError, match=r"made\.bin is a link to .*, outside the folder of"):
            use(index)
    (problem,) = memload.verify(index.path).problems
    assert "is a link to" in problem


def test_links_within_the_folder_and_beside_a_linked_index_are_followed(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset()
    (tmp_path / "made.bin").rename(tmp_path / "blob")
    (tmp_path / "made.bin").symlink_to("blob")
    assert memload.verify(tmp_path / "made.idx").ok
    (tmp_path / "cache").mkdir()
    for name in ("made.idx", "made.bin"):
        (tmp_path / "cache" / name).symlink_to(tmp_path / name)
    (tmp_path / "link").symlink_to("cache")
    for folder in ("cache", "link"):
        assert memload.verify(tmp_path / folder / "made.bin").ok
        assert len(memload.MemmapDataset(tmp_path / folder / "made.idx")) == 5
