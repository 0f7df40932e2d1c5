"""The index: what is written comes back, and no file, however damaged or malicious, does more than raise."""

import errno
import math
import os
import random
import shutil
import stat
import tempfile
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import memload
from memload.errors import ChecksumError, FormatError, MissingError
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

Make = Callable[..., Index]
Tamper = Callable[..., Path]

DTYPES = ("|b1", "|u1", "|i1", "<u2", "<i2", "<f2", "<u4", "<i4", "<f4", "<u8", "<i8", "<f8", ">f4")

valid_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
any_text = valid_text | st.binary(max_size=5).map(os.fsdecode)
column_names = valid_text.filter(
    lambda name: "/" not in name and name not in ("row", "flags", "key", "label", "__metadata__")
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | any_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def columns_of(draw: st.DrawFn, samples: int) -> dict[str, np.ndarray]:
    shapes = hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)
    kinds = st.tuples(column_names, st.sampled_from(DTYPES), shapes)
    return {
        name: draw(hnp.arrays(dtype, (samples, *shape)))
        for name, dtype, shape in draw(st.lists(kinds, max_size=3, unique_by=lambda kind: kind[0]))
    }


def categories_of(columns: dict[str, np.ndarray]) -> st.SearchStrategy[dict[str, tuple[str, ...]]]:
    """Return names for the values of some columns that have few integers."""
    names = {
        name: st.just(tuple(map(str, range(1 + max(column, default=0)))))
        for name, column in columns.items()
        if column.dtype.str == "<i8" and column.ndim == 1
        if np.all(column >= 0) and max(column, default=0) < 100
    }
    return st.fixed_dictionaries({}, optional=names)


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    samples = draw(st.integers(0, 6))
    rows = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    columns = draw(columns_of(samples))
    classes = draw(st.none() | st.lists(any_text, min_size=1, max_size=3).map(tuple))
    if classes is not None:
        columns["label"] = draw(
            hnp.arrays(np.int64, samples, elements=st.integers(0, len(classes) - 1))
        )
    points = tuple(
        name for name, column in columns.items() if column.ndim == 3 and column.shape[2] == 2
    )
    shards = tuple(
        Shard(f"{number}.bin", held, 4096 + 4 * 6 * held) for number, held in enumerate(rows)
    )
    return Index(
        path=Path("unwritten.idx"),
        arrays=(Array("image", "<f4", (1, 2, 3), shards),),
        row=draw(hnp.arrays(np.int64, samples, elements=st.integers(0, sum(rows) - 1))),
        flags=draw(hnp.arrays(np.uint8, samples)),
        keys=Keys.of(draw(st.lists(any_text, min_size=samples, max_size=samples))),
        columns=columns,
        crc32={"image": draw(hnp.arrays(np.uint32, sum(rows)))},
        classes=classes,
        points=points,
        categories=draw(categories_of(columns)),
        build=draw(st.dictionaries(any_text, json_values, max_size=3)),
        statistics=draw(st.dictionaries(any_text, json_values, max_size=3)),
    )


def tensors(index: Index) -> dict[str, np.ndarray]:
    return {"row": index.row, "flags": index.flags, **index.crc32, **index.columns}


def assert_same(found: Index, expected: Index) -> None:
    assert len(found) == len(expected)
    assert found.arrays == expected.arrays
    assert list(found.keys) == list(expected.keys)
    for name in ("classes", "points", "categories", "build", "statistics"):
        assert getattr(found, name) == getattr(expected, name), name
    theirs = tensors(expected)
    assert tensors(found).keys() == theirs.keys()
    for name, tensor in tensors(found).items():
        assert tensor.shape == theirs[name].shape, name
        assert tensor.dtype.newbyteorder("<") == theirs[name].dtype.newbyteorder("<"), name
        np.testing.assert_array_equal(tensor, theirs[name], name)  # NaN equals NaN


@given(indexes())
@settings(max_examples=60, deadline=None, database=None)
def test_what_is_written_comes_back(index: Index) -> None:
    with tempfile.TemporaryDirectory() as folder:
        written = index.write(Path(folder) / "a.idx")
        found = Index.read(Path(folder) / "a.idx")
        assert_same(found, index)
        assert found.fingerprint == written.fingerprint
        again = found.write(Path(folder) / "b.idx")
        assert again.fingerprint == found.fingerprint
        assert (Path(folder) / "b.idx").read_bytes() == (Path(folder) / "a.idx").read_bytes()
        del found


@given(indexes(), st.data())
@settings(max_examples=40, deadline=None, database=None)
def test_a_subset_of_a_subset_is_the_subset_of_both(index: Index, data: st.DataObject) -> None:
    def some(size: int) -> np.ndarray:
        chosen = st.lists(st.integers(0, size - 1), max_size=8) if size else st.just([])
        return np.array(data.draw(chosen), np.int64)

    first = some(len(index))
    second = some(len(first))
    assert_same(index.subset(first).subset(second), index.subset(first[second]))
    subset = index.subset(first)
    assert list(subset.keys) == [index.keys[int(i)] for i in first]
    assert subset.row.tolist() == [index.row[i] for i in first]


def test_writing_a_subset_needs_at_most_three_times_the_bytes_of_its_names(
    make_dataset: Make, tmp_path: Path
) -> None:
    count = 50_000
    names = [f"train/n01440764/n01440764_{number:08d}.JPEG" for number in range(count)]
    zeros = np.zeros(count, np.int64)
    index = replace(
        make_dataset(classes=None),
        row=zeros,
        flags=zeros.astype(np.uint8),
        columns={},
        keys=Keys.of(names),
    )
    order = np.random.default_rng(0).permutation(count)
    tracemalloc.start()
    try:
        index.subset(order).write(tmp_path / "some.idx")
        assert tracemalloc.get_traced_memory()[1] < 3 * len("".join(names))
    finally:
        tracemalloc.stop()
    assert Index.read(tmp_path / "some.idx").keys[7] == names[order[7]]


def test_a_subset_counts_its_own_classes_and_has_no_fingerprint_yet(make_dataset: Make) -> None:
    index = make_dataset(statistics={"class_counts": [2, 2, 1], "mean": [0.5]})
    subset = index.subset(np.array([0, 3, 0]))
    assert subset.statistics == {"class_counts": [3, 0, 0], "mean": [0.5]}
    assert subset.fingerprint == ""
    written = index.subset(np.array([], np.int64)).write(index.path.with_name("none.idx"))
    assert len(Index.read(written.path)) == 0
    assert memload.verify(written.path).ok


def test_a_write_obeys_the_umask_and_one_that_fails_leaves_what_was_there(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = os.umask(0o022)
    try:
        index = make_dataset()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(index.path.stat().st_mode) == 0o644
    before = index.path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        replace(index, statistics={"mean": [math.nan]}).write(index.path)
    with pytest.raises(ValueError, match="but 100,000,000 is the maximum"):
        replace(index, statistics={"text": "a" * 100_000_000}).write(index.path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.idx'$"):
        index.subset(np.array([1])).write(index.path)
    assert index.path.read_bytes() == before
    assert sorted(path.name for path in index.path.parent.iterdir()) == ["made.bin", "made.idx"]


# ---- files that are missing, damaged, or something else


def test_a_missing_index_is_told_with_what_is_there_instead(
    make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(MissingError, match=r"none\.idx does not exist\. .*memload build") as told:
        Index.read(tmp_path / "none.idx")
    assert isinstance(told.value, FileNotFoundError)
    assert told.value.path == str(tmp_path / "none.idx")
    path = make_dataset().path
    path.unlink()
    with pytest.raises(MissingError, match=r"made\.idx is missing: without an .*Copy the index"):
        Index.read(path)
    (tmp_path / "made.building").mkdir()
    with pytest.raises(MissingError, match=r"its build is not complete .* run the same"):
        Index.read(path)


def test_pixels_are_no_index_and_the_message_says_what_opens_them(
    make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset()
    with pytest.raises(FormatError, match=r"it holds pixels\. Read .*made\.idx.*MemmapDataset"):
        Index.read(tmp_path / "made.bin")


def test_no_flipped_bit_goes_unnoticed(make_dataset: Make) -> None:
    original = make_dataset(
        rows=(3, 2),
        columns={
            "label": np.arange(5) % 3,
            "eyes": np.linspace(0, 3, 10, dtype=np.float32).reshape(5, 1, 2),
        },
        points=("eyes",),
        statistics={"mean": [0.5, 0.25, 0.125], "class_counts": [2, 2, 1]},
    )
    path, rng = original.path, random.Random(20)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [rng.randrange(len(whole)) for _ in range(200)]
    places += [rng.randrange(header, len(whole)) for _ in range(200)]
    opened = found = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            index = Index.read(path)
        except FormatError:
            continue
        # what open lets pass is a name, which verify finds
        opened += 1
        assert_same(replace(index, keys=original.keys), original)
        try:
            found += not memload.verify(path, num_threads=1).ok
        except FormatError:
            found += 1
    assert opened > 50
    assert found == opened


def test_a_changed_tensor_is_an_error_at_open_and_a_changed_name_when_one_is_used(
    make_dataset: Make,
) -> None:
    path = make_dataset().path
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"cat/2.jpg", b"cat/3.jpg"))
    index = Index.read(path)
    for use in (
        lambda: index.keys[0],
        lambda: index.subset(np.array([1])).write(path.with_name("some.idx")),
        lambda: memload.verify(path),
    ):
        with pytest.raises(
            ChecksumError, match=r"made\.idx is damaged: its tensor 'key/bytes' has"
        ):
            use()
    labels = index.columns["label"]
    path.write_bytes(whole.replace(labels.tobytes(), labels[::-1].tobytes()))
    with pytest.raises(ChecksumError, match=r"its tensor 'label' has checksum .* instead of"):
        Index.read(path)


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 9, 8, 27, 36, 45],  # goes back
        [1, 9, 18, 27, 36, 45],  # starts late
        [0, 9, 18, 27, 36, 44],  # ends early
        [0, 9, 18, 27, 36, 46],  # ends late
        [0, 2**62, -(2**63), -(2**62), 36, 45],  # so long a step back that a difference overflows
    ],
)
def test_names_with_wrong_offsets_are_never_read(
    offsets: list[int], make_dataset: Make, tamper: Tamper
) -> None:
    path = make_dataset().path
    keys = Index.read(tamper(path, lambda m, t: t.update({"key/offsets": np.array(offsets)}))).keys
    for use in (lambda: keys[0], lambda: keys.take(np.array([2])).pack(), keys.check):
        with pytest.raises(FormatError, match=r"its key/offsets do not rise from 0 to 45\."):
            use()


def test_categories_are_in_the_metadata_only_where_there_are_any(make_dataset: Make) -> None:
    assert b"categories" not in make_dataset().path.read_bytes()
    columns = {"label": np.arange(5) % 3, "split": np.array([1, 0, 1, 1, 0])}
    index = make_dataset(columns=columns, categories={"split": ("test", "train")})
    assert Index.read(index.path).categories == {"split": ("test", "train")}
    assert index.subset(np.array([3])).categories == index.categories


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        ({"nothing": ["a"]}, "'nothing' are no column"),
        ({"label": ["a"]}, "'label' is beyond its categories"),
        ({"label": ["a", "b", 3]}, "'label' are no list of texts"),
        ({"label": "abc"}, "'label' are no list of texts"),
        ({"age": ["a", "b", "c"]}, "'age' with categories is not int64"),
        (["label"], "has no attribute"),
        (None, "has no attribute"),
    ],
    ids=str,
)
def test_wrong_categories_are_refused(
    make_dataset: Make, tamper: Tamper, categories: Any, message: str
) -> None:
    index = make_dataset(columns={"label": np.arange(5) % 3, "age": np.zeros(5)})
    tamper(index.path, lambda metadata, _: metadata.update(categories=categories))
    with pytest.raises(FormatError, match=message):
        Index.read(index.path)


def test_a_newer_format_says_to_upgrade_whatever_else_it_holds(
    make_dataset: Make, tamper: Tamper
) -> None:
    def newer(metadata: Any, tensors: Any) -> None:
        tensors.clear()
        metadata.clear()
        metadata["format_version"] = 3

    path = tamper(make_dataset().path, newer)
    with pytest.raises(
        FormatError,
        match=r"has format version 3, .* reads versions up to 2\. .*pip install --upgrade memload",
    ):
        Index.read(path)


def test_a_failing_disk_is_an_error_when_a_name_is_first_used(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index.read(make_dataset().path)

    def fail(address: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("memload.storage.index.fault_in", fail)
    with pytest.raises(FormatError, match=r"made\.idx cannot be read: Input/output error"):
        index.keys[0]


# ---- malicious files, whose fingerprint and checksums are right

Change = Callable[[Any, dict[str, np.ndarray]], object]


HOSTILE: dict[str, Change] = {
    "row int32": lambda m, t: t.update(row=t["row"].astype(np.int32)),
    "no row": lambda m, t: t.pop("row"),
    "label is float": lambda m, t: t.update(label=t["label"].astype(np.float64)),
    "column of other length": lambda m, t: t.update(extra=np.zeros(4)),
    "points name nothing": lambda m, t: m.update(points=["eyes"]),
    "points name an object": lambda m, t: m.update(points=[{}]),
    "no shards": lambda m, t: m["arrays"][0].update(shards=[]),
    "statistics missing": lambda m, t: m.pop("statistics"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_malicious_index_is_refused_in_little_memory(
    change: Change, make_dataset: Make, tamper: Tamper
) -> None:
    path = tamper(make_dataset().path, change)
    tracemalloc.start()
    try:
        with pytest.raises(
            FormatError,
            match=r"(?s)made\.idx is damaged or was not written by memload: .{,200}\. Restore",
        ):
            Index.read(path)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_pixels_under_another_name_are_not_passed_for_the_original(
    make_dataset: Any, tmp_path: Path
) -> None:
    index = make_dataset("made.bin").path
    for name in ("copy.bin", "copy.idx"):
        shutil.copy(index.with_suffix(Path(name).suffix), tmp_path / name)
    with pytest.raises(
        FormatError, match=r"copy\.bin is not a file that copy\.idx names; it names made\.bin"
    ):
        Index.open(tmp_path / "copy.bin")
    (tmp_path / "copy.bin").unlink()
    with pytest.raises(FormatError, match="is not a file that"):
        Index.open(tmp_path / "copy.bin")
    assert (
        len(Index.open(tmp_path / "copy.idx")) == 5
    )  # as a saved subset: an index over pixels of another name
    assert len(Index.open(tmp_path / "made.bin")) == 5
    sharded = make_dataset("many.bin", rows=(3, 2)).path
    for name in ("many.bin", "many-00001-of-00002.bin", "many", "many.idx"):
        assert Index.open(sharded.with_name(name)).path == sharded


def test_what_is_no_file_is_no_index_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.idx")
    (tmp_path / "zero.idx").symlink_to("/dev/zero")
    for name in ("pipe.idx", "zero.idx"):
        with pytest.raises(FormatError, match=rf"{name} cannot be read: .*a pipe or a device"):
            Index.read(tmp_path / name)
    for folder in (".", "/", ""):
        with pytest.raises(FormatError, match="is a folder, not a data set such as"):
            memload.MemmapDataset(folder)
    for name in ("x" * 300 + ".bin", "x" * 300, "x" * 250 + ".idx"):
        with pytest.raises(FormatError, match=r"x+(\.idx)? (cannot be read|does not exist)"):
            memload.MemmapDataset(tmp_path / name)


@pytest.mark.parametrize("where", ["tensor", "shard", "version"])
def test_an_error_stays_short_whatever_the_names_in_a_file(
    make_dataset: Make, tamper: Tamper, where: str
) -> None:
    long = "n" * 3_000_000

    def change(metadata: Any, tensors: dict[str, np.ndarray]) -> None:
        if where == "shard":
            metadata["arrays"][0]["shards"][0]["file"] = long
        elif where == "version":
            metadata["format_version"] = long
        else:
            tensors[long] = np.zeros(4)  # of five samples

    with pytest.raises(FormatError) as told:
        memload.MemmapDataset(tamper(make_dataset().path, change))
    assert len(str(told.value)) < 1000
