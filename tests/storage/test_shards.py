"""Rows come back as they were written, and a file that is not what the index says is told by name."""

import errno
import itertools
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memload
from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage import shards as module
from memload.storage.format import DESCRS, npy_header, seal_of
from memload.storage.index import Index
from memload.storage.shards import Shards, open_direct
from tests.damage import flip
from tests.feeds.page_cache import drop_pages


@pytest.fixture
def always_cold(monkeypatch):
    """Rows are read from the files, as if each gather had read from the disk."""
    monkeypatch.setattr(module, "disk_reads", itertools.count().__next__)


def stored(shards):
    """Return all rows as NumPy reads them."""
    return np.concatenate([np.load(path) for path in shards.paths])


def gather(shards, rows):
    out = np.ones((len(rows), *shards.array.shape), shards.array.descr)
    assert shards.gather(np.array(rows, np.int64), out) is out
    return out


def whole(shards):
    return gather(shards, range(len(shards)))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.one_of(
        st.tuples(*[st.integers(1, 4)] * 3),
        st.tuples(st.integers(1, 300), st.integers(1, 40), st.integers(1, 3)),
    ),
    st.sampled_from(DESCRS),
    st.sampled_from(["warm", "cold", "always cold"]),
    st.data(),
)
@settings(max_examples=40, deadline=None, database=None)
def test_rows_are_those_that_numpy_reads(write_dataset, rows, shape, descr, state, data):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shards = Shards(write_dataset(Path(folder), rows=rows, shape=shape, descr=descr))
        expected = stored(shards)
        patch.setattr(module, "_ADVICE_BYTES", 4096)
        if state == "always cold":
            patch.setattr(module, "disk_reads", itertools.count().__next__)
        for _ in range(3):
            if state == "cold":
                for path in shards.paths:
                    drop_pages(path)
            chosen = data.draw(st.lists(st.integers(0, sum(rows) - 1), max_size=12))
            np.testing.assert_array_equal(gather(shards, chosen), expected[chosen])
            for row in chosen[:2]:
                np.testing.assert_array_equal(shards.row(row), expected[row])
        assert len(shards) == sum(rows)
        np.testing.assert_array_equal(np.concatenate(shards.maps), expected)
        # Where rows lie, and how many lie in the beginnings of the files.
        shard, offset = shards.array.locate(np.arange(len(shards)))
        assert shard.dtype == offset.dtype == shards.array.starts.dtype == np.int64
        for row, number, begin in zip(expected, shard, offset, strict=True):
            content = shards.paths[number].read_bytes()
            assert content[begin : begin + row.nbytes] == row.tobytes()
        sizes = [data.draw(st.integers(0, one.bytes)) for one in shards.array.shards]
        ends = offset + shards.array.row_bytes
        assert shards.array.rows_within(sizes) == (ends <= np.array(sizes)[shard]).sum()
        del shards


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        ("mask", (6, 5), "<u2"),
        ("mask", (1, 1), "|u1"),
        ("array", (7,), "<f8"),
        ("array", (2, 3, 4, 5), "|b1"),
        ("npy", (375,), "<i8"),
        ("npy", (2, 3, 4, 5), "<f2"),
        ("npy", (1,), "|i1"),
    ],
)
def test_masks_arrays_and_npy_files_of_other_programs_come_back(
    make_dataset, add_array, monkeypatch, kind, shape, dtype
):
    index = make_dataset()
    values = np.random.default_rng(1).integers(0, 2, (len(index), *shape)).astype(dtype)
    rows = np.arange(len(index))[::-1].copy()
    add_array(index, "extra", values, kind, other_rows={"extra": rows})
    read = Index.read(index.path)
    assert read.array("extra").kind == ("mask" if kind == "mask" else "array")
    assert read.array("extra").header_bytes == (128 if kind == "npy" else 4096)
    shards = Shards(read, "extra")
    for _ in range(2):
        np.testing.assert_array_equal(gather(shards, read.rows_of("extra")), values[rows])
        monkeypatch.setattr(module, "disk_reads", itertools.count().__next__)


def test_rows_are_read_from_the_files_while_the_disk_is_read_and_else_from_the_map(
    make_dataset, monkeypatch
):
    reads = iter([0, 0, 0, 0, 0, 1] + [1] * 6)  # before and after each gather
    monkeypatch.setattr(module, "disk_reads", lambda: next(reads))
    monkeypatch.setattr(module, "_COLD_GATHERS", 2)
    shards = Shards(make_dataset(rows=(3, 2)))
    in_file = stored(shards)
    for rows in shards.maps:
        rows ^= 0xFF
    np.testing.assert_array_equal(stored(shards), in_file)  # only the map has changed
    # Nothing is known of the first gather, which shows that all is in RAM. The third one reads.
    for expected in (in_file, in_file ^ 0xFF, in_file ^ 0xFF, in_file, in_file, in_file ^ 0xFF):
        np.testing.assert_array_equal(gather(shards, [4, 0, 1]), expected[[4, 0, 1]])


def test_without_posix_fadvise_rows_come_from_the_map(make_dataset, monkeypatch):
    """As on macOS."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr(os, "posix_fadvise")
    shards = Shards(make_dataset(rows=(3, 2)))
    shards.maps[1][1] = 7
    assert (gather(shards, [4, 4]) == 7).all()


@pytest.mark.usefixtures("always_cold")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_reads_at_positions_of_its_own(make_dataset):
    shards = Shards(make_dataset(rows=(30, 30), shape=(20, 20, 3)))
    expected = stored(shards)

    def read_often():
        return all(np.array_equal(whole(shards), expected) for _ in range(20))

    with ThreadPoolExecutor(2) as threads:
        ours = [threads.submit(read_often) for _ in range(2)]
        child = os.fork()
        if not child:
            os._exit(0 if read_often() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert all(one.result(30) for one in ours)


@pytest.mark.usefixtures("always_cold")
def test_a_row_may_be_read_in_many_parts(make_dataset, monkeypatch):
    shards, preadv = Shards(make_dataset()), os.preadv
    monkeypatch.setattr(os, "preadv", lambda d, buffers, at: preadv(d, [buffers[0][:7]], at))
    np.testing.assert_array_equal(whole(shards), stored(shards))


# ---- files that are not what the index says


@pytest.mark.parametrize(
    ("size", "state"), [(0, "truncated"), (4239, "truncated"), (4241, "too long")]
)
def test_a_shard_of_another_size_is_told_with_both_sizes(size, state, make_dataset, tmp_path):
    index, path = make_dataset(rows=(3, 2)), tmp_path / "made-00001-of-00002.bin"
    os.truncate(path, size)
    with pytest.raises(
        FormatError,
        match=rf"00001-of-00002\.bin is {state}: it has {size:,} bytes instead of 4,240 "
        r"\(2 rows of 4×6×3 uint8\)\. Restore it, or run 'memload build' again\.$",
    ) as told:
        Shards(index)
    assert told.value.path == str(path)


def test_a_missing_shard_is_told_with_its_name(make_dataset, tmp_path):
    index = make_dataset(rows=(3, 2))
    (tmp_path / "made-00000-of-00002.bin").unlink()
    with pytest.raises(
        MissingError, match=r"00000-of-00002\.bin is missing: a shard of 4,312 bytes"
    ):
        Shards(index)


@pytest.mark.parametrize("position", [0, 20, 200, 4080])
@pytest.mark.parametrize("seal", [b"", b"# 0123456789abcdef\n", b"% 0123456789abcdef\n"])
def test_an_altered_header_is_told(seal, position, make_dataset, tmp_path):
    index = make_dataset()
    with (tmp_path / "made.bin").open("r+b") as file:
        file.seek(4096 - len(seal))
        file.write(seal)
    flip(tmp_path / "made.bin", position)
    problem = "is damaged or belongs to another data set: its header is not that of 5 rows of 4×6×3"
    if seal.startswith(b"#") and position == 4080:
        problem = "does not belong to"
    with pytest.raises(FormatError, match=problem):
        Shards(index)


def test_a_replaced_npy_file_is_told(make_dataset, add_array):
    values = np.ones((5, 4), "<f4")
    index = add_array(make_dataset(), "features", values, "npy")
    path = index.path.with_name("made.features.bin")
    for other in (values.reshape(-1, 2, 2), np.asfortranarray(values), values.view("<i4")):
        with path.open("wb") as file:
            np.save(file, other)
        with pytest.raises(
            FormatError, match=r"features\.bin .* header is not that of 5 rows of 4 f"
        ):
            Shards(index, "features")


@pytest.mark.parametrize(("row", "global_row"), [(0, 3), (3, 6)])
def test_a_shard_whose_first_or_last_row_differs_is_of_another_data_set(
    row, global_row, make_dataset, tmp_path
):
    index, path = make_dataset(rows=(3, 4)), tmp_path / "made-00001-of-00002.bin"
    flip(path, 4096 + 72 + 5)  # rows in between are not read at opening
    Shards(index)
    flip(path, 4096 + row * 72 + 5)
    with pytest.raises(
        ChecksumError,
        match=rf"00001-of-00002\.bin is damaged or belongs to another data set: row {global_row} has "
        r"checksum [0-9a-f]{8} instead of [0-9a-f]{8}, as made\.idx says\. Run 'memload verify'",
    ) as told:
        Shards(index)
    assert (told.value.rows, told.value.path) == ((global_row,), str(path))


@pytest.mark.parametrize("rows", [(5,), (2, 1, 2)])
def test_a_sealed_shard_is_told_from_one_of_other_rows(rows, make_dataset, tmp_path):
    index = make_dataset(rows=rows)
    checksums = index.crc32["image"]

    def seal(checksums):
        for shard, part in zip(
            index.shards, np.split(checksums, index.image.starts[1:-1]), strict=True
        ):
            with (tmp_path / shard.file).open("r+b") as file:
                file.write(npy_header("|u1", (shard.rows, 4, 6, 3), seal_of(part)))

    seal(checksums)
    Shards(index)
    seal(np.where(np.arange(5) == 2, checksums ^ 1, checksums))
    with pytest.raises(
        ChecksumError, match=r"does not belong to made\.idx: .* seal '[0-9a-f]{16}' in"
    ):
        Shards(index)


def test_a_failing_disk_is_told_with_the_file(make_dataset, monkeypatch):
    index = make_dataset()

    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    for use in (lambda: Shards(index), lambda: Index.read(index.path)):
        with pytest.raises(
            FormatError, match=r"made\.(bin|idx) cannot be read: Input/output error"
        ):
            use()


# ---- what happens to files while they are open


@pytest.mark.parametrize(
    "read",
    [lambda dataset: dataset.gather([0, 4]), lambda dataset: dataset[4]],
    ids=["gather", "sample"],
)
@pytest.mark.parametrize("rows", [(5,), (3, 2)])
def test_a_file_truncated_while_it_is_open_is_told_before_it_is_read(read, rows, make_dataset):
    dataset = memload.MemmapDataset(make_dataset(rows=rows).path)
    for _ in range(2):
        read(dataset)
    path = dataset.shards.paths[-1]
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(
        FormatError,
        match=rf"bin was truncated while it was open: it has {size - 1:,} bytes instead of {size:,}",
    ) as caught:
        read(dataset)
    assert caught.value.path == str(path)


@pytest.mark.usefixtures("always_cold")
@pytest.mark.parametrize("what", ["truncated", "failing"])
def test_a_file_that_cannot_be_read_to_the_end_of_a_row_is_told(what, make_dataset, monkeypatch):
    """As the kernel does it: it reads as far as it can, and says why with the next call."""
    shards, preadv, last_byte = Shards(make_dataset(rows=(3, 4))), os.preadv, 4096 + 72 + 5

    def read(descriptor, buffers, offset):
        if descriptor != shards.descriptors[1] or offset + len(buffers[0]) <= last_byte:
            return preadv(descriptor, buffers, offset)
        if what == "truncated":
            os.truncate(shards.paths[1], last_byte)
        elif offset >= last_byte:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(descriptor, [buffers[0][: max(0, last_byte - offset)]], offset)

    monkeypatch.setattr(os, "preadv", read)
    message = {
        "truncated": "has 4,173 bytes instead of 4,384",
        "failing": "read: Input/output error",
    }
    with pytest.raises(FormatError, match=rf"00001-of-00002\.bin .*{message[what]}") as caught:
        gather(shards, [0, 1, 4, 5])
    assert caught.value.path == str(shards.paths[1])
    first = np.load(shards.paths[0])
    np.testing.assert_array_equal(gather(shards, [0, 2]), first[[0, 2]])


def test_a_file_replaced_or_removed_while_it_is_open_is_read_on(make_dataset, tmp_path):
    shards = Shards(make_dataset())
    expected, before = stored(shards), open_direct(shards.descriptors[0])
    (tmp_path / "new").write_bytes(bytes(100))
    (tmp_path / "new").replace(shards.paths[0])
    assert np.array_equal(whole(shards), expected)
    if before is not None:  # the same file is opened, and not what has its name now
        after = open_direct(shards.descriptors[0])
        assert os.fstat(after).st_ino == os.fstat(before).st_ino
        os.close(before)
        os.close(after)
    shards.paths[0].unlink()
    assert np.array_equal(whole(shards), expected)


def test_a_file_that_cannot_be_read_past_the_page_cache_is_not_opened_so(make_dataset, monkeypatch):
    shards, real_open = Shards(make_dataset()), os.open

    def fail(*arguments):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    # Also where the file system of the test has no O_DIRECT.
    monkeypatch.setattr(os, "open", lambda path, flags: real_open(path, flags & ~os.O_DIRECT))
    monkeypatch.setattr(os, "preadv", fail)
    assert open_direct(shards.descriptors[0]) is None


def test_shards_that_are_dropped_close_their_files_but_maps_stay(make_dataset):
    shards = Shards(make_dataset(rows=(3, 2)))
    row, expected = shards.row(4), stored(shards)[4]
    (descriptor, *_) = shards.descriptors
    del shards
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    np.testing.assert_array_equal(row, expected)
