"""Damaged, odd and hostile inputs: what each of them is taken for, or the error that it gets."""

import gzip
import json
import os
import re
import stat
import tarfile
import zipfile
import zlib

import numpy as np
import pytest

import memload
from tests.damage import flip

from .conftest import content, picture, touch, write_tar, write_zip

DATA = picture(1)
MEMBERS = [(f"{number:02d}.jpg", DATA) for number in range(6)]
LABELLED = [
    each
    for number in range(6)
    for each in ((f"{number:02d}.jpg", DATA), (f"{number:02d}.cls", b"%d" % (number % 2)))
]


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])
    return path


def joined(folder):
    first, second = (write_tar(folder / name, MEMBERS) for name in ("a.tar", "b.tar"))
    first.write_bytes(first.read_bytes() + second.read_bytes())
    return first


def compressed(folder):
    path = write_tar(folder / "a.tar", MEMBERS)
    path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def table(folder, text, name="a.csv", encoding="utf-8"):
    touch(folder, "1.jpg", "2.jpg")
    (folder / name).write_bytes(text.encode(encoding))
    return folder / name


def looping(folder):
    (touch(folder / "images", "a/1.jpg") / "a" / "up").symlink_to(folder / "images")
    return folder / "images"


def parquet(folder, *columns, classes=()):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    paths = []
    for number, column in enumerate(columns):
        made = pyarrow.table({"image": [DATA] * 2, **column})
        if classes:
            feature = {"_type": "ClassLabel", "names": classes[number]}
            facts = {"info": {"features": {"label": feature}}}
            made = made.replace_schema_metadata({"huggingface": json.dumps(facts)})
        paths.append(folder / f"{number}.parquet")
        files.write_table(made, paths[-1])
    return paths


def saved(folder, array, name="a.npy"):
    np.save(folder / name, array)
    return folder / name


REFUSED = {
    "a missing path": (lambda folder: folder / "none", "does not exist"),
    "an empty path": (lambda folder: "", "'' does not exist"),
    "a file of another kind": (lambda folder: touch(folder, "a.7z") / "a.7z", "another kind"),
    "a compressed archive": (lambda folder: touch(folder, "a.tar.gz") / "a.tar.gz", "unpacked"),
    "a folder of other files": (
        lambda folder: write_tar(folder / "a.tar", MEMBERS).parent,
        "others: a.tar. Name one of these files",
    ),
    "a tar that is cut off": (
        lambda folder: cut(write_tar(folder / "a.tar", MEMBERS), 1500), "truncated"
    ),
    "a tar that is cut off between files": (
        lambda folder: cut(write_tar(folder / "a.tar", MEMBERS), 2048), "truncated"
    ),
    "a tar with a damaged header": (
        lambda folder: flip(write_tar(folder / "a.tar", MEMBERS), 1024 + 100), "truncated or damaged"
    ),
    "two tars in one": (joined, "two tars were joined"),
    "a compressed tar": (compressed, "gunzip"),
    "a tar without images": (lambda folder: write_tar(folder / "a.tar", [("a.txt", b"")]), "no images"),
    "a tar with labels for some": (
        lambda folder: write_tar(folder / "a.tar", LABELLED[:-1]), "1 label is missing.*05.jpg"
    ),
    "a tar with bad JSON": (
        lambda folder: write_tar(folder / "a.tar", [*MEMBERS, ("00.json", b"{oops")]), "The JSON beside 00.jpg"
    ),
    "a zip that is cut off": (
        lambda folder: cut(write_zip(folder / "a.zip", MEMBERS), 300), "no zip file.* or is truncated"
    ),
    "a table without a header": (
        lambda folder: table(folder, "1.jpg,cat\n2.jpg,dog\n"), "Put a line such as 'path,label'"
    ),
    "a table with a short line": (
        lambda folder: table(folder, "path,label\n1.jpg,cat\n2.jpg\n"), "line 3 has 1 cells"
    ),
    "a table with a column twice": (
        lambda folder: table(folder, "path,x,x\n1.jpg,1,2\n"), "two columns are called 'x'"
    ),
    "a table in Latin-1": (
        lambda folder: table(folder, "path,label\n1.jpg,é\n", encoding="latin-1"), "Save it as UTF-8"
    ),
    "an empty table": (lambda folder: table(folder, ""), "lists no images"),
    "a table with an empty label": (
        lambda folder: table(folder, "path,label\n1.jpg,cat\n2.jpg,\n"), "1 label is missing.*2.jpg"
    ),
    "a table of URLs": (
        lambda folder: table(folder, "path\nhttps://e.org/1.jpg\n"), "--root, which may be a URL"
    ),
    "a table whose images are missing": (
        lambda folder: table(folder, "id,label\n1,cat\n2,dog\n"), "--image 'images/{id}.jpg'"
    ),
    "lines that are no JSON": (
        lambda folder: table(folder, '{"file_name": "1.jpg"}\n[]\n', "a.jsonl"), "line 2 is no object"
    ),
    "Parquet with text beside numbers": (
        lambda folder: parquet(folder, {"x": [1, 2]}, {"x": ["a", "b"]}), "files do not fit"
    ),
    "Parquet with other columns": (
        lambda folder: parquet(folder, {"x": [1, 2]}, {"y": [1, 2]}), "differ in the column 'x'"
    ),
    "Parquet with other classes": (
        lambda folder: parquet(
            folder, {"label": [0, 1]}, {"label": [0, 1]}, classes=(["a", "b"], ["b", "a"])
        ),
        "count into other classes",
    ),
    "Parquet that is cut off": (
        lambda folder: cut(parquet(folder, {"x": [1, 2]})[0], 100), "truncated"
    ),
    "Parquet with a missing label": (
        lambda folder: parquet(folder, {"label": [0, None]}), "label is missing"
    ),
    "an array of objects": (
        lambda folder: saved(folder, np.array([{}, []], dtype=object)), "Python objects"
    ),
    "an array of two axes": (lambda folder: saved(folder, np.zeros((2, 2))), "neither"),
    "folders of parts": (
        lambda folder: touch(folder / "i", "train/a/1.jpg", "val/a/2.jpg"), "parts of a data set"
    ),
    "folders that are called as parts": (
        lambda folder: touch(folder / "i", "train_images/1.jpg", "test_images/2.jpg"),
        "memload build .*/train_images train_images.bin.*--classes train_images.bin.*--classes test_images,train_images",
    ),
    "a memload data set on a server": (
        lambda folder: "https://e.org/out.bin", "memload copy for its own"
    ),
    "a table whose labels are parts": (
        lambda folder: table(folder, "path,label\n1.jpg,train\n2.jpg,test\n"), "--where"
    ),
    "an archive on a server": (lambda folder: "s3://bucket/a.tar", "Download it first"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_what_to_do(tmp_path, name):
    make, message = REFUSED[name]
    with pytest.raises(memload.SourceError, match=f"(?s){message}"):
        memload.open_source(make(tmp_path))


def columns(source):
    return {name: values.tolist() for name, values in source.values.items()}


ACCEPTED = {
    "hidden files in a tar": (
        lambda folder: write_tar(folder / "a.tar", [*MEMBERS, ("./._0.jpg", b"x")]), 6, "hidden"
    ),
    "names that leave a tar": (
        lambda folder: write_tar(folder / "a.tar", [(f"../../{n}", d) for n, d in MEMBERS]), 6, ""
    ),
    "long names in a tar": (
        lambda folder: write_tar(
            folder / "a.tar", [("d" * 90 + "/" + "e" * 90 + "/" + n, d) for n, d in MEMBERS]
        ),
        6,
        "",
    ),
    "several images of a stem": (
        lambda folder: write_tar(folder / "a.tar", [*LABELLED, ("00.seg.png", b"")]), 6, r"\.seg\.png \(1\)"
    ),
    "numbered images": (
        lambda folder: write_tar(folder / "a.tar", [("a.1.jpg", DATA), ("a.2.jpg", DATA)]), 2, ""
    ),
    "what macOS adds to a zip": (
        lambda folder: write_zip(folder / "a.zip", [*MEMBERS, ("__MACOSX/._0.jpg", b"")]), 6, ""
    ),
    "names that leave a zip": (
        lambda folder: write_zip(folder / "a.zip", [("../../a/1.jpg", DATA)]), 1, ""
    ),
    "a link to a folder above": (looping, 1, ""),
    "pandas' index": (
        lambda folder: table(folder, ",path,x\n0,1.jpg,3\n1,2.jpg,4\n"), 2, ""
    ),
    "large integers beside a gap": (
        lambda folder: table(folder, "path,id\n1.jpg,9007199254740993\n2.jpg,\n"), 2, "id .*2⁵³"
    ),
    "images beside the class folders": (
        lambda folder: touch(folder / "i", "a/1.jpg", "2.jpg"), 1, "outside the class folders"
    ),
    "a class without images": (
        lambda folder: touch(folder / "i", "a/1.jpg", "b/2.txt"), 1, "without images.*: b"
    ),
    "classes one folder deeper": (
        lambda folder: touch(folder / "i", "x/a/1.jpg", "y/a/2.jpg"), 2, "build .*/x instead"
    ),
    "channels first": (lambda folder: saved(folder, np.zeros((2, 3, 9, 8))), 2, "channels first"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_is_read_and_noted(tmp_path, name):
    make, count, note = ACCEPTED[name]
    source = memload.open_source(make(tmp_path))
    assert len(source) == count
    if note:
        assert any(re.search(note, text) for text in source.notes), source.notes
    assert all(content(source[row].image) for row in range(count))


def test_tars_may_have_the_same_names_within(tmp_path):
    paths = [
        write_tar(tmp_path / name, [("i/x/1.jpg", DATA), ("i/y/2.jpg", DATA)])
        for name in ("a.tar", "b.tar")
    ]
    source = memload.open_source(paths)
    assert list(source.keys) == ["a.tar/x/1.jpg", "b.tar/x/1.jpg", "a.tar/y/2.jpg", "b.tar/y/2.jpg"]
    assert (source.classes, columns(source)) == (["x", "y"], {"label": [0, 0, 1, 1]})


def test_links_in_archives_read_nothing_outside(tmp_path):
    (tmp_path / "secret.jpg").write_bytes(DATA)
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(touch(tmp_path / "i", "0.jpg") / "0.jpg", "0.jpg")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            member = tarfile.TarInfo(f"{kind!r}.jpg")
            member.type, member.linkname = kind, str(tmp_path / "secret.jpg")
            tar.addfile(member)
    source = memload.open_source(tmp_path / "a.tar")
    assert list(source.keys) == ["a.tar/0.jpg"]
    assert any("links (2)" in note for note in source.notes)
    entry = zipfile.ZipInfo("a/link.jpg")
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(entry, str(tmp_path / "secret.jpg"))
    assert memload.open_source(tmp_path / "a.zip")[0].image == os.fsencode(tmp_path / "secret.jpg")


def test_a_zip_of_a_rare_kind_is_rejected(tmp_path):
    path = write_zip(tmp_path / "a.zip", [("a/1.jpg", DATA)], zipfile.ZIP_LZMA)
    with pytest.raises(zlib.error):
        memload.open_source(path)[0]


def test_a_bomb_and_a_changed_image_in_a_zip_are_rejected(tmp_path):
    bomb = write_zip(tmp_path / "a.zip", [("a/1.jpg", bytes(1_000_000))], zipfile.ZIP_DEFLATED)
    sizes = (size.to_bytes(4, "little") for size in (1_000_000, 800_000_000))
    bomb.write_bytes(bomb.read_bytes().replace(*sizes))
    with pytest.raises(memload.DecodeError, match="at most"):
        memload.open_source(bomb)[0]
    other = write_zip(tmp_path / "b.zip", [("a/1.jpg", DATA)])
    source = memload.open_source(other)
    flip(other, 60)
    with pytest.raises(memload.DecodeError, match="damaged, encrypted, or has changed"):
        source[0]


def test_a_tar_that_is_cut_off_later_rejects_its_images(tmp_path):
    source = memload.open_source(write_tar(tmp_path / "a.tar", MEMBERS))
    cut(tmp_path / "a.tar", 700)
    with pytest.raises(memload.DecodeError, match="truncated"):
        source[5]


def test_a_row_of_a_data_set_that_has_changed_is_rejected(output):
    source = memload.open_source(output)
    flip(output, 4096 + 2 * 768 + 5)
    with pytest.raises(memload.DecodeError, match="has changed since it was written"):
        source[2]


def test_postscript_is_no_picture(tmp_path):
    touch(tmp_path / "i", "a/1.jpg", "a/2.jpg")
    (tmp_path / "i" / "a" / "2.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    )
    report = memload.build(
        tmp_path / "i", tmp_path / "out.bin", size=8, num_workers=0, max_rejects="60%"
    )
    assert (report.samples, report.rejected) == (1, 1)


def test_what_has_a_name_of_parts_is_built_if_its_classes_are_given(tmp_path):
    root = touch(tmp_path / "i", "train/1.jpg", "test/2.jpg")
    source = memload.open_source(root, classes=["test", "train"])
    assert columns(source) == {"label": [0, 1]}
    deep = touch(tmp_path / "j", *(f"{top}/images/1.jpg" for top in ("n01", "n02")))
    assert memload.open_source(deep).classes == ["n01", "n02"]
