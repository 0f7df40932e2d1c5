"""Samples written anew as one data set."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import memload
from memload.cli import main
from memload.errors import BuildError, ChecksumError
from memload.storage.index import Index
from memload.storage.shards import Shards

Make = Callable[..., Index]


def pixels(index: Index, name: str = "image") -> np.ndarray:
    rows = index.rows_of(name)
    shards = Shards(index, name)
    return shards.gather(rows, np.empty((len(rows), *shards.array.shape), shards.array.descr))


def assert_same_samples(copied: Index, index: Index) -> None:
    assert list(copied.keys) == list(index.keys)
    assert [array.name for array in copied.arrays] == [array.name for array in index.arrays]
    for array in index.arrays:
        assert np.array_equal(pixels(copied, array.name), pixels(index, array.name))
        assert copied.array(array.name).kind == array.kind
        assert copied.array(array.name).header_bytes == 4096
    assert copied.columns.keys() == index.columns.keys()
    for name, column in index.columns.items():
        assert np.array_equal(copied.columns[name], column, equal_nan=column.dtype.kind == "f")
    for name in ("classes", "categories", "points", "boxes"):
        assert getattr(copied, name) == getattr(index, name)
    assert np.array_equal(copied.flags, index.flags)
    assert memload.verify(copied.path).ok


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("descr", ["|u1", "<u2", "<i2", "<f4"])
@pytest.mark.parametrize("shape", [(4, 6, 1), (5, 3, 3), (4, 4, 7)])
def test_a_subset_becomes_a_data_set_of_its_own(
    make_dataset: Make, tmp_path: Path, descr: str, shape: tuple[int, int, int]
) -> None:
    n = 12
    make_dataset(
        rows=(7, 5),
        shape=shape,
        descr=descr,
        flags=np.arange(n, dtype=np.uint8),
        columns={
            "split": np.arange(n) % 2,
            "label": np.arange(n) % 3,
            "age": np.where(np.arange(n) % 5, 0.1, np.nan),
            "marks": np.arange(n * 4.0).reshape(n, 2, 2),
        },
        categories={"split": ("train", "val")},
        points=("marks",),
    )
    view = memload.MemmapDataset(tmp_path / "made.bin").subset([11, 3, 3, 0, 8, 3, 7])
    report = memload.copy(view, tmp_path / "packed.bin", progress=False)
    copied = Index.open(tmp_path / "packed.bin")
    assert_same_samples(copied, view.index)
    assert (report.path, report.samples, report.classes) == (tmp_path / "packed.bin", 7, 3)
    assert copied.row.tolist() == [0, 1, 1, 2, 3, 1, 4]  # shared rows stay shared
    assert copied.image.rows == 5
    assert copied.statistics["class_counts"] == [4, 1, 2]
    used = pixels(copied)[np.unique(copied.row, return_index=True)[1]].astype(np.float64)
    largest = np.iinfo(descr).max if np.dtype(descr).kind == "u" else 1
    assert copied.statistics["mean"] == pytest.approx(used.mean(axis=(0, 1, 2)) / largest)
    assert copied.statistics["std"] == pytest.approx(used.std(axis=(0, 1, 2)) / largest)


def test_what_was_put_together_becomes_one_data_set(
    make_dataset: Make, add_array: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    for number, name in enumerate(("one.bin", "two.bin")):
        index = make_dataset(name, rows=(4, 3), seed=number, classes=("b", "a", f"c{number}"))
        index = replace(index, row=rng.permutation(7)).write(index.path)
        ids = rng.integers(0, 9 + number, (7, 4, 6)).astype(np.uint8)
        add_array(index, "mask", ids, "mask", other_rows={"mask": rng.permutation(7)})
    both = memload.concat(tmp_path / "one.bin", tmp_path / "two.bin")
    both.write(tmp_path / "both.idx")
    np.save(tmp_path / "features.npy", rng.random((14, 5)))
    joined = memload.join(both, features=tmp_path / "features.npy")
    joined.write(tmp_path / "all.idx")
    whole = Index.open(tmp_path / "all.idx")
    expected = {array.name: pixels(whole, array.name) for array in whole.arrays}
    memload.copy(tmp_path / "all.idx", tmp_path / "packed.bin", progress=False)
    copied = Index.open(tmp_path / "packed.bin")
    assert_same_samples(copied, whole)
    assert copied.statistics["mask_ids"] == {"mask": np.unique(expected["mask"]).tolist()}
    for path in (*tmp_path.glob("one*"), *tmp_path.glob("two*"), tmp_path / "features.npy"):
        path.unlink()
    assert files(tmp_path)[2:] == [
        "packed.bin", "packed.features.bin", "packed.idx", "packed.mask.bin",
    ]  # fmt: skip
    for name, values in expected.items():
        assert np.array_equal(pixels(Index.open(tmp_path / "packed.bin"), name), values)


def test_the_copy_of_a_build_is_the_same_to_the_byte(output: Path, tmp_path: Path) -> None:
    memload.copy(output, tmp_path / "packed.bin", progress=False)
    assert (tmp_path / "packed.bin").read_bytes() == output.read_bytes()
    assert Index.open(tmp_path / "packed.bin").statistics == Index.open(output).statistics


def test_files_have_at_most_the_size_that_was_asked_for(
    make_dataset: Make, add_array: Any, tmp_path: Path
) -> None:
    index = add_array(make_dataset(rows=(11,)), "depth", np.arange(11.0)[:, None])
    limit = 4096 + 3 * index.image.row_bytes + 5
    memload.copy(index.path, tmp_path / "packed.bin", shard_size=f"{limit} B", progress=False)
    copied = Index.open(tmp_path / "packed.bin")
    assert [shard.rows for shard in copied.image.shards] == [3, 3, 3, 2]
    assert max(path.stat().st_size for path in tmp_path.glob("packed*.bin")) <= limit
    assert_same_samples(copied, index)
    with pytest.raises(ValueError, match="shard_size: 'large' is not a size"):
        memload.copy(index.path, tmp_path / "again.bin", shard_size="large")
    with pytest.raises(ValueError, match="shard_size: 4,100 bytes are too few"):
        memload.copy(index.path, tmp_path / "again.bin", shard_size=4100, progress=False)


def test_an_existing_data_set_is_replaced_only_when_that_is_said(
    make_dataset: Make, tmp_path: Path
) -> None:
    index, old = make_dataset("new.bin", seed=1), make_dataset("old.bin", rows=(2, 3))
    before = files(tmp_path)
    with pytest.raises(BuildError, match=r"exists already"):
        memload.copy(index.path, tmp_path / "old.bin", progress=False)
    assert files(tmp_path) == before
    assert np.array_equal(pixels(Index.open(old.path)), pixels(old))
    memload.copy(index.path, tmp_path / "old.bin", overwrite=True, progress=False)
    assert files(tmp_path) == ["new.bin", "new.idx", "old.bin", "old.idx"]
    assert_same_samples(Index.open(tmp_path / "old.bin"), index)


def test_a_folder_in_the_way_leaves_the_data_set_that_was_to_be_replaced(
    make_dataset: Make, add_array: Any, tmp_path: Path
) -> None:
    index = add_array(make_dataset("new.bin"), "mask", np.zeros((5, 4, 6), np.uint8), "mask")
    make_dataset("old.bin", rows=(3,))
    (tmp_path / "old.mask.bin").mkdir()
    before = files(tmp_path)
    with pytest.raises(BuildError, match=r"old.mask.bin is a folder. Move it away"):
        memload.copy(index.path, tmp_path / "old.bin", overwrite=True, progress=False)
    assert files(tmp_path) == before
    assert memload.verify(tmp_path / "old.bin").ok


def test_a_data_set_is_not_copied_onto_files_that_it_is_read_from(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset("out.bin")
    view = memload.MemmapDataset(tmp_path / "out.bin").subset([1])
    view.save(tmp_path / "few.idx")
    for source, output in (("out.bin", "out.bin"), ("few.idx", "out.bin"), ("few.idx", "few.bin")):
        with pytest.raises(BuildError, match="is read from, and cannot be replaced"):
            memload.copy(tmp_path / source, tmp_path / output, overwrite=True, progress=False)
    assert files(tmp_path) == ["few.idx", "out.bin", "out.idx"]


def test_a_damaged_row_is_named_and_nothing_is_left(
    make_dataset: Make, add_array: Any, tmp_path: Path
) -> None:
    index = add_array(make_dataset(), "depth", np.arange(10.0).reshape(5, 2))
    with (tmp_path / "made.depth.bin").open("r+b") as file:
        file.seek(4096 + 2 * 16)
        file.write(b"damaged")
    before = files(tmp_path)
    with pytest.raises(ChecksumError, match=r"made.depth.bin is damaged: row 2 \(cat/2.jpg\)"):
        memload.copy(index.path, tmp_path / "packed.bin", progress=False)
    assert files(tmp_path) == before
    memload.copy(  # a row that is not copied may be damaged
        memload.MemmapDataset(index.path).subset([0, 1, 4]), tmp_path / "packed.bin", progress=False
    )


def test_a_full_disk_leaves_nothing(make_dataset: Make, full_behind: Any, tmp_path: Path) -> None:
    index = make_dataset(rows=(30,), shape=(64, 64, 3))
    before = files(tmp_path)
    message = r"packed.bin cannot be written: .*File too large. Make room"
    with full_behind(100_000), pytest.raises(BuildError, match=message):
        memload.copy(index.path, tmp_path / "packed.bin", progress=False)
    assert files(tmp_path) == before


def test_the_command_copies_the_samples_that_fulfil_conditions(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset(rows=(9,), columns={"label": np.arange(9) % 3, "age": np.arange(9)})
    output = tmp_path / "few.bin"
    arguments = ["copy", index.path, output, "--where", "label=cat,bee", "--where", "age=1,2,3,8"]
    done = CliRunner().invoke(main, [*map(str, arguments)])
    assert done.stdout == f"{output}: 3 samples, 3 classes\n"
    assert_same_samples(Index.open(output), index.subset(np.array([1, 2, 8])))
    with pytest.raises(ValueError, match=r"made.idx has no samples that fit"):
        memload.copy(index.path, tmp_path / "x.bin", where={"age": 0, "label": "cat"})
    with pytest.raises(TypeError, match="expected str, bytes or"):
        memload.copy([0, 1], tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"must end in '.bin'"):
        memload.copy(index.path, tmp_path / "x.idx")
