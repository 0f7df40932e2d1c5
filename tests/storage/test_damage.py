"""Damaged and forged indexes: each is refused with FormatError, or opens as what was written."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memload
from memload.errors import FormatError
from memload.storage.index import Index


@pytest.fixture
def index(make_dataset, add_array):
    columns = {"label": np.arange(5) % 3, "split": np.zeros(5, int), "eyes": np.zeros((5, 1, 2))}
    index = make_dataset(rows=(3, 2), columns=columns, categories={"split": ("a",)})
    masks, rows = np.zeros((6, 4, 6), "|u1"), {"mask": np.arange(5)}
    return add_array(index, "mask", masks, "mask", other_rows=rows)


def tensor(name, values, dtype="<i8"):
    return lambda metadata, tensors: tensors.update({name: np.array(values, dtype)})


def without(name):
    return lambda metadata, tensors: tensors.pop(name)


def array(number=0, **changes):
    return lambda metadata, tensors: metadata["arrays"][number].update(changes)


def shard(number=0, array=0, **changes):
    return lambda metadata, tensors: metadata["arrays"][array]["shards"][number].update(changes)


def entry(**changes):
    return lambda metadata, tensors: metadata.update(changes)


ROW, LABEL, COUNT = "a row of 'image'", "a number in 'label'", "not one value for each sample"
TYPE, SIZE = "'image' is of ", r"\.bin has a wrong size"
#: Changes to an index whose fingerprint and checksums are right all the same.
FORGED = [
    (tensor("row", [0, 1, 2, 3, 5]), f"{ROW} is not a whole number from 0 to 4"),
    (tensor("row", [0, 1, 2, 3, -1]), ROW),
    (tensor("row", [0, 1, 2, 3, 4], "<i4"), ROW),
    (tensor("row", [[0]] * 5), ROW),
    (tensor("row/mask", [0, 1, 2, 3, 6]), "a row of 'mask' is not a whole number from 0 to 5"),
    (tensor("label", [0, 1, 2, 0, 3]), f"{LABEL} is not a whole number from 0 to 2"),
    (tensor("label", [0, 1, 2, 0, -1]), LABEL),
    (tensor("label", [0, 1, 2, 0, 1], "<f8"), LABEL),
    (tensor("split", [0, 0, 0, 0, 1]), "a number in 'split' is not a whole number from 0 to 0"),
    (tensor("row", [0, 1, 2, 3]), COUNT),
    (tensor("row/mask", [0, 1, 2, 3]), COUNT),
    (tensor("eyes", [[[0, 0]]] * 4, "<f4"), COUNT),
    (tensor("flags", [0] * 4, "|u1"), COUNT),
    (tensor("key/offsets", [0] * 5), COUNT),
    (entry(samples=4), COUNT),
    (tensor("crc32/mask", [0] * 5, "<u4"), "'mask' has not one checksum for each row"),
    (without("row"), "'row'"),
    (without("label"), "'label'"),
    (without("crc32/mask"), "'crc32/mask'"),
    (entry(categories={"nothing": ["a"]}), "'nothing'"),
    (entry(categories=["split"]), "AttributeError"),
    (entry(arrays=[]), "'image'"),
    (array(kind="array"), "its images are of another kind"),
    (array(shards=[]), "out of range"),
    (array(descr="|O8"), TYPE),
    (array(descr=">u2"), TYPE),
    (array(1, descr="<f4"), "'mask' is of <f4"),
    (array(shape=[4, 6, 1]), SIZE),
    (shard(rows=2**62), SIZE),
    (shard(1, bytes=4096), SIZE),
    (shard(array=1, bytes=6 * 24), SIZE),
    (shard(array=1, bytes=6 * 24 + 65536), SIZE),
    *((shard(file=name), "without a folder") for name in ("", ".", "..", "../a.bin", "/a", "a/")),
    (shard(file="x" * 10**6 + "/"), "'xxx"),
]


@pytest.mark.parametrize(("change", "problem"), FORGED)
def test_a_forged_index_is_refused_in_a_short_line(change, problem, index, tamper):
    Index.read(tamper(index.path, lambda metadata, tensors: None))
    path = tamper(index.path, change)
    with pytest.raises(FormatError, match=problem) as caught:
        Index.read(path)
    assert f"{path} is damaged or was not written by memload (" in str(caught.value)
    assert str(caught.value).endswith("Restore it, or run 'memload build' again.")
    assert len(str(caught.value)) < 600


def test_a_newer_format_says_to_upgrade_whatever_else_it_holds(index, tamper):
    def newer(metadata, tensors):
        tensors.clear()
        metadata.clear()
        metadata["format_version"] = 3

    with pytest.raises(FormatError, match=r"version 3, .* up to 2\. .*pip install --upgrade"):
        Index.read(tamper(index.path, newer))


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (rb"\"samples\":5", rb"\"samples\":6", "its fingerprint does not fit its metadata"),
        (b'"memload"', b'"memlode"', "KeyError: 'memload'"),
        (b"__metadata__", b"__metabase__", "KeyError: '__metadata__'"),
    ],
)
def test_changed_metadata_are_refused(old, new, problem, index):
    whole = index.path.read_bytes()
    assert whole.count(old) == 1
    index.path.write_bytes(whole.replace(old, new))
    with pytest.raises(FormatError, match=problem):
        Index.read(index.path)


@pytest.mark.parametrize("tensor", ["row", "label", "crc32/image", "key/bytes", "key/offsets"])
def test_a_changed_tensor_is_refused_and_that_of_names_when_one_is_used(index, tamper, tensor):
    def change(metadata, tensors):
        tensors[tensor].view(np.uint8)[-2] ^= 1

    path = tamper(index.path, change, relist=False)
    for use in (
        lambda: Index.read(path).keys[0],
        lambda: Index.read(path).subset(np.array([1])).write(path.with_name("some.idx")),
        lambda: memload.verify(path),
    ):
        with pytest.raises(
            FormatError, match=rf"made\.idx is damaged .* its tensor '{tensor}' differs .* Restore"
        ):
            use()
    if tensor.startswith("key/"):
        assert len(Index.read(path).keys) == 5


@settings(max_examples=100, deadline=None, database=None)
@given(st.data())
def test_an_index_with_other_bytes_opens_as_it_was_or_is_refused(write_dataset, data):
    with tempfile.TemporaryDirectory() as folder:
        columns = {"label": np.arange(5) % 3, "eyes": np.linspace(0, 3, 10).reshape(5, 1, 2)}
        index = write_dataset(Path(folder), columns=columns, points=("eyes",))
        whole = index.path.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        start = data.draw(st.integers(data.draw(st.sampled_from([0, header])), len(whole) - 1))
        length = data.draw(st.sampled_from([0, 1, 1, 1, 8, len(whole)]))  # the last one truncates
        content = whole[:start] + data.draw(st.binary(max_size=8)) + whole[start + length :]
        index.path.write_bytes(content)
        try:
            found = Index.read(index.path)
            names = list(found.keys)
        except FormatError:
            return
        assert names == list(index.keys)
        assert found.fingerprint == index.fingerprint
        assert found.write(Path(folder) / "again.idx").fingerprint == index.fingerprint
        del found
