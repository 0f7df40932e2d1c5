"""The bytes on disk: golden ones, and a reader that knows nothing but the specification."""

import itertools
import json
import struct
import zlib
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import memload
from memload.errors import FormatError
from memload.storage.format import index_path, npy_header, output_paths, shard_names
from memload.storage.index import Array, Index, Shard
from memload.storage.keys import Keys

# The least data set that has one of everything: two rows, three samples, classes, points, flags, odd names.
PIXELS = bytes(range(1, 13))
METADATA = (
    r'{"arrays":[{"descr":"|u1","name":"image","shape":[1,2,3],'
    r'"shards":[{"bytes":4108,"file":"tiny.bin","rows":2}]}],'
    r'"build":{"memload":"0"},"classes":["caf\u00e9","\udc80"],"columns":["label","eyes"],'
    r'"fingerprint":"e0e70a44d539da0383f3fda198265efe0976c4ddaf9b19d7fd787ae76cc1abe8",'
    r'"format_version":1,"points":["eyes"],"samples":3,"statistics":{"mean":[0.5]},'
    r'"tensors":{"crc32/image":{"crc32":4049496554,"dtype":"<u4","shape":[2]},'
    r'"eyes":{"crc32":3114924998,"dtype":"<f4","shape":[3,1,2]},'
    r'"flags":{"crc32":3778489418,"dtype":"|u1","shape":[3]},'
    r'"key/bytes":{"crc32":100340522,"dtype":"|u1","shape":[5]},'
    r'"key/offsets":{"crc32":540821011,"dtype":"<i8","shape":[4]},'
    r'"label":{"crc32":229202865,"dtype":"<i8","shape":[3]},'
    r'"row":{"crc32":3998134169,"dtype":"<i8","shape":[3]}}}'
)
TENSORS = bytes.fromhex(
    "0000000000000000 0300000000000000 0300000000000000 0500000000000000"  # key/offsets
    "0000000000000000 0100000000000000 0000000000000000"  # label
    "0100000000000000 0000000000000000 0100000000000000"  # row
    "0000003f00000000 0000803f000080bf 0000004000000000"  # eyes
    "2477f681 66856a06"  # crc32/image
    "000104"  # flags
    "612f31 6280"  # key/bytes
)


def tiny(folder):
    return Index(
        path=folder / "tiny.idx",
        arrays=(Array("image", "|u1", (1, 2, 3), (Shard("tiny.bin", 2, 4108),)),),
        row=np.array([1, 0, 1]),
        flags=np.array([0, 1, 4], np.uint8),
        keys=Keys.of(["a/1", "", "b\udc80"]),
        columns={
            "label": np.array([0, 1, 0]),
            "eyes": np.array([[[0.5, 0]], [[1, -1]], [[2, 0]]], np.float32),
        },
        crc32={"image": np.array([zlib.crc32(PIXELS[:6]), zlib.crc32(PIXELS[6:])], np.uint32)},
        classes=("café", "\udc80"),
        points=("eyes",),
        build={"memload": "0"},
        statistics={"mean": [0.5]},
    )


def specified_reader(path):
    """Read an index and its pixels as the docstring of memload.storage.format says, with nothing of memload's."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    text = header.pop("__metadata__")["memload"]
    metadata = json.loads(text)
    mark = f'"fingerprint":"{metadata["fingerprint"]}",'
    assert sha256(text.replace(mark, "").encode("ascii")).hexdigest() == metadata["fingerprint"]
    assert text == json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    types = {"I64": "<i8", "U8": "|u1", "U32": "<u4", "F32": "<f4", "F64": "<f8"}
    tensors = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype = np.dtype(types[entry["dtype"]])
        flat = np.fromfile(path, dtype, (stop - start) // dtype.itemsize, offset=8 + length + start)
        tensors[name] = flat.reshape(entry["shape"])
        listed = {"dtype": dtype.str, "shape": entry["shape"], "crc32": zlib.crc32(flat.tobytes())}
        assert metadata["tensors"][name] == listed
    assert metadata["tensors"].keys() == tensors.keys()

    (image,) = (array for array in metadata["arrays"] if array["name"] == "image")
    parts = []
    for shard in image["shards"]:
        file = path.parent / shard["file"]
        assert file.stat().st_size == shard["bytes"]
        assert file.read_bytes()[:10] == b"\x93NUMPY\x01\x00\xf6\x0f"
        part = np.fromfile(file, image["descr"], offset=4096)
        parts.append(part.reshape(shard["rows"], *image["shape"]))
        head = (
            f"{{'descr': '{image['descr']}', 'fortran_order': False, 'shape': {parts[-1].shape}, }}"
        )
        first = sum(map(len, parts[:-1]))
        checks = tensors["crc32/image"][first : first + shard["rows"]]
        seal = f"# {sha256(checks.tobytes()).hexdigest()[:16]}"
        expected = [head.ljust(4085 - len(end)) + end + "\n" for end in ("", seal)]
        assert file.read_bytes()[10:4096].decode("ascii") in expected
        assert np.array_equal(np.load(file), parts[-1])
    return metadata, tensors, np.concatenate(parts)


def test_the_header_of_a_shard_is_these_4096_bytes_which_hold_the_largest_shape():
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (260, 256, 256, 3), }"
    expected = b"\x93NUMPY\x01\x00\xf6\x0f" + text + b" " * (4096 - 10 - len(text) - 1) + b"\n"
    assert npy_header("|u1", (260, 256, 256, 3)) == expected
    largest = (2**63 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1)
    assert len(npy_header("<f4", largest, seal="0123456789abcdef")) == len(expected) == 4096


def test_an_index_is_these_bytes_on_every_write(tmp_path):
    header = (
        f'{{"__metadata__":{{"memload":{json.dumps(METADATA)}}},'
        '"key/offsets":{"dtype":"I64","shape":[4],"data_offsets":[0,32]},'
        '"label":{"dtype":"I64","shape":[3],"data_offsets":[32,56]},'
        '"row":{"dtype":"I64","shape":[3],"data_offsets":[56,80]},'
        '"eyes":{"dtype":"F32","shape":[3,1,2],"data_offsets":[80,104]},'
        '"crc32/image":{"dtype":"U32","shape":[2],"data_offsets":[104,112]},'
        '"flags":{"dtype":"U8","shape":[3],"data_offsets":[112,115]},'
        '"key/bytes":{"dtype":"U8","shape":[5],"data_offsets":[115,120]}}'
    ).encode("ascii")
    expected = len(header).to_bytes(8, "little") + header + TENSORS
    for name in ("tiny.idx", "tiny.idx", "other.idx"):
        tiny(tmp_path).write(tmp_path / name)
        assert (tmp_path / name).read_bytes() == expected


def test_a_reader_made_from_the_specification_alone_reads_a_build(folder, tmp_path):
    (folder / "bee" / "04.jpg").write_bytes(b"no picture")
    (folder / "cat" / "zoë\udcff.jpg").write_bytes((folder / "cat" / "02.jpg").read_bytes())
    report = memload.build(
        folder, tmp_path / "out.bin", size=(8, 10), num_workers=0, shard_size=4096 + 5 * 240
    )
    assert (report.samples, report.rejected) == (12, 1)

    metadata, tensors, pixels = specified_reader(tmp_path / "out.idx")
    assert (metadata["format_version"], metadata["samples"]) == (1, 12)
    shards = [(shard["file"], shard["rows"]) for shard in metadata["arrays"][0]["shards"]]
    assert shards == [(f"out-{n:05d}-of-00003.bin", rows) for n, rows in enumerate((5, 5, 3))]

    assert metadata["classes"] == ["ant", "bee", "cat"]
    names, offsets = tensors["key/bytes"].tobytes(), tensors["key/offsets"].tolist()
    keys = [names[start:stop] for start, stop in itertools.pairwise(offsets)]
    expected = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.jpg"))
    rejected = expected.index("bee/04.jpg")
    used = [name for name in expected if name != "bee/04.jpg"]
    assert keys == [name.encode("utf-8", "surrogateescape") for name in used]
    assert tensors["row"].tolist() == [row for row in range(13) if row != rejected]
    classes = [metadata["classes"][label] for label in tensors["label"]]
    assert classes == [name.split("/")[0] for name in used]
    assert tensors["flags"].tolist() == [0] * 12

    assert not pixels[rejected].any()
    assert tensors["crc32/image"].tolist() == [zlib.crc32(row.tobytes()) for row in pixels]
    ours = memload.MemmapDataset(tmp_path / "out.bin").gather(range(12))
    np.testing.assert_array_equal(ours.numpy(), pixels[tensors["row"]])
    statistics = pixels[tensors["row"]].reshape(-1, 3) / 255
    np.testing.assert_allclose(metadata["statistics"]["mean"], statistics.mean(0))
    np.testing.assert_allclose(metadata["statistics"]["std"], statistics.std(0))


def test_all_files_are_named_after_the_output():
    assert shard_names("folder/out.bin", 1) == ["out.bin"]
    assert shard_names("out.bin", 2) == ["out-00000-of-00002.bin", "out-00001-of-00002.bin"]
    assert shard_names("out.bin", 100_001)[100_000] == "out-100000-of-100001.bin"
    paths = ["a/out.idx", "a/out.building", "a/out.rejects.csv"]
    assert [*output_paths("a/out.bin")] == [Path(path) for path in paths]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("out.bin", "out.idx"),
        ("out.idx", "out.idx"),
        ("a/out-00002-of-00004.bin", "a/out.idx"),
        ("a.b/out.train.bin", "a.b/out.train.idx"),
        ("out", "out.idx"),
        ("out-1-of-2.bin", "out-1-of-2.idx"),
        ("out-100000-of-100001.bin", "out.idx"),
    ],
)
def test_the_index_is_found_from_any_file_of_the_data_set(given, expected):
    assert index_path(given) == Path(expected)


def test_what_is_no_data_set_is_told_with_how_to_make_one(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "cat.jpg").touch()
    for path in (folder, folder / "cat.jpg"):
        with pytest.raises(
            FormatError, match=rf"^{path} is not .*'memload build {folder} out\.bin'"
        ):
            index_path(path)
    (tmp_path / "images.idx").touch()
    assert index_path(folder) == tmp_path / "images.idx"


@pytest.mark.parametrize(
    ("given", "suggestion"),
    [("out", "out.bin"), ("out.npy", "out.bin"), ("out.idx", "out.bin"), ("", "out.bin")],
)
def test_an_output_that_does_not_end_in_bin_is_refused_with_one_that_does(given, suggestion):
    with pytest.raises(
        ValueError, match=rf"^output is .* must end in '\.bin'\. Write '{suggestion}'"
    ):
        output_paths(given)
