"""Tar files and zips: samples, labels, columns, and what is wrong with them."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.sources.opening import open_source
from memload.building.sources.record import Column
from memload.building.sources.tar import TarShards
from memload.building.sources.zip import ZipArchive
from memload.errors import DecodeError, SourceError


def write_tar(path: Path, members: dict[str, bytes], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return path


def test_tar_samples_have_the_image_the_label_and_the_columns(containers: Any) -> None:
    source = TarShards([containers.tar()])
    assert source.classes == ["ant", "bee", "cat"]
    assert source.categories == {"split": ["train", "val"]}
    for record, content, label, age, split in zip(
        source, containers.pictures.values(), containers.labels, containers.ages, containers.splits,
        strict=True,
    ):  # fmt: skip
        assert record.image == content
        assert record.columns["label"] == label
        assert record.columns["age"] == age
        assert source.categories["split"][record.columns["split"]] == split


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_of_every_kind_are_read_as_tarfile_reads_them(tmp_path: Path, kind: int) -> None:
    long = f"{'d' * 90}/{'e' * 60}.jpg"
    names = ["k/a.jpg", "./k/b.jpg", long, "ü/c.jpg", "folder/", "k/last.jpg"]
    with tarfile.open(tmp_path / "x.tar", "w", format=kind) as file:
        for number, name in enumerate(names):
            member = tarfile.TarInfo(name)
            is_folder = name.endswith("/")
            member.type = tarfile.DIRTYPE if is_folder else tarfile.REGTYPE
            member.size, member.mtime = 0 if is_folder else 700 * number, 1.5 if number % 2 else 0
            file.addfile(member, io.BytesIO(bytes([number]) * member.size))
        link = tarfile.TarInfo("k/link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "a.jpg"
        file.addfile(link)
    source = TarShards([tmp_path / "x.tar"])
    with tarfile.open(tmp_path / "x.tar") as file:
        expected = {
            f"x.tar/{member.name.removeprefix('./')}": file.extractfile(member).read()
            for member in file.getmembers()
            if not member.isdir()
        }
    assert {record.key: record.image for record in source} == expected
    assert len(expected) == 6


def test_several_tars_are_one_source_in_their_order(containers: Any) -> None:
    containers.tar("part-8.tar", range(12))
    containers.tar("part-9.tar", range(12, 20))
    containers.tar("part-10.tar", range(20, 30))
    pattern = str(containers.folder / "part-{8..10}.tar")
    source = open_source(pattern)
    assert [record.image for record in source] == list(containers.pictures.values())
    assert source.keys[12] == "part-9.tar/000012.jpg"
    assert open_source([containers.folder / "part-8.tar", containers.folder / "part-9.tar"]).keys[
        19
    ]


def test_a_pattern_in_quotes_stands_for_its_files(containers: Any) -> None:
    for number in range(3):
        containers.tar(f"x-{number}.tar", range(number, number + 5))
    source = open_source(f"{containers.folder}/x-[01]*.tar")
    assert [record.key.partition("/")[0] for record in source] == ["x-0.tar"] * 5 + ["x-1.tar"] * 5
    with pytest.raises(SourceError, match=r"y-\*\.tar: no file has such a name"):
        open_source(f"{containers.folder}/y-*.tar")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("0.tar", "*.tar"),
        ("data/train-00-of-02.parquet", "data/train*.parquet"),
        ("data/trainer.parquet", "data/*.parquet"),
    ],
)
def test_a_folder_of_containers_says_what_to_build(tmp_path: Path, name: str, pattern: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / name).touch()
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path)
    assert f"memload build '{tmp_path}/{pattern}' out.bin" in str(caught.value)


def test_leading_zeros_of_a_range_are_kept(containers: Any) -> None:
    containers.tar("s-00.tar", range(3))
    containers.tar("s-01.tar", range(3, 5))
    assert len(open_source(str(containers.folder / "s-{00..01}.tar"))) == 5


def test_without_labels_the_folders_in_a_tar_are_classes(containers: Any) -> None:
    source = TarShards([containers.tar(labels=False)])
    assert source.classes == ["ant", "bee", "cat"]
    assert source.columns["label"].tolist() == containers.labels


@pytest.mark.parametrize(("first", "classes"), [('"b"', ["a", "b"]), ("1", None)])
@pytest.mark.parametrize("folder", ["", "train/"])
def test_labels_may_be_in_json(
    tmp_path: Path, folder: str, first: str, classes: list[str] | None
) -> None:
    second = '"a"' if classes else "0"
    members = {f"{folder}0.jpg": b"", f"{folder}0.json": f'{{"label": {first}}}'.encode()}
    members |= {f"{folder}1.jpg": b"", f"{folder}1.json": f'{{"label": {second}}}'.encode()}
    source = TarShards([write_tar(tmp_path / "x.tar", members)])
    assert (source.classes, source.columns["label"].tolist()) == (classes, [1, 0])
    assert source.notes == []


def test_numbers_in_cls_files_stay_numbers(tmp_path: Path) -> None:
    members = {"a.jpg": b"1", "a.cls": b"7\n", "b.jpg": b"2", "b.cls": b"3"}
    source = TarShards([write_tar(tmp_path / "x.tar", members)])
    assert source.classes is None
    assert source.columns["label"].tolist() == [7, 3]


def test_the_image_with_the_plain_extension_is_taken(tmp_path: Path) -> None:
    members = {"d/a.seg.png": b"mask", "d/a.JPG": b"image", "d/a.txt": b"", "d/b.x.jpg": b"other"}
    members |= {"d/b.y.jpg": b"one more"}
    source = TarShards([write_tar(tmp_path / "x.tar", members)])
    assert [record.image for record in source] == [b"image", b"other", b"one more"]
    assert "skipped files in tars: .txt (1), .seg.png beside another image (1)" in source.notes


def test_json_values_that_are_missing_become_nan(tmp_path: Path) -> None:
    members = {"a.jpg": b"1", "a.json": b'{"w": 3}', "b.jpg": b"2", "b.json": b'{"v": [1]}'}
    source = TarShards([write_tar(tmp_path / "x.tar", members)])
    np.testing.assert_array_equal(source.columns["w"], [3.0, np.nan])
    assert any("v (neither numbers nor text)" in note for note in source.notes)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: b"no tar at all" * 100, "no tar file"),
        (lambda data: data[:0], "no tar file"),
    ],
)
def test_a_damaged_tar_is_an_error_that_names_it(
    containers: Any, damage: Any, message: str
) -> None:
    path = containers.tar()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=message) as caught:
        TarShards([path])
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("tail", "message"), [(b"", "truncated"), (b"x" * 100, "truncated"), (None, "more data")]
)
def test_a_tar_that_is_not_read_to_its_end_is_an_error(
    containers: Any, tail: bytes | None, message: str
) -> None:
    path = containers.tar()
    whole = path.read_bytes()
    data = whole.rstrip(b"\0")
    path.write_bytes(whole * 2 if tail is None else data + bytes(-len(data) % 512) + tail)
    with pytest.raises(SourceError, match=message) as caught:
        TarShards([path])
    assert caught.value.path == str(path)


def test_a_compressed_tar_says_how_to_unpack_it(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w:gz") as file:
        file.addfile(tarfile.TarInfo("a.jpg"))
    with pytest.raises(SourceError, match="gunzip"):
        TarShards([tmp_path / "x.tar"])


def test_samples_without_a_label_are_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.jpg": b"1", "a.cls": b"7", "b.jpg": b"2"})
    with pytest.raises(SourceError, match="1 of 2 samples have no label"):
        TarShards([path])


def test_a_tar_truncated_while_it_is_read_rejects_a_sample(containers: Any) -> None:
    path = containers.tar()
    source = TarShards([path])
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DecodeError, match="truncated"):
        source[29]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_is_read_like_a_folder(containers: Any, compression: int) -> None:
    source = ZipArchive(containers.zip(compression=compression))
    assert source.classes == ["ant", "bee", "cat"]
    assert list(source.keys) == list(containers.pictures)
    assert [record.image for record in source] == list(containers.pictures.values())


def test_other_files_in_a_zip_are_left_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        for name in ("a.jpg", "notes.txt", "__MACOSX/._a.jpg", ".hidden.jpg"):
            file.writestr(name, name)
    source = ZipArchive(tmp_path / "x.zip")
    assert list(source.keys) == ["a.jpg"]
    assert source.schema == {}
    assert any("skipped 3 other files" in note for note in source.notes)


def test_an_encrypted_zip_is_an_error(containers: Any) -> None:
    path = containers.zip()
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")  # the flags of the first entry of the directory
    data[start + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="encrypted"):
        ZipArchive(path)


def test_a_damaged_zip_is_an_error_or_rejects_the_sample(containers: Any) -> None:
    path = containers.zip()
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    source = ZipArchive(path)
    with pytest.raises(DecodeError, match="damaged"):
        source[0]
    path.write_bytes(data[:-100])
    with pytest.raises(SourceError, match="truncated"):
        ZipArchive(path)


def test_files_of_other_kinds_are_not_built_together(containers: Any) -> None:
    with pytest.raises(ValueError, match="one by one"):
        open_source([containers.zip(), containers.tar()])


# --------------------------------------------------------------------------- masks and other arrays


def write_samples(path: Path, members: dict[str, bytes]) -> Path:
    """Write a tar with three samples, whose labels are 0, 1, 2."""
    images = {f"{number}.jpg": b"image %d" % number for number in range(3)}
    labels = {f"{number}.cls": b"%d" % number for number in range(3)}
    return write_tar(path, images | members | labels)


def test_files_beside_the_images_of_a_tar_are_masks_and_arrays(tmp_path: Path) -> None:
    members = {"0.mask.png": b"m0", "2.mask.NPY": b"m2", "1.depth.npy": b"d1", "1.txt": b"?"}
    path = write_samples(tmp_path / "x.tar", members)
    source = open_source(path, masks=["mask"], arrays=["depth"])
    assert source.arrays == {"mask": "mask", "depth": "array"}
    assert [record.arrays for record in source] == [
        {"mask": b"m0"},
        {"depth": b"d1"},
        {"mask": b"m2"},
    ]
    assert [record.image for record in source] == [b"image 0", b"image 1", b"image 2"]
    assert source.columns["label"].tolist() == [0, 1, 2]
    assert source.notes == ["skipped files in tars: .txt (1)"]


def test_masks_of_a_tar_may_differ_from_images_by_their_ending_alone(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "x.tar", {f"{number}.png": b"m" for number in range(3)})
    source = TarShards([path], masks={"mask": "png"})
    assert source.arrays == {"mask": "mask"}
    assert [record.image for record in source] == [b"image 0", b"image 1", b"image 2"]
    assert [record.arrays for record in source] == [{"mask": b"m"}] * 3


def test_two_masks_of_a_sample_are_told_apart_by_their_endings(tmp_path: Path) -> None:
    members = {"0.mask.png": b"png", "0.mask.npy": b"npy"}
    path = write_samples(tmp_path / "x.tar", members)
    with pytest.raises(SourceError, match=r"two files of 0 for 'mask'.*0.mask.npy.*mask.png"):
        open_source(path, masks=["mask"])
    assert open_source(path, masks=["mask.png"])[0].arrays == {"mask": b"png"}


def test_a_tar_without_masks_says_what_it_has(tmp_path: Path) -> None:
    path = write_samples(tmp_path / "x.tar", {"0.seg.png": b"", "1.depth.npy": b""})
    with pytest.raises(SourceError, match=r"such as 0.mask.png. Other .* .seg.png beside another"):
        open_source(path, masks=["mask"])


def test_a_tar_with_masks_is_built_like_a_folder_with_masks(tmp_path: Path) -> None:
    members = {}
    for number in range(4):
        ids = np.arange(48, dtype=np.uint8).reshape(6, 8) % (number + 2)
        for name, array in [("image.png", np.stack([ids * 9] * 3, 2)), ("mask.png", ids)]:
            stream = io.BytesIO()
            Image.fromarray(array).save(stream, "png")
            members[f"{number}.{name.replace('image.', '')}"] = stream.getvalue()
            path = tmp_path / name.partition(".")[0] / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(stream.getvalue())
    write_tar(tmp_path / "x.tar", members)
    for source, masks, output in [("image", tmp_path / "mask", "a"), ("x.tar", ["mask"], "b")]:
        path = tmp_path / f"{output}.bin"
        report = memload.build(tmp_path / source, path, masks=masks, size=6, progress=False)
        assert report.samples == 4
    for name in ("bin", "mask.bin"):
        assert (tmp_path / f"a.{name}").read_bytes() == (tmp_path / f"b.{name}").read_bytes()


def write_json(path: Path, objects: list[dict[str, Any]]) -> Path:
    members = {}
    for number, entries in enumerate(objects):
        members[f"{number}.jpg"] = b"image"
        members[f"{number}.json"] = json.dumps(entries).encode()
    return write_tar(path, members)


def test_lists_of_one_shape_in_json_are_columns(tmp_path: Path) -> None:
    objects = [
        {"pose": [[n, 0.5], [1, None]], "ids": [n, 2], "exact": [0.1], "any": [0] * n, "t": ["a"]}
        for n in range(3)
    ]
    source = open_source(write_json(tmp_path / "x.tar", objects))
    columns = {name: (column.dtype, column.shape) for name, column in source.schema.items()}
    assert columns == {"pose": ("<f4", (2, 2)), "ids": ("<i8", (2,)), "exact": ("<f8", (1,))}
    np.testing.assert_array_equal(source[2].columns["pose"], [[2, 0.5], [1, np.nan]])
    note = "skipped 2 columns: any (neither numbers nor text), t (neither numbers nor text)"
    assert note in source.notes


def test_json_may_have_points_and_boxes(tmp_path: Path) -> None:
    objects = [
        {"marks": [[n, 1]], "boxes": [[0, 1, 2, 3]] * n, "kinds": [7] * n, "w": n} for n in range(4)
    ]
    path = write_json(tmp_path / "x.tar", objects)
    source = open_source(path, points=["marks"], boxes={"boxes": 3})
    assert source.schema == {
        "marks": Column("<f4", (1, 2), points=True),
        "boxes": Column("<f4", (3, 4), boxes=True),
        "kinds": Column("<i8", (3,)),
        "w": Column("<i8"),
    }
    assert source[1].columns["kinds"].tolist() == [7, -1, -1]
    np.testing.assert_array_equal(source[1].columns["boxes"][0], [0, 1, 2, 3])
    assert np.isnan(source[0].columns["boxes"]).all()
    fewer = open_source(path, boxes={"boxes": 2})
    assert fewer[2].columns["kinds"].tolist() == [7, 7]
    with pytest.raises(DecodeError, match="it has 3 boxes in 'boxes'"):
        fewer[3]
    assert any("--boxes boxes=100" in note for note in open_source(path).notes)
    with pytest.raises(SourceError, match=r"no entry 'box', only \['boxes', 'kinds', 'marks', 'w'"):
        open_source(path, boxes={"box": 2})
    with pytest.raises(SourceError, match="'w' is not a list of x, y in any JSON"):
        open_source(path, points=["w"])


def test_boxes_and_points_of_json_that_cannot_be_used_reject_their_samples(tmp_path: Path) -> None:
    texts = [
        {"boxes": [[0, 0, 4, 4]], "marks": [[1, 2]]},
        {"boxes": [[5, 5, 2, 2]], "marks": [[1, 2]]},
        {"boxes": None, "marks": [[1, 2], [3, 4]]},
        {"marks": [[1, 2]]},
    ]
    members = [(f"{n}.jpg", b"x") for n in range(4)]
    members += [(f"{n}.json", json.dumps(text).encode()) for n, text in enumerate(texts)]
    source = open_source(
        write_tar(tmp_path / "x.tar", dict(members)), points=["marks"], boxes={"boxes": 2}
    )
    assert source[0].columns["marks"].tolist() == [[1, 2]]
    for index, reason in enumerate(
        ["it ends before it begins", "no list of 1 points", "no entry 'boxes'"], 1
    ):
        with pytest.raises(DecodeError, match=reason):
            source[index]


def test_keys_of_json_are_names_even_if_two_are_the_same(tmp_path: Path) -> None:
    members = [(f"{n}.jpg", b"x") for n in range(3)]
    texts = [{"key": "a"}, {"key": "a"}, {"key": ""}]
    members += [(f"{n}.json", json.dumps(text).encode()) for n, text in enumerate(texts)]
    source = open_source(write_tar(tmp_path / "x.tar", dict(members)))
    assert list(source.keys) == ["a", "a", ""]
