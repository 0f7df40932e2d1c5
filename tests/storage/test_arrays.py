"""Several arrays under one index: masks, arrays of any shape, and NPY files of other programs."""

import io
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memload.errors import ChecksumError, FormatError
from memload.storage.format import npy_header
from memload.storage.index import Array, Index, Shard
from memload.storage.shards import Shards

Make = Callable[..., Index]


def crc32(values: np.ndarray) -> np.ndarray:
    return np.array([zlib.crc32(row.tobytes()) for row in values], np.uint32)


def write_ours(path: Path, values: np.ndarray) -> Shard:
    path.write_bytes(npy_header(values.dtype.str, values.shape) + values.tobytes())
    return Shard(path.name, len(values), path.stat().st_size)


def write_numpy(path: Path, values: np.ndarray) -> Shard:
    np.save(path, values)
    return Shard(path.name, len(values), path.stat().st_size)


def add(index: Index, name: str, values: np.ndarray, shard: Shard, kind: Any, **more: Any) -> Index:
    array = Array(name, values.dtype.str, values.shape[1:], (shard,), kind)
    changes = {"arrays": (*index.arrays, array), "crc32": {**index.crc32, name: crc32(values)}}
    return replace(index, **changes, **more).write(index.path)


def test_a_mask_has_the_shape_h_w_and_its_own_file(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    ids = np.random.default_rng(0).integers(0, 9, (index.image.rows, 6, 5)).astype("<u2")
    add(index, "mask", ids, write_ours(tmp_path / "made.mask.bin", ids), "mask")
    read = Index.read(index.path)
    assert [array.kind for array in read.arrays] == ["image", "mask"]
    assert read.array("mask").header_bytes == 4096
    out = np.empty((len(read), 6, 5), "<u2")
    np.testing.assert_array_equal(
        Shards(read, "mask").gather(read.rows_of("mask"), out), ids[read.row]
    )


@pytest.mark.parametrize("dtype", ["<f8", "|b1", "<i8", "|i1", "<f2"])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 4, 5)])
def test_an_npy_file_of_another_program_is_an_array_as_it_is(
    make_dataset: Make, tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    index = make_dataset()
    values = np.random.default_rng(1).integers(0, 2, (len(index), *shape)).astype(dtype)
    rows = np.arange(len(index))[::-1].copy()
    shard = write_numpy(tmp_path / "features.npy", values)
    add(index, "features", values, shard, "array", other_rows={"features": rows})
    read = Index.read(index.path)
    assert read.array("features").header_bytes < 4096
    shards = Shards(read, "features")
    np.testing.assert_array_equal(shards.maps[0], values)
    out = np.empty_like(values)
    np.testing.assert_array_equal(shards.gather(read.rows_of("features"), out), values[rows])


def test_rows_of_every_array_follow_a_subset(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    values = np.arange(2 * len(index), dtype="<f4").reshape(-1, 1)
    shard = write_numpy(tmp_path / "features.npy", values)
    rows = np.arange(len(index)) * 2
    index = add(index, "features", values, shard, "array", other_rows={"features": rows})
    part = index.subset(np.array([3, 1]))
    assert part.rows_of("features").tolist() == [6, 2]
    assert part.rows_of("image").tolist() == index.row[[3, 1]].tolist()
    with pytest.raises(KeyError, match="feature"):
        part.rows_of("feature")
    assert Index.read(part.write(tmp_path / "part.idx").path).rows_of("features").tolist() == [6, 2]


def test_files_of_one_array_are_of_version_1_and_of_several_of_version_2(
    make_dataset: Make, tmp_path: Path
) -> None:
    index = make_dataset()
    assert b'\\"format_version\\":1,' in index.path.read_bytes()
    values = np.zeros((len(index), 1), "<f4")
    add(index, "features", values, write_numpy(tmp_path / "features.npy", values), "array")
    assert b'\\"format_version\\":2,' in index.path.read_bytes()


def test_a_replaced_npy_file_is_refused(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    values = np.ones((len(index), 4), "<f4")
    add(index, "features", values, write_numpy(tmp_path / "features.npy", values), "array")
    read = Index.read(index.path)
    for other in (values.reshape(-1, 2, 2), np.asfortranarray(values), values.view("<i4")):
        file = io.BytesIO()
        np.save(file, other)
        (tmp_path / "features.npy").write_bytes(file.getvalue())
        with pytest.raises(FormatError, match=r"features\.npy is damaged or was replaced"):
            Shards(read, "features")
    np.save(tmp_path / "features.npy", values * 2)
    with pytest.raises(ChecksumError, match=r"features\.npy is damaged or belongs to another"):
        Shards(read, "features")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "masks"}, "array 'mask' has the unknown kind 'masks'"),
        ({"kind": "image", "shape": [6, 5, 1]}, "its images are not the array 'image'"),
        ({"name": "image"}, "two of its arrays have the same name"),
        ({"descr": "<f4"}, r"the element type of 'mask' is none of \|u1, <u2"),
        ({"shape": [30]}, r"the shape of 'mask' is not \[H, W\]"),
        ({"shape": [60, 50]}, "the size of made.mask.bin does not fit its rows"),
    ],
)
def test_a_forged_array_is_refused(
    make_dataset: Make, tamper: Callable[..., Path], tmp_path: Path, change: Any, message: str
) -> None:
    index = make_dataset()
    ids = np.zeros((index.image.rows, 6, 5), "|u1")
    add(index, "mask", ids, write_ours(tmp_path / "made.mask.bin", ids), "mask")

    def forge(metadata: Any, tensors: Any) -> None:
        metadata["arrays"][1] |= change

    path = tamper(index.path, forge, relist=False)
    with pytest.raises(FormatError, match=message):
        Index.read(path)


def test_an_array_and_a_column_of_one_name_are_refused(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    values = np.zeros((len(index), 1), "<f4")
    add(index, "label", values, write_numpy(tmp_path / "label.npy", values), "array")
    with pytest.raises(FormatError, match="an array and a column share a name"):
        Index.read(index.path)


def test_a_row_beyond_a_second_array_is_refused(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    values = np.zeros((len(index), 1), "<f4")
    shard = write_numpy(tmp_path / "features.npy", values)
    rows = np.full(len(index), len(index))
    add(index, "features", values, shard, "array", other_rows={"features": rows})
    with pytest.raises(FormatError, match="a sample has a row beyond 0 to"):
        Index.read(index.path)


def test_boxes_are_listed_and_checked(make_dataset: Make) -> None:
    index = make_dataset()
    boxes = np.full((len(index), 3, 4), np.nan, "<f4")
    columns = {**index.columns, "boxes": boxes}
    replace(index, columns=columns, boxes=("boxes",)).write(index.path)
    assert Index.read(index.path).boxes == ("boxes",)
    replace(index, columns={**columns, "boxes": boxes[:, :, :2]}, boxes=("boxes",)).write(
        index.path
    )
    with pytest.raises(FormatError, match=r"its boxes 'boxes' are not float32 \(n, k, 4\)"):
        Index.read(index.path)
