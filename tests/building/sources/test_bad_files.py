"""Files that are damaged, unusual or wrong: a clear error or the right samples, and nothing lost."""

import io
import os
import tarfile
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.building.sources.opening import open_source
from memload.errors import DecodeError, SourceError


def pack(path: Path, members: Sequence[tuple[str, Any]], **options: Any) -> Path:
    """Write a tar of files (bytes), folders (None) and links (pairs of a type and a target)."""
    with tarfile.open(path, "w", **options) as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, tuple):
                member.type, member.linkname = content
            else:
                member.size = len(content)
            file.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return path


def images(source: Any) -> dict[str, Any]:
    return {record.key.partition("/")[2]: record.image for record in source}


# -------------------------------------------------------------------------------------------- tars


def test_names_in_a_tar_are_taken_without_leading_dots_and_slashes(tmp_path: Path) -> None:
    members = [
        ("./a/0.jpg", b"0"),
        ("/a/1.jpg", b"1"),
        ("../b/2.jpg", b"2"),
        ("b/../../b/3.jpg", b"3"),
    ]
    source = open_source(pack(tmp_path / "x.tar", members))
    assert images(source) == {f"{'ab'[n // 2]}/{n}.jpg": b"%d" % n for n in range(4)}
    assert source.classes == ["a", "b"]


def test_links_in_a_tar_are_followed_and_others_told(tmp_path: Path) -> None:
    members = [
        ("a", None),
        ("a/0.jpg", b"0"),
        ("b/1.jpg", (tarfile.LNKTYPE, "a/0.jpg")),
        ("b/2.jpg", (tarfile.SYMTYPE, "../a/0.jpg")),
        ("b/3.jpg", (tarfile.SYMTYPE, "/etc/hostname")),
        ("b/._0.jpg", b"of macOS"),
    ]
    source = open_source(pack(tmp_path / "x.tar", members))
    assert images(source) == {"a/0.jpg": b"0", "b/1.jpg": b"0", "b/2.jpg": b"0"}
    (note,) = source.notes
    assert "links to what is not an image of the tar (1)" in note
    assert "hidden files (1)" in note


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_and_names_that_are_not_utf8_are_read(tmp_path: Path, kind: int) -> None:
    names = ["a/" + "long" * 60 + ".jpg", "b/\udcff é.jpg", "b" * 120 + "/" + "c" * 120 + ".jpg"]
    source = open_source(pack(tmp_path / "x.tar", [(name, b"1") for name in names], format=kind))
    assert sorted(images(source)) == sorted(names)


@pytest.mark.parametrize("length", [0, 1, 511, 512, 700, 5000, 20000, -10240, -5000])
def test_a_tar_cut_anywhere_is_an_error(containers: Any, length: int) -> None:
    path = containers.tar()
    end = len(path.read_bytes().rstrip(b"\0"))
    path.write_bytes(path.read_bytes()[: length if length >= 0 else end + length])
    with pytest.raises(SourceError, match="images\\.tar"):
        open_source(path)


def test_a_tar_with_a_damaged_header_is_an_error(containers: Any) -> None:
    path = containers.tar()
    data = bytearray(path.read_bytes())
    place = data.index(b"000015.jpg")
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="damaged"):
        open_source(path)


@pytest.mark.parametrize(
    "content", [b"{", b'{"n": 1e999}', b'{"n": 123456789012345678901}', b"[1]"]
)
def test_odd_json_is_an_error_or_left_out(tmp_path: Path, content: bytes) -> None:
    path = pack(tmp_path / "x.tar", [("a.jpg", b"1"), ("a.json", content)])
    if content == b"{":
        with pytest.raises(SourceError, match=r"JSON beside a\.jpg"):
            open_source(path)
    else:
        assert len(open_source(path)) == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("b.cls", b"+-1", r"label of b\.jpg is no integer"),
        ("b.cls", b"1" * 5000, r"label of b\.jpg is no integer"),
        ("b.json", b"[" * 200_000, r"JSON beside b\.jpg"),
        ("b.json", b'{"label": null}', r"1 label is missing.* that of x\.tar/b\.jpg"),
    ],
)
def test_labels_in_a_tar_that_are_none_name_the_sample(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    label = ("a.cls", b"1") if name.endswith("cls") else ("a.json", b'{"label": "x"}')
    members = [("a.jpg", b"1"), label, ("b.jpg", b"1"), (name, content)]
    with pytest.raises(SourceError, match=message):
        open_source(pack(tmp_path / "x.tar", members))


def test_files_of_one_name_in_a_tar_are_told(tmp_path: Path) -> None:
    names = ["x/1.jpg", "../x/1.jpg", "/x/1.jpg", "x/1.cls", "x/1.cls"]
    source = open_source(
        pack(tmp_path / "x.tar", [(name, b"%d" % n) for n, name in enumerate(names)])
    )
    assert images(source) == {"x/1.jpg": b"2"}
    assert any("files whose name comes again (3)" in note for note in source.notes)


def test_integers_that_would_lose_digits_are_left_out(tmp_path: Path) -> None:
    facts = [b'{"a": 9007199254740993, "b": 1}', b'{"a": null, "b": null}']
    members = [("0.jpg", b""), ("0.json", facts[0]), ("1.jpg", b""), ("1.json", facts[1])]
    (tmp_path / "x.csv").write_text("path,a,b\n1.jpg,9007199254740993,1\n2.jpg,,\n")
    for path in (pack(tmp_path / "x.tar", members), tmp_path / "x.csv"):
        source = open_source(path)
        assert list(source.schema) == ["b"]
        assert any("skipped 1 column: a" in note for note in source.notes)
    np.save(tmp_path / "x.npy", np.zeros((1, 2, 2), np.uint8))
    np.save(tmp_path / "y.npy", np.array([2**63], np.uint64))
    with pytest.raises(SourceError, match="above 2⁶³"):
        open_source(tmp_path / "x.npy", labels=tmp_path / "y.npy")


@pytest.mark.parametrize("text", ["0", "nan", "1"])
def test_a_table_without_a_label_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(f"path,label\na.jpg,0\nb.jpg,{text}\n")
    if text != "nan":
        assert len(open_source(tmp_path / "x.csv", where={"label": int(text)})) == 2 - int(text)
        return
    with pytest.raises(SourceError, match=r"1 label is missing, the first one that of b\.jpg"):
        open_source(tmp_path / "x.csv")


# -------------------------------------------------------------------------------------------- zips


def zipped(folder: Path, *names: str, **options: Any) -> Path:
    with warnings.catch_warnings():  # that a name comes twice
        warnings.simplefilter("ignore")
        with zipfile.ZipFile(folder / "x.zip", "w", **options) as file:
            for number, name in enumerate(names):
                file.writestr(name, b"%d" % number)
    return folder / "x.zip"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["cat\\0.jpg", "dog\\1.jpg"], ["cat/0.jpg", "dog/1.jpg"]),
        (["/cat/0.jpg", "../dog/1.jpg"], ["cat/0.jpg", "dog/1.jpg"]),
        (["cat/0.jpg", "/cat/0.jpg", "cat/0.jpg"], ["cat/0.jpg"]),
    ],
)
def test_unusual_names_in_a_zip(tmp_path: Path, names: list[str], expected: list[str]) -> None:
    source = open_source(zipped(tmp_path, *names))
    assert list(source.keys) == expected
    assert source[len(expected) - 1].image == b"%d" % (len(names) - 1)
    left_out = len(names) - len(expected)
    assert any(f"skipped {left_out} other" in note for note in source.notes) == (left_out > 0)


@pytest.mark.parametrize(
    ("place", "content"),
    [(6, b"\x52\0"), (20, b"\xf0" + b"\xff" * 3), (42, b"\xf0" + b"\xff" * 3)],
)
def test_a_directory_of_a_zip_that_lies_is_an_error(
    tmp_path: Path, place: int, content: bytes
) -> None:
    path = zipped(tmp_path, "cat/0.jpg")
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02") + place
    data[start : start + len(content)] = content
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"x\.zip is "):
        open_source(path)


def test_no_more_is_unpacked_than_a_zip_says(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/0.jpg", bytes(100_000_000))
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02") + 24
    for size in (10, 4_000_000_000):
        data[start : start + 4] = size.to_bytes(4, "little")
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(DecodeError, match="another checksum" if size == 10 else "at most"):
            open_source(path)[0]
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()


def test_a_zip64_is_read(containers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 10)
    source = open_source(containers.zip())
    assert [record.image for record in source] == list(containers.pictures.values())


def test_a_zip_may_lie_and_have_files_in_folders_that_are_not_utf8(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    folder.mkdir()
    with zipfile.ZipFile(folder / "x.zip", "w") as file:
        file.writestr("a/0.jpg", b"0")
        file.writestr("b/XX.jpg", b"1")
    data = (folder / "x.zip").read_bytes()
    (folder / "x.zip").write_bytes(data.replace(b"XX", b"\xff\xfe"))
    source = open_source(folder / "x.zip")
    assert [record.image for record in source] == [b"0", b"1"]
    place = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 1) + 9
    data = data[:place] + b"\x08" + data[place + 1 :]  # which says that the name is UTF-8
    (folder / "x.zip").write_bytes(data.replace(b"XX", b"\xff\xfe"))
    with pytest.raises(SourceError, match="UTF-8"):
        open_source(folder / "x.zip")
    with pytest.raises(SourceError, match="No such file"):
        open_source(folder / "y.zip")


def test_images_beside_the_class_folders_of_a_zip_are_left_out_as_in_a_folder(
    tmp_path: Path,
) -> None:
    names = ["b/1.jpg", "a/z.jpg", "a/b/0.jpg", "stray.jpg", "a b/2.jpg", "a/x.txt"]
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        for name in names:
            file.writestr(name, name)
            (tmp_path / "x" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "x" / name).touch()
    source, folder = open_source(tmp_path / "x.zip"), open_source(tmp_path / "x")
    assert list(source.keys) == list(folder.keys)
    assert source.classes == folder.classes
    assert "skipped images outside the class folders (1): stray.jpg" in source.notes


# ----------------------------------------------------------------------------------------- parquet


@pytest.mark.parametrize("place", [0.05, 0.3, 0.5, 0.7])
def test_a_damaged_parquet_file_is_an_error_or_rejects_rows(
    containers: Any, tmp_path: Path, place: float
) -> None:
    path = containers.parquet(compression="zstd", write_page_checksum=True)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(int(size * place))
        file.write(b"\xff" * 200)
    try:
        report = memload.build(path, tmp_path / "out.bin", size=8, num_workers=2, max_rejects="90%")
    except SourceError as error:
        assert str(path) in str(error)  # noqa: PT017  # either is right
    else:
        assert report.samples + report.rejected == 30
        assert 0 < report.rejected <= 14


def test_parquet_without_images_is_an_error(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"x": [1], "y": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=r"not clear among x, y.*--image-column"):
        open_source(tmp_path / "x.parquet")
    parquet.write_table(
        pyarrow.table({"image": pyarrow.array([], "binary")}), tmp_path / "y.parquet"
    )
    with pytest.raises(SourceError, match="no rows"):
        open_source(tmp_path / "y.parquet")


# ------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"path,label\na.jpg,x\nb.jpg\n", "line 3: it has 1 column, but the first line has 2"),
        (b"path,label\na.jpg,x,\n", "line 2: it has 3 columns"),
        (b"path,label\n\xef\xbb\xbfa.jpg,x\n \n", None),
        (b"\xef\xbb\xbfpath;label\r\na.jpg;x\r\n\r\n", ["a.jpg"]),
        (b'"path","label"\r"a.jpg","x"\r', ["a.jpg"]),
        (b'path,label\n"a, b.jpg","x ""y"" z"\n', ["a, b.jpg"]),
        (b'path,label\n"a.jpg,x\nb.jpg,y\n', "this is not CSV"),
        (b"x,a.jpg\ny,b.jpg\n", "column names are missing"),
        (b"path,\na.jpg,1\n", "a column has no name"),
        (b'"path,of",label\na.jpg,x\n', ["a.jpg"]),
        (b"path,label\n", "it lists no images"),
        (b"", "it lists no images"),
        (b"id,file,label\n7,a.jpg,x\n", ["a.jpg"]),
    ],
)
def test_tables_are_read_or_their_line_is_named(tmp_path: Path, text: bytes, expected: Any) -> None:
    (tmp_path / "x.csv").write_bytes(text)
    if isinstance(expected, str):
        with pytest.raises(SourceError, match=expected):
            open_source(tmp_path / "x.csv")
    else:
        source = open_source(tmp_path / "x.csv")
        assert expected is None or list(source.keys) == expected
        assert len(source) == 1


def test_a_table_of_urls_says_how_to_write_it(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("path,label\nhttps://h/a.jpg,x\n")
    with pytest.raises(SourceError, match="--root"):
        open_source(tmp_path / "x.csv")


@pytest.mark.parametrize("kind", ["x.zip", "x.tar"])
def test_archives_of_parts_of_a_data_set_are_to_be_unpacked(tmp_path: Path, kind: str) -> None:
    if kind == "x.zip":
        with zipfile.ZipFile(tmp_path / kind, "w") as file:
            file.writestr("data/train/0.jpg", b"")
            file.writestr("data/val/0.jpg", b"")
    else:
        pack(tmp_path / kind, [("train/0.jpg", b""), ("val/0.jpg", b"")])
    with pytest.raises(SourceError, match=f"{kind} holds the parts .*train, val.*Unpack it"):
        memload.build(tmp_path / kind, tmp_path / "out.bin", num_workers=0)


def test_what_is_guessed_of_a_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,file,split,breed\n1,a.jpg,train,pug\n2,b.jpg,val,pug\n")
    source = open_source(tmp_path / "x.csv")
    assert source.classes == ["pug"]  # parts of a data set are no classes
    assert source.notes[:2] == [
        "the paths are taken from column 'file'",
        "the labels are taken from column 'breed'",
    ]
    source = open_source(tmp_path / "x.csv", path_column="id", extension="jpg")
    assert list(source.keys) == ["1.jpg", "2.jpg"]


# --------------------------------------------------------------------------------- arrays, endings


@pytest.mark.parametrize("change", [np.asfortranarray, lambda array: array.astype(">u2")])
def test_arrays_of_any_order_are_stored_bit_for_bit(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    array = np.random.default_rng(0).integers(0, 60000, (5, 3, 4, 2)).astype("<u2")
    np.save(tmp_path / "x.npy", change(array))
    memload.build(tmp_path / "x.npy", tmp_path / "out.bin", num_workers=0)
    assert (tmp_path / "out.bin").read_bytes()[4096:] == array.tobytes()


def test_an_array_without_pixels_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((0, 8, 8, 3), np.uint8))
    with pytest.raises(SourceError, match=r"x\.npy has no pixels: its shape is \(0, 8, 8, 3\)"):
        open_source(tmp_path / "x.npy")


@pytest.mark.parametrize("header", ["{'descr': (", "{'descr': '<u1', [}", "(" * 5000, "\udc80"])
def test_a_hostile_header_of_an_array_is_an_error(tmp_path: Path, header: str) -> None:
    text = header.encode("utf-8", "surrogateescape")
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text)
    with pytest.raises(SourceError, match=r"^.*no \.npy file, or is truncated.*$"):
        open_source(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.npz", r"several arrays \(a\).*numpy.save"),
        ("x.tar.gz", "Unpack it first"),
        ("x.jsonl", "map-style data set"),
        ("{3..1}.tar", "lower number first"),
    ],
)
def test_files_of_other_kinds_are_told(tmp_path: Path, name: str, message: str) -> None:
    if name == "x.npz":
        np.savez(tmp_path / name, a=np.zeros(3))
    elif "{" not in name:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path / name)


def test_files_of_one_name_have_different_keys(containers: Any) -> None:
    paths = []
    for folder in ("one", "two"):
        (containers.folder / folder).mkdir()
        paths.append(containers.tar(f"{folder}/x.tar", range(3)))
    assert len(set(open_source(paths).keys)) == 6


def test_damage_found_later_rejects_the_image(containers: Any) -> None:
    path = containers.zip(compression=zipfile.ZIP_DEFLATED)
    source = open_source(path)
    data = bytearray(path.read_bytes())
    data[60:90] = bytes(30)
    path.write_bytes(data)
    with pytest.raises(DecodeError, match="damaged"):
        source[0]
