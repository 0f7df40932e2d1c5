"""Several arrays under one index: masks, arrays of any shape, and NPY files of other programs."""

import io
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memload.errors import ChecksumError, FormatError
from memload.storage.index import Array, Index, Shard
from memload.storage.shards import Shards


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([4096, 128]))
@settings(max_examples=30, deadline=None, database=None)
def test_an_array_knows_in_which_shard_and_where_in_it_each_row_is(counts, header):
    shards = tuple(Shard(f"{n}.bin", rows, header + 6 * rows) for n, rows in enumerate(counts))
    array = Array("depth", "<u2", (3,), shards, "array")
    expected = [(n, header + 6 * row) for n, rows in enumerate(counts) for row in range(rows)]
    assert array.starts.tolist() == [0, *np.cumsum(counts)]
    order = np.random.default_rng(0).permutation(sum(counts))
    shard, offset = array.locate(order)
    assert shard.dtype == offset.dtype == array.starts.dtype == np.int64
    assert list(zip(shard.tolist(), offset.tolist(), strict=True)) == [expected[n] for n in order]
    assert [part.tolist() for part in array.locate(np.empty(0, np.int64))] == [[], []]


def test_an_array_is_the_same_value_after_its_rows_were_located():
    array, other = (Array("image", "|u1", (1, 1, 2), (Shard("a", 2, 4100),)) for _ in range(2))
    array.locate(np.array([1]))
    assert array == other == pickle.loads(pickle.dumps(array)) == replace(array)
    assert hash(array) == hash(other)
    assert array.as_dict() == other.as_dict()


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        ("mask", (6, 5), "<u2"),
        ("mask", (1, 1), "|u1"),
        ("array", (7,), "<f8"),
        ("array", (2, 3, 4, 5), "|b1"),
        ("npy", (7,), "<i8"),
        ("npy", (2, 3, 4, 5), "<f2"),
        ("npy", (1,), "|i1"),
    ],
)
def test_masks_arrays_and_npy_files_of_other_programs_come_back(
    make_dataset, add_array, kind, shape, dtype
):
    index = make_dataset()
    values = np.random.default_rng(1).integers(0, 2, (len(index), *shape)).astype(dtype)
    rows = np.arange(len(index))[::-1].copy()
    add_array(index, "extra", values, kind, other_rows={"extra": rows})
    read = Index.read(index.path)
    assert read.array("extra").kind == ("mask" if kind == "mask" else "array")
    assert read.array("extra").header_bytes == (128 if kind == "npy" else 4096)
    out = np.empty_like(values)
    Shards(read, "extra").gather(read.rows_of("extra"), out)
    np.testing.assert_array_equal(out, values[rows])


def test_rows_of_every_array_follow_a_subset(make_dataset, add_array, tmp_path):
    index = make_dataset()
    values, rows = np.arange(10, dtype="<f4").reshape(-1, 1), np.arange(len(index)) * 2
    index = add_array(index, "features", values, "npy", other_rows={"features": rows})
    part = index.subset(np.array([3, 1]))
    assert part.rows_of("features").tolist() == [6, 2]
    assert part.rows_of("image").tolist() == index.row[[3, 1]].tolist()
    with pytest.raises(KeyError, match="feature"):
        part.rows_of("feature")
    assert Index.read(part.write(tmp_path / "part.idx").path).rows_of("features").tolist() == [6, 2]


def test_files_of_one_array_are_of_version_1_and_of_several_of_version_2(make_dataset, add_array):
    index = make_dataset()
    assert b'\\"format_version\\":1,' in index.path.read_bytes()
    add_array(index, "features", np.zeros((len(index), 1), "<f4"))
    assert b'\\"format_version\\":2,' in index.path.read_bytes()


def test_a_replaced_npy_file_is_refused(make_dataset, add_array):
    values = np.ones((5, 4), "<f4")
    index = add_array(make_dataset(), "features", values, "npy")
    path = index.path.with_name("made.features.bin")
    for other in (values.reshape(-1, 2, 2), np.asfortranarray(values), values.view("<i4")):
        file = io.BytesIO()
        np.save(file, other)
        path.write_bytes(file.getvalue())
        with pytest.raises(FormatError, match=r"features\.bin is damaged or was replaced"):
            Shards(index, "features")
    with path.open("wb") as file:
        np.save(file, values * 2)
    with pytest.raises(ChecksumError, match=r"features\.bin is damaged or belongs to another"):
        Shards(index, "features")
