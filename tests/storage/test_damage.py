"""Damaged and forged indexes: each is refused with FormatError, or opens as what was written."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def array(number=0, **changes):
    return lambda metadata, tensors: metadata["arrays"][number].update(changes)


def shard(number=0, array=0, **changes):
    return lambda metadata, tensors: metadata["arrays"][array]["shards"][number].update(changes)


def entry(**changes):
    return lambda metadata, tensors: metadata.update(changes)


ROW, LABEL, TYPE = "a row of 'image'", "a number in 'label'", "its array 'image' has the type"
MASK, EMPTY, SIZE = "its array 'mask' has the type", "has an empty side", r"\.bin has a wrong size"
#: Changes to an index whose fingerprint and checksums are right all the same.
FORGED = [
    (tensor("row", [0, 1, 2, 3, 5]), f"{ROW} is not a whole number from 0 to 4"),
    (tensor("row", [0, 1, 2, 3, -1]), ROW),
    (tensor("row", [0, 1, 2, 3, 4], "<i4"), ROW),
    (tensor("row", [[0]] * 5), ROW),
    (tensor("row", [0, 1, 2, 3]), "it has not a name for each sample"),
    (lambda metadata, tensors: tensors.pop("row"), "'row' is missing"),
    (tensor("row/mask", [0, 1, 2, 3, 6]), "a row of 'mask' is not a whole number from 0 to 5"),
    (tensor("row/mask", [0, 1, 2, 3]), "a row of 'mask'"),
    (tensor("label", [0, 1, 2, 0, 3]), f"{LABEL} is not a whole number from 0 to 2"),
    (tensor("label", [0, 1, 2, 0, -1]), LABEL),
    (tensor("label", [0, 1, 2, 0, 1], "<f8"), LABEL),
    (lambda metadata, tensors: tensors.pop("label"), "'label' is missing"),
    (tensor("split", [0, 0, 0, 0, 1]), "a number in 'split' is not a whole number from 0 to 0"),
    (entry(categories={"nothing": ["a"]}), "'nothing' is missing"),
    (entry(categories=["split"]), "has no attribute"),
    (tensor("eyes", [[[0, 0]]] * 4, "<f4"), "its column 'eyes' has not 5 entries"),
    (tensor("flags", [0] * 4, "|u1"), "it has not 5 samples"),
    (tensor("key/offsets", [0] * 5), "it has not a name for each sample"),
    (tensor("crc32/image", [0] * 4, "<u4"), "its checksums of 'image' are not one for each row"),
    (lambda metadata, tensors: tensors.pop("crc32/mask"), "'crc32/mask' is missing"),
    (entry(samples=4), "it has not 4 samples"),
    (entry(samples="5"), "it has not 5 samples"),
    (lambda metadata, tensors: metadata.pop("statistics"), "'statistics' is missing"),
    (entry(arrays=[]), "'image' is missing"),
    (array(name="mask"), "'image' is missing"),
    (array(kind="array"), "its images are of another kind"),
    (array(shards=[]), "out of range"),
    (array(1, kind="masks"), "'masks' is missing"),
    (array(descr="|O8"), TYPE),
    (array(descr=">u2"), TYPE),
    (array(shape=[4, 18]), TYPE),
    (array(1, descr="<f4"), MASK),
    (array(1, shape=[4, 6, 1]), MASK),
    (array(shape=[0, 6, 3]), EMPTY),
    (array(shape=[-4, -6, 3]), EMPTY),
    (array(shape=[4.0, 6, 3]), EMPTY),
    (array(shape=[True, 24, 3]), EMPTY),
    (shard(rows=0, bytes=4096), EMPTY),
    (shard(rows=3.0), EMPTY),
    (array(shape=[4, 6, 1]), SIZE),
    (shard(rows=2**62), SIZE),
    (shard(bytes=4095), SIZE),
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
    assert f"{path} is damaged or was not written by memload: " in str(caught.value)
    assert str(caught.value).endswith("Restore it, or run 'memload build' again.")
    assert len(str(caught.value)) < 600


def test_a_newer_format_says_to_upgrade_whatever_else_it_holds(index, tamper):
    def newer(metadata, tensors):
        tensors.clear()
        metadata.clear()
        metadata["format_version"] = 3

    with pytest.raises(FormatError, match=r"version 3, .* up to 2\. .*pip install --upgrade"):
        Index.read(tamper(index.path, newer))


def test_metadata_without_their_fingerprint_and_tensors_of_another_type_are_refused(index):
    whole = index.path.read_bytes()
    for old, new, problem in (
        (rb"\"samples\":5", rb"\"samples\":6", "its fingerprint does not fit its metadata"),
        (b'"row":{"dtype":"I64"', b'"row":{"dtype":"U64"', "its tensor 'row' differs"),
        (b'"memload"', b'"memlode"', "'memload' is missing"),
        (b"__metadata__", b"__metabase__", "Error while deserializing header"),
    ):
        assert whole.count(old) == 1
        index.path.write_bytes(whole.replace(old, new))
        with pytest.raises(FormatError, match=problem):
            Index.read(index.path)


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 8, b"\xff" * 99, b"PK\3\4" * 9, b"{" * 99])
def test_another_file_is_refused(content, tmp_path):
    (tmp_path / "other.idx").write_bytes(content)
    with pytest.raises(FormatError, match=r"other\.idx (is damaged or was not written|cannot be)"):
        Index.read(tmp_path / "other.idx")


@settings(max_examples=200, deadline=None, database=None)
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
        assert found.identified().fingerprint == found.fingerprint == index.fingerprint
        del found
