"""The index: what is written comes back, and what cannot be opened is told with what to do."""

import errno
import math
import os
import shutil
import stat
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import memload
from memload.errors import FormatError, MissingError
from memload.storage.format import DESCRS_OF_COLUMNS
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

valid_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
any_text = valid_text | st.binary(max_size=5).map(os.fsdecode)
column_names = valid_text.filter(
    lambda name: "/" not in name and name not in ("row", "flags", "key", "label", "__metadata__")
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def indexes(draw):
    samples = draw(st.integers(0, 6))
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shapes = hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)
    types = st.sampled_from([*DESCRS_OF_COLUMNS, ">f4"])
    columns = {
        name: draw(hnp.arrays(dtype, (samples, *shape)))
        for name, (dtype, shape) in draw(
            st.dictionaries(column_names, st.tuples(types, shapes), max_size=3)
        ).items()
    }
    texts = draw(st.none() | st.lists(any_text, min_size=1, max_size=3).map(tuple))
    if texts is not None:
        numbers = hnp.arrays(np.int64, samples, elements=st.integers(0, len(texts) - 1))
        columns |= {"label": draw(numbers), "splits": draw(numbers)}
    shards = tuple(Shard(f"{n}.bin", rows, 4096 + 24 * rows) for n, rows in enumerate(counts))
    return Index(
        path=Path("unwritten.idx"),
        arrays=(Array("image", "<f4", (1, 2, 3), shards),),
        row=draw(hnp.arrays(np.int64, samples, elements=st.integers(0, sum(counts) - 1))),
        flags=draw(hnp.arrays(np.uint8, samples)),
        keys=Keys.of(draw(st.lists(any_text, min_size=samples, max_size=samples))),
        columns=columns,
        crc32={"image": draw(hnp.arrays(np.uint32, sum(counts)))},
        classes=texts,
        points=tuple(name for name, column in columns.items() if column.shape[2:] == (2,)),
        categories={} if texts is None else {"splits": texts},
        build=draw(st.dictionaries(any_text, json_values, max_size=3)),
        statistics=draw(st.dictionaries(any_text, json_values, max_size=3)),
    )


def assert_same(found, expected):
    assert list(found.keys) == list(expected.keys)
    for name in ("arrays", "classes", "points", "categories", "build", "statistics"):
        assert getattr(found, name) == getattr(expected, name), name
    theirs, ours = (
        {"row": index.row, "flags": index.flags, **index.crc32, **index.columns}
        for index in (expected, found)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.shape == theirs[name].shape, name
        assert tensor.dtype.newbyteorder("<") == theirs[name].dtype.newbyteorder("<"), name
        np.testing.assert_array_equal(tensor, theirs[name], name)  # NaN equals NaN


@given(indexes())
@settings(max_examples=60, deadline=None, database=None)
def test_what_is_written_comes_back(index):
    with tempfile.TemporaryDirectory() as folder:
        index = replace(index, path=Path(folder) / "unwritten.idx")
        written = index.write(Path(folder) / "a.idx")
        found = Index.read(Path(folder) / "a.idx")
        assert_same(found, index)
        assert found.fingerprint == written.fingerprint
        found.write(Path(folder) / "b.idx")
        assert (Path(folder) / "b.idx").read_bytes() == (Path(folder) / "a.idx").read_bytes()
        del found


def test_writing_a_subset_needs_at_most_five_times_the_bytes_of_its_names(make_dataset, tmp_path):
    count = 50_000
    names = [f"train/n01440764/n01440764_{number:08d}.JPEG" for number in range(count)]
    rows, flags = np.zeros(count, np.int64), np.zeros(count, np.uint8)
    index = replace(make_dataset(classes=None), row=rows, flags=flags, columns={})
    index = replace(index, keys=Keys.of(names))
    order = np.random.default_rng(0).permutation(count)
    tracemalloc.start()
    try:
        index.subset(order).write(tmp_path / "some.idx")
        assert tracemalloc.get_traced_memory()[1] < 5 * len("".join(names))
    finally:
        tracemalloc.stop()
    assert Index.read(tmp_path / "some.idx").keys[7] == names[order[7]]


def test_a_subset_has_its_own_samples_and_counts_of_classes_and_no_fingerprint_yet(make_dataset):
    index = make_dataset(statistics={"class_counts": [2, 2, 1], "mean": [0.5]})
    subset = index.subset(np.array([4, 3, 0])).subset(np.array([2, 1, 2]))
    assert [subset.row.tolist(), subset.columns["label"].tolist()] == [[0, 3, 0], [0, 0, 0]]
    assert list(subset.keys) == ["ant/0.jpg", "ant/3.jpg", "ant/0.jpg"]
    assert subset.statistics == {"class_counts": [3, 0, 0], "mean": [0.5]}
    assert (subset.fingerprint, len(index.fingerprint)) == ("", 64)
    written = index.subset(np.array([], np.int64)).write(index.path.with_name("none.idx"))
    assert len(Index.read(written.path)) == 0
    assert memload.verify(written.path).ok


def test_a_write_obeys_the_umask_and_one_that_fails_leaves_what_was_there(
    make_dataset, monkeypatch
):
    mask = os.umask(0o022)
    try:
        index = make_dataset()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(index.path.stat().st_mode) == 0o644
    before = index.path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        replace(index, statistics={"mean": [math.nan]}).write(index.path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.idx'$"):
        index.subset(np.array([1])).write(index.path)
    assert index.path.read_bytes() == before
    assert sorted(path.name for path in index.path.parent.iterdir()) == ["made.bin", "made.idx"]


def test_what_version_1_did_not_have_is_in_the_file_only_where_there_is_any(
    make_dataset, add_array
):
    content = make_dataset().path.read_bytes()
    assert b'\\"format_version\\":1,' in content
    for name in (b"categories", b"boxes", b"kind"):
        assert name not in content
    columns = {"label": np.arange(5) % 3, "split": np.arange(5) % 2, "box": np.zeros((5, 1, 4))}
    index = make_dataset(columns=columns, categories={"split": ("a", "b")}, boxes=("box",))
    for found in (Index.read(index.path), index.subset(np.array([3]))):
        assert (found.categories, found.boxes) == ({"split": ("a", "b")}, ("box",))
    add_array(index, "features", np.zeros((5, 1), "<f4"))
    assert b'\\"format_version\\":2,' in index.path.read_bytes()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/smaps_rollup")
def test_an_index_that_was_read_takes_the_memory_of_its_arrays_and_not_of_its_names(write_sparse):
    def private_bytes():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024

    count = 400_000
    with tempfile.TemporaryDirectory() as folder:
        index = write_sparse(Path(folder) / "large.bin", count, (1, 1, 1), {})
        names = Keys.of([f"train/n01440764/n01440764_{number:08d}.JPEG" for number in range(count)])
        path = replace(index, keys=names).write(index.path).path
        before = private_bytes()
        found = Index.read(path)
        arrays = found.row.nbytes + found.columns["label"].nbytes + found.crc32["image"].nbytes
        assert private_bytes() - before < 1.3 * (arrays + found.flags.nbytes)
        assert found.keys[7] == names[7]
        del found


# ---- names, which are read when one is used


def test_names_are_those_of_the_file_that_was_opened_even_if_another_takes_its_place(make_dataset):
    names = list(make_dataset().keys)
    index = Index.read(make_dataset().path)
    others = Keys.of([f"{number}.png" for number in range(5)])
    replace(index, keys=others).write(index.path)
    assert list(Index.read(index.path).keys) == list(others)
    assert list(index.keys) == names
    index.path.unlink()
    assert index.subset(np.array([4])).keys[0] == names[4]
    assert index.keys.pack()[1] is index.keys.pack()[1]  # read once


# ---- files that are missing, or something else


def test_a_missing_index_is_told_and_so_is_an_unfinished_build(make_dataset, tmp_path):
    path = make_dataset().path
    path.unlink()
    for use in (lambda: Index.read(path), lambda: Index.open(path.with_suffix(".bin"))):
        with pytest.raises(
            MissingError, match=r"made\.idx does not exist\. .*memload build'"
        ) as told:
            use()
        assert isinstance(told.value, FileNotFoundError)
        assert told.value.path == str(path)
    (tmp_path / "made.building").mkdir()
    with pytest.raises(MissingError, match=r"its build is not complete .* run the same"):
        Index.read(path)


def test_pixels_under_another_name_are_not_passed_for_the_original(make_dataset, tmp_path):
    index = make_dataset("made.bin").path
    for name in ("copy.bin", "copy.idx"):
        shutil.copy(index.with_suffix(Path(name).suffix), tmp_path / name)
    with pytest.raises(FormatError, match=r"copy\.bin is not a file that copy\.idx names; it"):
        Index.open(tmp_path / "copy.bin")
    assert len(Index.open(tmp_path / "copy.idx")) == 5  # as a saved subset, over other pixels
    assert len(Index.open(tmp_path / "made.bin")) == 5
    sharded = make_dataset("many.bin", rows=(3, 2)).path
    for name in ("many.bin", "many-00001-of-00002.bin", "many", "many.idx"):
        assert Index.open(sharded.with_name(name)).path == sharded


def test_what_is_no_file_is_no_index_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.idx")
    (tmp_path / "zero.idx").symlink_to("/dev/zero")
    (tmp_path / "folder.idx").mkdir()
    long = "x" * 300 + ".idx"
    for name in ("pipe.idx", "zero.idx", "folder.idx", long):
        with pytest.raises(FormatError, match=rf"{name} (cannot be read|is damaged)"):
            Index.read(tmp_path / name)
    for folder in (tmp_path, ".", "/", ""):
        with pytest.raises(
            FormatError, match=r"is not a data set such as .*memload build .* out\.bin'"
        ):
            Index.open(folder)
