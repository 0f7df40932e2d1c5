"""Shards: rows come back as they were written, and a file that is not what the index says is told by name."""

import errno
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memload
from memload.building.writer import ShardWriter, plan_shards
from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.format import npy_header, shard_names
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys
from memload.storage.leases import LEASES
from memload.storage.shards import Shards, describe

Make = Callable[..., Index]
OPENERS = (Shards, lambda index: memload.MemmapDataset(index.path))


def all_pixels(index: Index) -> np.ndarray:
    return np.concatenate([np.load(index.path.parent / shard.file) for shard in index.image.shards])


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize("descr", ["|u1", "<u2", "<f2", "<f4"])
@pytest.mark.parametrize("rows", [(5,), (2, 1, 2)])
def test_shards_are_mapped_as_numpy_reads_them(
    descr: str, rows: Sequence[int], make_dataset: Make
) -> None:
    index = make_dataset(rows=rows, descr=descr)
    shards = Shards(index)
    assert len(shards) == 5
    assert [pixels.dtype.str for pixels in shards.maps] == [descr] * len(rows)
    np.testing.assert_array_equal(np.concatenate(shards.maps), all_pixels(index))


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.tuples(*[st.integers(1, 4)] * 3),
    st.sampled_from(["|u1", "<u2", "<f2", "<f4"]),
    st.data(),
)
@settings(max_examples=50, deadline=None, database=None)
def test_rows_written_in_any_order_are_gathered_as_by_fancy_indexing(
    rows: list[int], shape: tuple[int, int, int], descr: str, data: st.DataObject
) -> None:
    total = sum(rows)
    pixels = np.random.default_rng(total).integers(0, 256, (total, *shape)).astype(descr)
    wanted = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=9)), np.int64)
    names = shard_names("out.bin", len(rows))
    planned = (
        Shard(name, held, 4096 + held * pixels[0].nbytes)
        for name, held in zip(names, rows, strict=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        array = Array("image", descr, shape, tuple(planned))
        writer = ShardWriter(Path(folder), array)
        writer.create()
        for row in data.draw(st.permutations(range(total))):
            writer.write(row, pixels[row].tobytes())
        writer.close()
        checks = np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)
        none = np.zeros(0, np.int64)
        shards = Shards(
            Index(
                Path(folder) / "out.idx",
                (array,),
                none,
                none.astype(np.uint8),
                Keys.of([]),
                {},
                {"image": checks},
            )
        )
        out = np.ones((len(wanted), *shape), descr)
        assert shards.gather(wanted, out) is out
        np.testing.assert_array_equal(out, pixels[wanted])
        del shards


def test_a_row_is_located_by_shard_and_place(make_dataset: Make) -> None:
    shards = Shards(make_dataset(rows=(2, 1, 3)))
    assert [shards.locate(row) for row in range(6)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (2, 0),
        (2, 1),
        (2, 2),
    ]


def test_a_second_array_is_opened_by_its_name(make_dataset: Make, tmp_path: Path) -> None:
    image, mask = make_dataset(), make_dataset("mask.bin", shape=(2, 2, 1), seed=1)
    arrays = (image.image, Array("mask", "|u1", (2, 2, 1), mask.image.shards))
    both = make_dataset(
        arrays=arrays, crc32={"image": image.crc32["image"], "mask": mask.crc32["image"]}
    )
    np.testing.assert_array_equal(Shards(both, "mask").maps[0], np.load(tmp_path / "mask.bin"))
    np.testing.assert_array_equal(Shards(both).maps[0], np.load(tmp_path / "made.bin"))


def test_what_is_written_into_a_map_stays_in_the_process(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    before = (tmp_path / "made.bin").read_bytes()
    shards = Shards(index)
    shards.maps[0][1] = 7
    assert (shards.maps[0][1] == 7).all()
    assert (tmp_path / "made.bin").read_bytes() == before
    np.testing.assert_array_equal(Shards(index).maps[0], np.load(tmp_path / "made.bin"))


def test_the_pixels_live_as_long_as_an_array_over_them(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    expected = np.load(tmp_path / "made.bin")
    row = Shards(index).maps[0][3]
    (tmp_path / "made.bin").unlink()
    np.testing.assert_array_equal(row, expected[3])


# ---- files that are not what the index says


@pytest.mark.parametrize("use", [*OPENERS, lambda index: memload.info(index.path)])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4096 + 143])
def test_a_truncated_shard_names_file_and_size(
    use: Any, size: int, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(3, 2))
    path = tmp_path / "made-00001-of-00002.bin"
    os.truncate(path, size)
    with pytest.raises(
        FormatError,
        match=rf"00001-of-00002\.bin: expected 4,240 bytes \(2 rows of 4×6×3 uint8\), found {size:,}: "
        r"the shard is truncated\. Restore the file or build again$",
    ) as told:
        use(index)
    assert told.value.path == str(path)


def test_a_shard_that_has_grown_names_file_and_size(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    os.truncate(tmp_path / "made.bin", 4457)
    with pytest.raises(
        FormatError,
        match=r"made\.bin: expected 4,456 bytes .*, found 4,457: the shard is too long\. Restore",
    ):
        Shards(index)


@pytest.mark.parametrize("use", [*OPENERS, lambda index: memload.info(index.path)])
def test_a_missing_shard_is_told_with_its_name(
    use: Any, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(3, 2))
    (tmp_path / "made-00000-of-00002.bin").unlink()
    with pytest.raises(
        MissingError,
        match=r"00000-of-00002\.bin: expected a shard of 4,312 bytes, found no such file\. Copy it beside",
    ) as told:
        use(index)
    assert isinstance(told.value, FileNotFoundError)


def test_a_folder_in_the_place_of_a_shard_is_told(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    (tmp_path / "made.bin").unlink()
    (tmp_path / "made.bin").mkdir()
    with pytest.raises(FormatError, match=r"made\.bin: expected a file, found something else"):
        Shards(index)


def test_a_shard_that_the_system_does_not_give_is_told(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = make_dataset()

    def refuse(path: Any, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FormatError, match=r"made\.bin: cannot be mapped: .*Permission denied"):
        Shards(index)


def test_a_name_too_long_for_the_system_is_told(
    make_dataset: Make, tamper: Callable[..., Path]
) -> None:
    path = tamper(
        make_dataset().path,
        lambda metadata, _: metadata["arrays"][0]["shards"][0].update(file="x" * 5000 + ".bin"),
    )
    with pytest.raises(
        FormatError,
        match=r"file: expected a bare file name, .*found 'x{90,}…: the index is damaged",
    ):
        memload.MemmapDataset(path)


@pytest.mark.parametrize("position", [0, 6, 8, 20, 70, 200, 4095])
def test_an_altered_header_is_told(position: int, make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    flip(tmp_path / "made.bin", position)
    with pytest.raises(
        FormatError,
        match=r"made\.bin: expected the NPY header of 5 rows of 4×6×3 uint8, found b.*damaged or belongs",
    ):
        Shards(index)


def test_a_file_of_the_same_size_but_another_shape_is_told(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(shape=(4, 6, 3))
    make_dataset("other.bin", shape=(6, 4, 3))
    (tmp_path / "other.bin").replace(tmp_path / "made.bin")
    with pytest.raises(
        FormatError, match=r"made\.bin: expected the NPY header of 5 rows of 4×6×3 uint8, found"
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
        match=rf"00001-of-00002\.bin: expected checksum [0-9a-f]{{8}} of row {global_row}, as made\.idx says, found "
        r"[0-9a-f]{8}: the file is damaged or belongs to another data set\. Run 'memload verify'",
    ) as told:
        use(index)
    assert told.value.rows == (global_row,)
    assert told.value.path == str(path)


def test_pixels_of_another_build_of_the_same_shape_are_told(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    make_dataset("other.bin", seed=1)
    (tmp_path / "other.bin").replace(tmp_path / "made.bin")
    with pytest.raises(ChecksumError, match=r"made\.bin: .*belongs to another data set"):
        Shards(index)


def test_two_shards_swapped_are_told(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(rows=(3, 3))
    first, second = (tmp_path / shard.file for shard in index.image.shards)
    first.rename(tmp_path / "spare")
    second.rename(first)
    (tmp_path / "spare").rename(second)
    with pytest.raises(ChecksumError, match=r"00000-of-00002\.bin: .*belongs to another data set"):
        Shards(index)


def test_rows_between_the_first_and_the_last_cost_no_reading_at_open(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    flip(tmp_path / "made.bin", 4096 + 2 * 72)
    assert len(Shards(index)) == 5
    assert memload.verify(index.path).bad_rows == [2]


# ---- what happens to the files while they are open


def whole(shards: Shards) -> np.ndarray:
    return shards.gather(
        np.arange(len(shards)), np.empty((len(shards), *shards.array.shape), shards.array.descr)
    )


READ = [
    lambda dataset: dataset.gather(range(5)),
    lambda dataset: dataset[4],
    lambda dataset: next(iter(memload.Loader(dataset, 5, device="cpu", num_threads=0))),
]


@pytest.mark.parametrize("size", [0, 4095, 4096 + 4 * 72])
@pytest.mark.parametrize("rows", [(5,), (3, 2)])
@pytest.mark.parametrize("read", READ, ids=["gather", "sample", "Loader"])
def test_a_file_truncated_while_it_is_open_is_told_before_it_is_read(
    read: Callable[[Any], Any], rows: tuple[int, ...], size: int, make_dataset: Make
) -> None:
    index = make_dataset(rows=rows)
    dataset = memload.MemmapDataset(index.path)
    read(dataset)
    shard = dataset.shards.paths[-1]
    os.truncate(shard, min(size, shard.stat().st_size - 1))
    with pytest.raises(
        FormatError, match=r"bin: expected 4,\d+ bytes as when it was opened, found .*truncated"
    ) as caught:
        read(dataset)
    assert caught.value.path == str(shard)


def test_a_file_written_over_while_it_is_open_is_told_with_its_row(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(2, 3))
    shards = Shards(index)
    expected = whole(shards).copy()
    second = tmp_path / "made-00001-of-00002.bin"
    os.utime(second, (1, 1))
    assert np.array_equal(whole(shards), expected)  # touched, and as it was
    with second.open("r+b") as file:
        file.seek(4096 + 72 + 7)
        file.write(bytes([expected[3].reshape(-1)[7] ^ 1]))
    assert np.array_equal(
        shards.gather(np.array([1, 2]), np.empty((2, 4, 6, 3), np.uint8)), expected[1:3]
    )
    with pytest.raises(
        ChecksumError, match=r"00001-of-00002\.bin: expected row 3 as it was written"
    ) as caught:
        whole(shards)
    assert caught.value.rows == (3,)


@pytest.mark.parametrize("way", ["replaced", "removed"])
def test_a_file_replaced_or_removed_while_it_is_open_is_read_on(
    way: str, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    shards = Shards(index)
    expected = whole(shards).copy()
    if way == "replaced":
        (tmp_path / "new").write_bytes(bytes(100))
        (tmp_path / "new").replace(shards.paths[0])
    else:
        shards.paths[0].unlink()
    assert np.array_equal(whole(shards), expected)


@pytest.mark.parametrize("read", READ, ids=["gather", "sample", "Loader"])
def test_a_row_that_the_disk_does_not_give_is_told_and_the_others_are_read(
    read: Callable[[Any], Any], make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 2 * (64 << 10) // 72  # two blocks and a bit more
    index = make_dataset(rows=(rows,))
    dataset = memload.MemmapDataset(index.path)
    from memload.storage import shards as module

    bad = dataset.shards._addresses[0] + 1000 * 72
    usual = module.fault_in

    def fails(address: int, size: int) -> None:
        if address <= bad < address + size:
            raise OSError(errno.EIO, "Input/output error")
        usual(address, size)

    monkeypatch.setattr(module, "fault_in", fails)
    dataset.shards._seen[0][:] = False
    read(dataset)
    dataset.gather(range(990, 1000))  # of the same block
    with pytest.raises(
        FormatError, match=r"made\.bin: row 1000: cannot be read: Input/output error"
    ):
        read(dataset.subset([1000] * 5))


@pytest.fixture
def leases(tmp_path: Path) -> bool:
    """Whether this filesystem has leases, asked of the system itself."""
    if not LEASES:
        return False
    import fcntl

    (tmp_path / "asked").touch()
    with (tmp_path / "asked").open("rb") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            return False
    return True


@pytest.mark.parametrize("rows", [(5,), (3, 2)])
def test_nobody_truncates_a_file_while_rows_are_copied_from_it(
    rows: tuple[int, ...], leases: bool, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not leases:
        pytest.skip("no leases here")
    shards = Shards(make_dataset(rows=rows))
    expected = whole(shards).copy()
    found: list[Any] = []

    def another(path: Path) -> None:
        with pytest.raises(BlockingIOError):  # O_NONBLOCK: else it would wait
            os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)

    usual = shards._secure

    def secure(shard: int, inside: np.ndarray, again: bool, now: Any = None) -> None:
        found.append(now)
        if now is not None:
            another(shards.paths[shard])
        usual(shard, inside, again, now)

    monkeypatch.setattr(shards, "_secure", secure)
    assert np.array_equal(whole(shards), expected)
    assert len(found) == len(rows)
    assert None not in found
    for path in shards.paths:  # and afterwards nobody waits
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("rows", [(5,), (3, 2)])
@pytest.mark.parametrize("descr", ["|u1", "<f4"])
def test_a_file_that_somebody_can_write_to_is_read_without_its_map(
    rows: tuple[int, ...],
    descr: str,
    leases: bool,
    make_dataset: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards = Shards(make_dataset(rows=rows, descr=descr))
    expected = whole(shards).copy()
    read: list[int] = []
    usual = shards._read

    def spy(shard: int, *others: Any) -> None:
        read.append(shard)
        usual(shard, *others)

    monkeypatch.setattr(shards, "_read", spy)
    with shards.paths[-1].open("r+b") as file:
        order = np.array([4, 0, 3, 4, 1])
        out = np.empty((5, *shards.array.shape), descr)
        assert np.array_equal(shards.gather(order, out), expected[order])
        assert read == ([len(rows) - 1] if leases else [])
        size = file.seek(0, os.SEEK_END)
        secured = shards._secure

        def late(shard: int, *others: Any) -> None:
            secured(shard, *others)
            if shard == len(rows) - 1:
                file.truncate(4096)  # after all that can be looked at beforehand

        if leases:
            monkeypatch.setattr(shards, "_secure", late)
            with pytest.raises(
                FormatError, match=r"cannot be read: expected .* bytes at 4[0-9]*, found 0"
            ):
                whole(shards)
        assert size > 4096


@pytest.mark.skipif(not LEASES, reason="leases are of Linux alone")
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EACCES])
def test_where_there_are_no_leases_rows_are_read_as_well(
    error: int, make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memload.storage import leases

    shards = Shards(make_dataset(rows=(3, 2)))
    expected = whole(shards).copy()
    asked: list[int] = []

    def refuse(descriptor: int, what: int, value: int) -> None:
        asked.append(what)
        raise OSError(error, "refused")

    monkeypatch.setattr(leases.fcntl, "fcntl", refuse)
    assert np.array_equal(whole(shards), expected)
    assert np.array_equal(whole(shards), expected)
    # each shard is asked for once: opening costs a round trip on a network filesystem
    assert asked.count(leases.fcntl.F_SETSIG) == 2


def test_pages_are_asked_for_once_and_again_on_demand(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = Shards(make_dataset(rows=(2000,)))
    from memload.storage import shards as module

    asked: list[int] = []
    monkeypatch.setattr(module, "fault_in", lambda address, size: asked.append(size))
    rows = np.arange(900, 1000)
    shards.secure(rows)
    shards.secure(rows)
    assert asked == [910 * 72]
    shards.secure(rows[:3], again=True)
    assert asked == [910 * 72, 72, 72, 72]


# ---- writing


def written(folder: Path, rows: tuple[int, ...] = (2, 1)) -> ShardWriter:
    names = shard_names("out.bin", len(rows))
    shards = tuple(
        Shard(name, held, 4096 + 6 * held) for name, held in zip(names, rows, strict=True)
    )
    writer = ShardWriter(folder, Array("image", "|u1", (1, 2, 3), shards))
    writer.create()
    return writer


def test_shards_begin_as_zeros_at_full_size(tmp_path: Path) -> None:
    written(tmp_path)
    first, second = sorted(tmp_path.iterdir())
    assert first.read_bytes() == npy_header("|u1", (2, 1, 2, 3)) + bytes(12)
    assert second.read_bytes() == npy_header("|u1", (1, 1, 2, 3)) + bytes(6)


@pytest.mark.parametrize("rows", [(5,), (2, 1, 2)])
def test_a_sealed_shard_is_told_from_one_of_other_rows(
    rows: tuple[int, ...], make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=rows)
    writer = ShardWriter(tmp_path, index.image)
    writer.seal(index.crc32["image"])
    writer.close()
    before = all_pixels(index)
    assert np.array_equal(np.concatenate(Shards(index).maps), before)  # which NumPy reads as well

    other = index.crc32["image"].copy()
    other[2] ^= 1
    writer.seal(other)
    writer.close()
    with pytest.raises(
        ChecksumError,
        match=r"expected the rows that made.idx has the checksums of \(seal [0-9a-f]{16}",
    ):
        Shards(index)
    report = memload.verify(index.path)
    assert (len(report.problems), report.bad_rows) == (1, [])


@pytest.mark.parametrize(
    "damage", [b"# 0123456789abcdeF\n", b"# 0123456789abcde \n", b"% 0123456789abcdef\n"]
)
def test_a_damaged_seal_is_a_damaged_header(
    damage: bytes, make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    with (tmp_path / "made.bin").open("r+b") as file:
        file.seek(4096 - len(damage))
        file.write(damage)
    with pytest.raises(FormatError, match="expected the NPY header of 5 rows"):
        Shards(index)


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
        with pytest.raises(
            ChecksumError, match=r"expected the rows that val.idx has the checksums of"
        ):
            open_it(tmp_path / "val.idx")
    assert len(memload.MemmapDataset(tmp_path / "out.bin")) == 12


def test_several_writers_write_the_same_files(tmp_path: Path) -> None:
    one, other = written(tmp_path), written(tmp_path)
    other.write(2, b"third.")
    one.write(0, b"first.")
    other.write(1, b"second")
    assert [one.read(row) for row in range(3)] == [b"first.", b"second", b"third."]
    for writer in (one, other):
        writer.close()


def test_creating_again_keeps_the_rows(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.write(1, b"second")
    writer.close()
    again = written(tmp_path)
    assert [again.read(row) for row in range(3)] == [bytes(6), b"second", bytes(6)]
    again.close()


def test_a_blanked_row_is_zeros(tmp_path: Path) -> None:
    writer = written(tmp_path)
    writer.write(0, b"first.")
    writer.write(1, b"second")
    for _ in range(2):
        writer.blank(0)
    assert [writer.read(0), writer.read(1)] == [bytes(6), b"second"]
    writer.close()


def test_writes_that_are_cut_short_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.pread
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real_write(file, data[:2], offset))
    monkeypatch.setattr(
        os, "pread", lambda file, size, offset: real_read(file, min(size, 4), offset)
    )
    writer = written(tmp_path, (1,))
    writer.write(0, b"abcdef")
    assert writer.read(0) == b"abcdef"
    writer.close()
    assert (tmp_path / "out.bin").read_bytes() == npy_header("|u1", (1, 1, 2, 3)) + b"abcdef"


def test_rows_are_written_and_read_where_the_system_cannot_do_so_at_an_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pwrite")
    monkeypatch.delattr(os, "pread")
    writer = written(tmp_path)
    for row, pixels in ((2, b"third."), (0, b"first."), (1, b"second")):
        writer.write(row, pixels)
    assert [writer.read(row) for row in (1, 2, 0)] == [b"second", b"third.", b"first."]
    writer.close()
    assert (tmp_path / "out-00000-of-00002.bin").read_bytes() == npy_header(
        "|u1", (2, 1, 2, 3)
    ) + b"first.second"


def test_a_row_that_ends_before_its_time_is_an_error(tmp_path: Path) -> None:
    writer = written(tmp_path, (2,))
    os.truncate(tmp_path / "out.bin", 4096 + 9)
    try:
        assert writer.read(0) == bytes(6)
        with pytest.raises(OSError, match="expected 6 bytes at 4102, found 3"):
            writer.read(1)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("rows", "held", "expected"), [(10, 10, [10]), (10, 4, [4, 4, 2]), (1, 1, [1])]
)
def test_rows_are_shared_out_among_shards(rows: int, held: int, expected: list[int]) -> None:
    shards = plan_shards(shard_names("out.bin", len(expected)), rows, held, 100)
    assert [shard.rows for shard in shards] == expected
    assert [shard.bytes for shard in shards] == [4096 + 100 * count for count in expected]


def test_rows_are_described_for_people() -> None:
    assert describe((10_000, 224, 160, 3), "|u1") == "10,000 rows of 224×160×3 uint8"
    assert describe((1, 2, 3, 1), "<f2") == "1 rows of 2×3×1 float16"


def test_a_link_that_leads_out_of_the_folder_is_refused_and_not_opened(
    make_dataset: Make, tmp_path: Path
) -> None:
    index, elsewhere = make_dataset(), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "made.bin").rename(elsewhere / "made.bin")
    for target in (
        elsewhere / "made.bin",
        Path("elsewhere/made.bin"),
        Path("/dev/zero"),
        Path("/etc/passwd"),
    ):
        (tmp_path / "made.bin").unlink(missing_ok=True)
        (tmp_path / "made.bin").symlink_to(target)
        for use in (*OPENERS, lambda index: memload.info(index.path)):
            with pytest.raises(
                FormatError,
                match=r"made\.bin: expected a file in the folder of made\.idx, found a link",
            ):
                use(index)
        (problem,) = memload.verify(index.path).problems
        assert "found a link to" in problem


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
