import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memload
from memload.building.sources import EXTENSIONS, Column, DatasetSource, ImageFolder
from memload.storage.format import FLAG_OUTSIDE

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
LINUX = sys.platform == "linux"  # file names are bytes there, whatever they hold


def as_torchvision(root: Path) -> tuple[list[tuple[str, int]], list[str]]:
    """What torchvision's find_classes and make_dataset return, written out."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            for file in sorted(files):
                path = os.path.join(folder, file)  # noqa: PTH118  # as there
                if path.lower().endswith(EXTENSIONS):
                    samples.append((os.path.relpath(path, root).replace(os.sep, "/"), label))
    return samples, classes


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    return root


def found(source: ImageFolder) -> list[tuple[str, int]]:
    return [
        (record.key, int(record.columns["label"]))
        for record in (source[i] for i in range(len(source)))
    ]


def test_order_labels_and_classes_are_those_of_torchvision(tmp_path: Path) -> None:
    folders = [
        "a b",
        "a",
        "a/b",
        "a/b c",
        "a/b/c",
        "a/B",
        "B",
        "B/z",
        "b10",
        "b9",
        "é",
        "a-b",
        "a/b-c",
        "a.jpg",
    ]
    files = [
        "2.jpg",
        "10.JPG",
        "Z.png",
        "a.jpeg",
        "b.PPM",
        "c.bmp",
        "d.pgm",
        "e.tif",
        "f.TIFF",
        "g.WebP",
    ]
    files += ["h.gif", "i.txt", "jpg", "k.jpg.txt", "l.jpg ", " m.jpg", "n.npy", "o..jpg"]
    touch(tmp_path, *(f"{folder}/{file}" for folder in folders for file in files))
    samples, classes = as_torchvision(tmp_path)
    source = ImageFolder(tmp_path)
    assert source.classes == classes
    assert found(source) == samples
    assert len(samples) == 12 * len(folders)
    assert list(source.keys) == [key for key, _ in samples]


def test_links_to_folders_are_followed_as_torchvision_does(tmp_path: Path) -> None:
    touch(tmp_path / "elsewhere", "deep/1.jpg", "2.jpg")
    root = touch(tmp_path / "root", "a/0.jpg", "b/5.jpg")
    (root / "a" / "link").symlink_to(tmp_path / "elsewhere")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    assert found(ImageFolder(root)) == as_torchvision(root)[0]
    assert len(ImageFolder(root)) == 6


def test_a_folder_linked_twice_side_by_side_is_taken_twice(tmp_path: Path) -> None:
    root = touch(tmp_path / "root", "a/x/0.jpg")
    (root / "a" / "y").symlink_to(root / "a" / "x")
    source = ImageFolder(root)
    assert list(source.keys) == ["a/x/0.jpg", "a/y/0.jpg"]
    assert source.notes == []


def test_links_that_lead_back_into_themselves_end_and_are_told(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/b/0.jpg")
    (root / "a" / "b" / "again").symlink_to(root / "a")
    source = ImageFolder(root)
    assert list(source.keys) == ["a/b/0.jpg"]
    assert any("lead back" in note and "a/b/again" in note for note in source.notes)


def test_a_link_to_itself_is_an_image_that_cannot_be_read(tmp_path: Path, folder: Path) -> None:
    (folder / "ant" / "self.jpg").symlink_to("self.jpg")
    (folder / "ant" / "self").symlink_to("self")  # no image by its name
    source = ImageFolder(folder)
    assert "ant/self.jpg" in source.keys
    report = memload.build(source, tmp_path / "out.bin", size=8, num_workers=0)
    assert (report.samples, report.rejected) == (12, 1)


def test_a_link_to_nothing_ends_in_the_ledger(tmp_path: Path, folder: Path) -> None:
    (folder / "bee" / "gone.jpg").symlink_to("nowhere.jpg")
    report = memload.build(folder, tmp_path / "out.bin", size=8, num_workers=0)
    assert report.rejected == 1
    assert report.ledger is not None
    assert "bee/gone.jpg,a link to a file that does not exist" in report.ledger.read_text()


def test_an_image_that_is_gone_when_its_turn_comes_ends_in_the_ledger(
    tmp_path: Path, folder: Path
) -> None:
    source = ImageFolder(folder)
    (folder / "ant" / "00.jpg").unlink()
    report = memload.build(source, tmp_path / "out.bin", size=8, num_workers=0)
    assert report.rejected == 1


def test_hidden_files_and_folders_are_left_out_and_told(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/0.jpg", "a/.1.jpg", "a/.hidden/2.jpg", ".git/3.jpg", ".DS_Store")
    source = ImageFolder(root)
    assert list(source.keys) == ["a/0.jpg"]
    assert source.classes == ["a"]
    (note,) = source.notes
    assert note.startswith("hidden files and folders (4): ")


def test_files_that_are_no_images_by_their_names_are_told(tmp_path: Path) -> None:
    (note,) = ImageFolder(touch(tmp_path, "a/0.jpg", "a/1.gif", "a/2.txt", "a/3", "a/4")).notes
    assert note.startswith("files that are no images by their names (4): a/1.gif, a/2.txt, a/3, …")


def test_a_class_without_images_counts_as_torchvision_has_it_and_is_told(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/0.jpg", "c/1.jpg", "b/text.txt")
    (root / "d").mkdir()
    source = ImageFolder(root)
    assert source.classes == ["a", "b", "c", "d"]
    assert found(source) == [("a/0.jpg", 0), ("c/1.jpg", 2)]
    assert any("without an image" in note and note.endswith("b, d") for note in source.notes)


def test_images_outside_the_class_folders_are_told(tmp_path: Path) -> None:
    source = ImageFolder(touch(tmp_path, "a/0.jpg", "stray.jpg"))
    assert list(source.keys) == ["a/0.jpg"]
    assert any("outside the class folders (1): stray.jpg" in note for note in source.notes)


def test_images_that_lie_in_folders_of_every_class_folder_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = ImageFolder(touch(tmp_path / "data", "train/a/0.jpg", "train/b/1.jpg", "val/a/2.jpg"))
    assert source.classes == ["train", "val"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(
        f"{tmp_path}/data: expected images in the class folders (train, val), found them"
    )
    assert record.message.endswith(
        f"such as train/a. If those are the classes, build {tmp_path}/data/train instead"
    )


@pytest.mark.parametrize("own", ["a/1.jpg", "b/2.jpg"])
def test_folders_within_some_of_the_classes_are_nothing_to_warn_of(
    own: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ImageFolder(touch(tmp_path, "a/deep/0.jpg", own))
    assert caplog.records == []


def test_a_flat_folder_has_no_label(tmp_path: Path) -> None:
    root = touch(tmp_path, "b.jpg", "B.JPG", "a b.png", "10.jpg", "9.jpg", "x.txt")
    (root / "empty").mkdir()
    source = ImageFolder(root)
    assert list(source.keys) == ["10.jpg", "9.jpg", "B.JPG", "a b.png", "b.jpg"]
    assert source.classes is None
    assert source.schema == {}
    assert source[0].columns == {}
    assert source.notes[-1] == f"no labels: no class folders with images in {root}"


@pytest.mark.skipif(not LINUX, reason="file names are bytes on Linux alone")
def test_any_file_name_survives_from_the_folder_to_keys_and_ledger(tmp_path: Path) -> None:
    data = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(data, "PNG")
    names = [
        b"two words.png",
        b"new\nline.png",
        b"\xff\xfe.png",
        "日本.png".encode(),
        b'quo"te,.png',
        b"-o.png",
        b"\t.png",
    ]
    root = tmp_path / "images"
    for folder in (b"a class", b"cl\xe9\n"):
        place = os.fsencode(root) + b"/" + folder
        os.makedirs(place)  # noqa: PTH103  # of bytes
        for name in names:
            Path(os.fsdecode(place + b"/" + name)).write_bytes(data.getvalue())
        Path(os.fsdecode(place + b"/bad\n\xf0.png")).write_bytes(b"no image")
    report = memload.build(root, tmp_path / "out.bin", size=8, num_workers=1)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    good = [(key, label) for key, label in as_torchvision(root)[0] if "bad" not in key]
    assert list(dataset.keys) == [key for key, _ in good]
    assert dataset.columns["label"].tolist() == [label for _, label in good]
    assert dataset.classes == [os.fsdecode(b"a class"), os.fsdecode(b"cl\xe9\n")]
    assert report.rejected == 2
    assert report.ledger is not None
    assert b"cl\xe9\n/bad\n\xf0.png" in report.ledger.read_bytes()


def test_notes_are_one_line_whatever_the_names(tmp_path: Path) -> None:
    for note in ImageFolder(touch(tmp_path, "a/0.jpg", "a/x\ny", "a/.h\n.jpg")).notes:
        assert "\n" not in note


def test_other_endings_replace_those_of_torchvision(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/0.jpg", "a/1.GIF", "a/2.avif")
    assert list(ImageFolder(root, extensions=(".gif", ".AVIF")).keys) == ["a/1.GIF", "a/2.avif"]


def test_endings_given_as_one_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="extensions"):
        ImageFolder(touch(tmp_path, "a/0.gif"), extensions=".gif")


def test_no_such_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(memload.SourceError, match="no such folder") as caught:
        ImageFolder(tmp_path / "nowhere")
    assert caught.value.path == str(tmp_path / "nowhere")


def test_a_file_instead_of_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(memload.SourceError, match="found a file"):
        ImageFolder(touch(tmp_path, "a.jpg") / "a.jpg")


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(memload.SourceError, match="an empty folder"):
        ImageFolder(tmp_path)


def test_a_folder_without_images_says_what_is_in_it_instead(tmp_path: Path) -> None:
    with pytest.raises(
        memload.SourceError, match=r"files that are no images by their names \(1\): a/0\.npy"
    ):
        ImageFolder(touch(tmp_path, "a/0.npy"))


@pytest.mark.skipif(AS_ROOT, reason="root may read everything")
@pytest.mark.parametrize("mode", [0o000, 0o400])
def test_a_folder_that_cannot_be_read_is_said(tmp_path: Path, mode: int) -> None:
    closed = touch(tmp_path, "a/b/0.jpg") / "a"
    closed.chmod(mode)
    try:
        with pytest.raises(memload.SourceError, match="can be read"):
            ImageFolder(tmp_path)
    finally:
        closed.chmod(0o700)


@pytest.mark.parametrize("step", ["scandir", "stat"])
def test_a_folder_that_the_system_refuses_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    root = touch(tmp_path, "a/b/0.jpg")
    target, name = (os, "scandir") if step == "scandir" else (Path, "stat")
    usual = getattr(target, name)

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return usual(path, *arguments, **options)

    monkeypatch.setattr(target, name, refuse)
    with pytest.raises(memload.SourceError, match=r"a/b: expected a folder that can be read"):
        ImageFolder(root)


@pytest.mark.skipif(AS_ROOT, reason="root may read everything")
def test_a_file_that_cannot_be_read_ends_in_the_ledger(tmp_path: Path, folder: Path) -> None:
    (folder / "ant" / "00.jpg").chmod(0)
    assert memload.build(folder, tmp_path / "out.bin", size=8, num_workers=0).rejected == 1


@pytest.mark.parametrize("change", ["add", "remove", "rename"])
def test_the_listing_changes_with_the_names_of_the_files(folder: Path, change: str) -> None:
    before = ImageFolder(folder).listing()
    path = folder / "ant" / "00.jpg"
    if change == "add":
        (folder / "ant" / "new.jpg").write_bytes(path.read_bytes())
    elif change == "remove":
        path.unlink()
    else:
        path.rename(path.with_name("01.jpg"))
    now = ImageFolder(folder).listing()
    assert any(not np.array_equal(before[name], now[name]) for name in before)


def test_the_listing_does_not_depend_on_what_the_files_hold(folder: Path) -> None:
    before = ImageFolder(folder).listing()
    for path in folder.glob("*/*.jpg"):
        path.write_bytes(b"another picture")
    now = ImageFolder(folder).listing()
    assert before.keys() == now.keys()
    assert all(np.array_equal(before[name], now[name]) for name in before)


def test_a_source_is_opened_without_looking_at_each_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at, stat = [], os.stat
    monkeypatch.setattr(
        os, "stat", lambda path, **keys: (looked_at.append(path), stat(path, **keys))[1]
    )
    ImageFolder(folder).listing()
    assert not [path for path in looked_at if str(path).endswith(".jpg")]


PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)


class Samples:
    """A map-style data set of what it is given; exceptions are raised."""

    def __init__(self, *samples: Any, **attributes: Any) -> None:
        self.samples = samples
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        sample = self.samples[index]
        if isinstance(sample, BaseException):
            raise sample
        return sample


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., tuple[memload.MemmapDataset, list[str]]]:
    """A function that builds a data set of samples at 8×8 and returns it with the reasons of the rejects."""

    def run(*samples: Any, **attributes: Any) -> tuple[memload.MemmapDataset, list[str]]:
        path = tmp_path / "samples.bin"
        report = memload.build(
            Samples(*samples, **attributes), path, size=8, num_workers=0, overwrite=True
        )
        lines = report.ledger.read_text().splitlines()[1:] if report.ledger else []
        return memload.MemmapDataset(path), lines

    return run


Build = Callable[..., tuple[memload.MemmapDataset, list[str]]]


class Kind(torch.Tensor):
    """A tensor by another name, as torchvision's tv_tensors are."""


def png() -> bytes:
    data = io.BytesIO()
    Image.fromarray(PIXELS).save(data, "PNG")
    return data.getvalue()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: Image.fromarray(PIXELS),
        lambda path: PIXELS,
        lambda path: png(),
        lambda path: bytearray(png()),
        lambda path: memoryview(png()),
        lambda path: path,
        str,
        lambda path: torch.from_numpy(PIXELS).permute(2, 0, 1),
        lambda path: torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous(),
        lambda path: torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous().as_subclass(Kind),
        lambda path: np.ascontiguousarray(PIXELS[::-1])[::-1],
    ],
    ids=[
        "pil",
        "array",
        "bytes",
        "bytearray",
        "memoryview",
        "path",
        "text",
        "view",
        "tensor",
        "kind",
        "strided",
    ],
)
def test_every_kind_of_image_becomes_the_same_pixels(
    tmp_path: Path, build: Build, make: Callable[[Path], Any]
) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png())
    dataset, rejects = build((make(path), 0))
    assert rejects == []
    assert np.array_equal(dataset.gather([0])[0].numpy(), PIXELS)


@pytest.mark.parametrize(
    "image", [PIXELS[:, :, 0], PIXELS[:, :, :1], torch.from_numpy(PIXELS[None, :, :, 0].copy())]
)
def test_grey_arrays_and_tensors_become_grey_pictures(build: Build, image: Any) -> None:
    dataset, rejects = build(image)
    assert rejects == []
    assert np.array_equal(dataset.gather([0])[0].numpy(), np.repeat(PIXELS[:, :, :1], 3, axis=2))


@pytest.mark.parametrize(
    "image",
    [
        None,
        7,
        object(),
        {},
        PIXELS.astype(np.float32),
        PIXELS[:, :, :2],
        PIXELS[:0],
        torch.zeros(3, 8, 8),
        b"",
        "",
        "a\0",
    ],
)
def test_what_is_no_image_is_rejected_and_costs_nothing_else(build: Build, image: Any) -> None:
    dataset, rejects = build((PIXELS, 1), (image, 2), (PIXELS, 3))
    assert dataset.columns["label"].tolist() == [1, 3]
    assert len(rejects) == 1
    assert rejects[0].startswith("1,")


@pytest.mark.parametrize("label", [5, np.int32(5), np.uint8(5), torch.tensor(5), np.array(5), True])
def test_any_integer_is_a_label(build: Build, label: Any) -> None:
    dataset, _ = build((PIXELS, label))
    assert dataset.index.columns["label"].dtype == np.int64
    assert dataset[0][1] == int(label)


@pytest.mark.parametrize(
    ("target", "columns"),
    [
        (1.5, {"label": 1.5}),
        ((3,), {"label": 3}),
        ((3, 0.5), {"label": 3, "target_0": 0.5}),
        ((3, 4), {"label": 3, "target_0": 4}),
        ((0.5, 4), {"target_0": 0.5, "target_1": 4}),
        ((np.arange(3), 1), {"target_0": [0, 1, 2], "target_1": 1}),
        ([1, 2], {"label": [1, 2]}),
        ({"age": 7, "box": np.ones((2, 2))}, {"age": 7, "box": [[1, 1], [1, 1]]}),
        ({}, {}),
    ],
)
def test_a_target_becomes_columns(build: Build, target: Any, columns: dict[str, Any]) -> None:
    dataset, rejects = build((PIXELS, target), (PIXELS, target))
    assert rejects == []
    assert {name: column[1].tolist() for name, column in dataset.columns.items()} == columns


def test_targets_beside_the_image_are_as_good_as_a_tuple(build: Build) -> None:
    dataset, _ = build((PIXELS, 3, 0.5))
    assert {name: column[0].item() for name, column in dataset.columns.items()} == {
        "label": 3,
        "target_0": 0.5,
    }


def test_an_image_alone_has_no_columns(build: Build) -> None:
    dataset, _ = build(PIXELS, (PIXELS,), [PIXELS], {"image": PIXELS})
    assert len(dataset) == 4
    assert dict(dataset.columns) == {}


def test_array_columns_keep_their_type_and_shape(build: Build) -> None:
    arrays = {
        name: np.ones((2, 3), name) for name in ("uint8", "int16", "float16", "float32", "bool")
    }
    dataset, _ = build({"image": PIXELS, **arrays})
    for name, array in arrays.items():
        assert dataset.index.columns[name].dtype == array.dtype
        assert np.array_equal(dataset.index.columns[name][0], array)


def test_arrays_of_the_other_byte_order_keep_their_values(build: Build) -> None:
    dataset, rejects = build(
        {"image": PIXELS, "v": np.array([1, 258], ">i4")},
        {"image": PIXELS, "v": np.array([3, 4], ">i4")},
    )
    assert rejects == []
    assert dataset.columns["v"].tolist() == [[1, 258], [3, 4]]


class ClassLabel:
    names = ("no", "yes")


def test_a_data_set_as_of_hugging_face_gives_its_names_of_classes(build: Build) -> None:
    rows = [
        {"image": Image.fromarray(PIXELS), "label": 1},
        {"image": Image.fromarray(PIXELS), "label": 0},
    ]
    dataset, _ = build(*rows, features={"image": object(), "label": ClassLabel()})
    assert dataset.classes == ["no", "yes"]
    assert dataset.columns["label"].tolist() == [1, 0]


def test_classes_are_taken_over_from_the_data_set(build: Build) -> None:
    dataset, _ = build((PIXELS, 2), classes=["a", "b", "c"])
    assert dataset.classes == ["a", "b", "c"]
    assert dataset.index.statistics["class_counts"] == [0, 0, 1]


@pytest.mark.parametrize(
    "attributes",
    [
        {"classes": 10},
        {"classes": "ab"},
        {"features": torch.zeros(4)},
        {"features": np.zeros((4, 2))},
        {"features": ["label"]},
        {"features": {}},
        {"features": {"label": object()}},
    ],
)
def test_attributes_that_mean_something_else_name_no_classes(
    build: Build, attributes: dict[str, Any]
) -> None:
    dataset, _ = build((PIXELS, 1), **attributes)
    assert dataset.classes == []


def test_classes_say_nothing_of_a_label_that_does_not_count(build: Build) -> None:
    dataset, rejects = build((PIXELS, 0.5), classes=["a", "b"])
    assert dataset.classes == []
    assert rejects == []


@pytest.mark.parametrize("label", [-1, 2, 2**40])
def test_a_label_outside_the_classes_is_rejected(build: Build, label: int) -> None:
    dataset, rejects = build((PIXELS, 0), (PIXELS, label), classes=["a", "b"])
    assert len(dataset) == 1
    assert "label: expected 0 to 1" in rejects[0]


def test_samples_that_are_none_or_raise_are_rejected(build: Build) -> None:
    errors: list[Any] = [
        None,
        ValueError("broken"),
        OSError(5, "I/O error"),
        MemoryError(),
        KeyError("k"),
        StopIteration(),
    ]
    errors += [memload.DecodeError(""), RuntimeError("\ud800"), ()]
    dataset, rejects = build((PIXELS, 0), *errors, (PIXELS, 1))
    assert dataset.columns["label"].tolist() == [0, 1]
    assert len(rejects) == len(errors)
    assert all(line.partition(",")[2] for line in rejects)
    assert rejects[0] == "1,the data set gave None"
    assert "ValueError: broken" in rejects[1]


def test_the_first_samples_may_be_broken(build: Build) -> None:
    dataset, rejects = build(None, ValueError("x"), (PIXELS, {"age": 3}))
    assert dataset.columns["age"].tolist() == [3]
    assert len(rejects) == 2


def test_a_data_set_of_nothing_but_broken_samples_says_why() -> None:
    with pytest.raises(memload.SourceError, match=r"the first 2 fail: ValueError: broken"):
        DatasetSource(Samples(ValueError("broken"), None))


@pytest.mark.parametrize(
    "target",
    [
        2,
        {"age": 1, "more": 2},
        {},
        {"age": 1.5},
        {"age": [1, 2]},
        {"age": "old"},
        {"age": None},
        {"age": 2**63},
    ],
)
def test_a_sample_unlike_the_first_is_rejected(build: Build, target: Any) -> None:
    dataset, rejects = build((PIXELS, {"age": 1}), (PIXELS, target), (PIXELS, {"age": 3}))
    assert dataset.columns["age"].tolist() == [1, 3]
    assert len(rejects) == 1


def test_a_whole_number_is_good_for_a_column_of_floats(build: Build) -> None:
    dataset, rejects = build((PIXELS, 0.5), (PIXELS, 2))
    assert rejects == []
    assert dataset.columns["label"].tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "cat",
            r"column 'label': expected a number or an array of numbers, found str 'cat'\. Turn it into numbers",
        ),
        ({"name": "cat"}, "column 'name'"),
        ({"name": None}, "column 'name'"),
        ({"boxes": [[1, 2], [3]]}, "column 'boxes'"),
        ({"z": 1j}, "column 'z'"),
        ({"huge": 2**63}, "column 'huge'"),
        ({"row": 1}, "column 'row': expected another name"),
        ({"key": 1}, "column 'key': expected another name"),
        ({"a/b": 1}, "column 'a/b': expected another name"),
    ],
)
def test_targets_that_are_no_numbers_are_told_before_it_begins(
    tmp_path: Path, target: Any, message: str
) -> None:
    with pytest.raises(memload.SourceError, match=message):
        memload.build(Samples((PIXELS, target)), tmp_path / "out.bin", num_workers=0)
    assert list(tmp_path.iterdir()) == []


def test_a_dict_without_an_image_is_told() -> None:
    with pytest.raises(memload.SourceError, match=r"an entry 'image', found \['img', 'label'\]"):
        DatasetSource(Samples({"img": PIXELS, "label": 1}))


def test_an_empty_data_set_is_told() -> None:
    with pytest.raises(memload.SourceError, match="found none"):
        DatasetSource(Samples())


@pytest.mark.parametrize("source", [7, None, iter(()), {1, 2}])
def test_what_is_no_source_is_told(tmp_path: Path, source: Any) -> None:
    with pytest.raises(
        TypeError, match="is neither a folder nor a Source nor a map-style data set"
    ):
        memload.build(source, tmp_path / "out.bin")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({3: 1}, "column 3: expected a text as its name, found int"),
        (
            {"x": np.ma.masked_array([1, 2], mask=[True, False])},
            "column 'x': expected numbers, found some that are masked",
        ),
    ],
)
def test_a_column_that_is_none_is_told(columns: Any, message: str) -> None:
    with pytest.raises(memload.SourceError, match=message):
        DatasetSource([{"image": PIXELS, **columns}] if "x" in columns else [(PIXELS, columns)])


def test_an_error_of_any_length_is_told_in_short() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise ValueError("x" * 50_000_000)

    with pytest.raises(memload.SourceError) as told:
        DatasetSource(Broken([1, 2]))
    assert len(str(told.value)) < 1000


class Own:
    """A source of the user's own."""

    def __init__(
        self,
        records: Sequence[Any],
        schema: dict[str, Column] | None = None,
        classes: Sequence[str] | None = None,
        *,
        keys: Any = None,
        listing: Any = ...,
    ) -> None:
        self.records, self.schema, self.classes = records, schema or {}, classes
        self.keys = keys or [f"key {number}" for number in range(len(records))]
        self.notes: list[str] = ["a note"]
        self._listing = {"length": np.array([len(self)])} if listing is ... else listing

    def __str__(self) -> str:
        return "source"

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> memload.Record:
        return memload.Record(self.keys[index], PIXELS, self.records[index])

    def listing(self) -> dict[str, np.ndarray]:
        return self._listing


LABEL = {"label": Column("<i8")}


def test_a_source_of_ones_own_is_built(tmp_path: Path) -> None:
    source = Own(
        [{"label": 1, "p": np.ones((1, 2))}] * 3,
        LABEL | {"p": Column("<f4", (1, 2), points=True)},
        ["a", "b"],
    )
    report = memload.build(source, tmp_path / "out.bin", size=4, num_workers=0)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert list(dataset.keys) == ["key 0", "key 1", "key 2"]
    assert dataset.index.points == ("p",)
    assert dataset.columns["p"].tolist() == [[[0.25, 0.25]]] * 3
    assert report.notes == ("a note",)


def test_points_upon_arrays_that_are_stored_as_they_are_stay_where_they_are(tmp_path: Path) -> None:
    points = [np.array([[1.5, 2]]), np.array([[1.5, 7.6]])]  # the second lies below the last pixel
    source = Own([{"p": places} for places in points], {"p": Column("<f4", (1, 2), points=True)})
    memload.build(source, tmp_path / "out.bin", mode="array", num_workers=1)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert dataset.columns["p"].tolist() == [[[1.5, 2]], [[1.5, np.float32(7.6)]]]
    assert (dataset.index.flags == [0, FLAG_OUTSIDE]).all()
    assert np.array_equal(dataset.gather([1])[0].numpy(), PIXELS)


@pytest.mark.parametrize(
    "columns",
    [
        *(
            {},
            {"label": 2},
            {"label": -1},
            {"label": [0, 1]},
            {"label": "x"},
            {"label": None},
            None,
        ),
        *({"label": "1"}, {"label": 0.9}, {"label": np.nan}, {"label": 1j}, {"label": 2**64 - 1}),
        {"label": np.ma.masked_array(1, mask=True)},
    ],
)
def test_a_record_that_breaks_the_promise_of_its_source_costs_itself_alone(
    tmp_path: Path, columns: Any
) -> None:
    source = Own([{"label": 1}, columns, {"label": 0}], LABEL, ["a", "b"])
    report = memload.build(source, tmp_path / "out.bin", size=4, num_workers=0)
    assert report.rejected == 1
    assert memload.MemmapDataset(tmp_path / "out.bin").columns["label"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Own([], LABEL), "found none"),
        (Own([{}], {"row": Column("<i8")}), "column 'row'"),
        (Own([{}], {"crc32/image": Column("<i8")}), "column 'crc32/image'"),
        (Own([{}], {}, ["a"]), "a column 'label'"),
        (Own([{}], {"label": Column("<f8")}, ["a"]), "a column 'label'"),
        (
            Own([{}], {"z": Column("<c16")}),
            "column 'z': expected numbers of at most 64 bits, found the type '<c16'",
        ),
        (Own([{}], {"z": Column("<U5")}), "column 'z': expected numbers"),
        (Own([{}], {"z": Column("<M8[s]")}), "column 'z': expected numbers"),
        (Own([{}], {"z": Column("|O")}), "column 'z': expected numbers"),
        (Own([{}], {"z": Column("<f16")}), "column 'z': expected numbers"),
        (Own([{}], {"z": Column("nonsense")}), "column 'z': expected numbers"),
        (
            Own([{}], {"z": Column("<f4", (3,), points=True)}),
            r"expected points as floats of the shape \(k, 2\)",
        ),
        (Own([{}], {"z": Column("<i4", (1, 2), points=True)}), "expected points as floats"),
        (Own([{}], {3: Column("<i8")}), "names of columns: expected texts, found int 3"),  # type: ignore[dict-item]
        (
            Own([{}], {"\ud800": Column("<i8")}),
            "names of columns: expected texts that can be encoded",
        ),
        (Own([{}], LABEL, [0, 1]), "classes: expected texts, found int 0"),  # type: ignore[list-item]
        (
            Own([{}], LABEL, ["x" * 50_000_000, "y" * 50_000_000]),
            "classes: expected names that take less than 100 MB",
        ),
        (Own([{}], keys=[0]), "keys: expected texts, found int 0"),
        (Own([{}], keys=[b"a"]), "keys: expected texts, found bytes"),
        (Own([{}], keys=["\ud800"]), "keys: expected texts that can be encoded"),
        (Own([{}, {}], keys=["a"]), "keys: expected one for each of 2 records, found 1"),
        (Own([{}], keys=["a", "b"]), "keys: expected one for each of 1 records, found 2"),
    ],
    ids=str,
)
def test_a_source_that_no_index_can_hold_is_told_before_it_begins(
    tmp_path: Path, source: Own, message: str
) -> None:
    with pytest.raises(memload.SourceError, match=message):
        memload.build(source, tmp_path / "out.bin", num_workers=0)
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_hugging_face_that_are_not_decoded_are_read(tmp_path: Path) -> None:
    image = Image.new("RGB", (8, 8), "red")
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    samples = [
        {"image": {"bytes": data, "path": None}, "label": 1},
        {"image": {"bytes": None, "path": str(tmp_path / "a.png")}, "label": 2},
    ]
    source = DatasetSource(samples)
    assert source[0].image == data
    assert source[1].image == tmp_path / "a.png"
