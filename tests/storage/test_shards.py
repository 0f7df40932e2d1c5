"""Shards: rows come back as they were written, and a file that is not what the index says is told by name."""

import errno
import os
import resource
import tempfile
import time
from collections.abc import Callable
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
from memload.storage.file_reads import read_ahead
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
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 20, usual[1])
    )
    try:
        with pytest.raises(FormatError, match=r"Every shard needs an open file\. .*ulimit -n"):
            Shards(index)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)


def test_rows_are_read_from_the_files_as_long_as_the_disk_has_to_be_waited_for(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset(rows=(3, 1, 2), shape=(64, 64, 3)))
    expected = np.concatenate(shards.maps).copy()
    asked: list[int] = []
    reads = iter([0, 0, 0, 0, 0, 1] + [1] * 6)  # before and after each gather

    def record(descriptor: int, offset: int, size: int) -> None:
        asked.append(size)
        read_ahead(descriptor, offset, size)

    monkeypatch.setattr("memload.storage.shards.read_ahead", record)
    monkeypatch.setattr("memload.storage.shards.disk_reads", lambda: next(reads))
    monkeypatch.setattr("memload.storage.shards._COLD_GATHERS", 2)
    # Nothing is known of the first, which shows that all is in RAM. The third one reads the disk.
    for rows, sizes in [
        ([0, 2], [12288] * 2), ([1], []), ([2], []), ([0, 1, 3], [24576, 12288]), ([1], [12288]), ([2], [])
    ]:  # fmt: skip
        asked.clear()
        found = shards.gather(np.array(rows), np.empty((len(rows), 64, 64, 3), np.uint8))
        np.testing.assert_array_equal(found, expected[rows])
        assert asked == sizes


def whole(shards: Shards) -> np.ndarray:
    return shards.gather(
        np.arange(len(shards)), np.empty((len(shards), *shards.array.shape), shards.array.descr)
    )


READ = [
    lambda dataset: dataset.gather(range(5)),
    lambda dataset: dataset[4],
    lambda dataset: next(iter(memload.Loader(dataset, 5, device="cpu", num_threads=0))),
]


@pytest.mark.parametrize(("rows", "size"), [((5,), 0), ((5,), 4096 + 4 * 72), ((3, 2), 4095)])
@pytest.mark.parametrize("read", READ, ids=["gather", "sample", "Loader"])
def test_a_file_truncated_while_it_is_open_is_told_before_it_is_read(
    read: Callable[[Any], Any], rows: tuple[int, ...], size: int, make_dataset: Make
) -> None:
    index = make_dataset(rows=rows)
    dataset = memload.MemmapDataset(index.path)
    read(dataset)
    shard = dataset.shards.paths[-1]
    os.truncate(shard, size)
    with pytest.raises(
        FormatError,
        match=r"bin was truncated while it was open: it has [\d,]+ bytes instead of 4,\d+\.",
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
