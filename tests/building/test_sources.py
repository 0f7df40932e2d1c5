import io
import os
import time
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
    folders = ["a b", "a", "a/b", "a/b c", "a/b/c", "a/B", "B", "B/z", "b10", "b9", "é", "a-b"]
    folders += ["a/b-c", "a.jpg"]
    files = ["2.jpg", "10.JPG", "Z.png", "a.jpeg", "b.PPM", "c.bmp", "d.pgm", "e.tif", "f.TIFF"]
    files += ["g.WebP", "h.gif", "i.txt", "jpg", "k.jpg.txt", "l.jpg ", " m.jpg", "n.npy", "o..jpg"]
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


def test_links_to_a_folder_above_are_not_followed(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/b/0.jpg")
    (root / "a" / "b" / "again").symlink_to(root / "a")
    (root / "a" / "c").symlink_to(root / "a" / "b")  # beside it, which is followed
    source = ImageFolder(root)
    assert list(source.keys) == ["a/b/0.jpg", "a/c/0.jpg"]
    (note,) = source.notes
    assert note.startswith("skipped links to a folder that contains them (2): a/b/again")


def test_files_that_cannot_be_read_cost_their_samples(tmp_path: Path, folder: Path) -> None:
    (folder / "ant" / "self.jpg").symlink_to("self.jpg")
    (folder / "ant" / "self").symlink_to("self")  # not an image by its name
    (folder / "bee" / "gone.jpg").symlink_to("nowhere.jpg")
    source = ImageFolder(folder)
    (folder / "ant" / "00.jpg").unlink()
    report = memload.build(source, tmp_path / "out.bin", size=8, num_workers=0)
    assert (report.samples, report.rejected) == (11, 3)
    assert report.ledger is not None
    assert "bee/gone.jpg,a link to a file that does not exist" in report.ledger.read_text()


def test_notes_report_what_was_skipped(tmp_path: Path) -> None:
    names = ["a/0.jpg", "a/.1.jpg", "a/.hidden/2.jpg", ".git/3.jpg", ".DS_Store", "stray.jpg"]
    source = ImageFolder(touch(tmp_path, *names, "a/1.gif", "a/2.txt", "a/3", "a/4", "a/x\ny"))
    assert list(source.keys) == ["a/0.jpg"]
    assert source.classes == ["a"]
    assert source.notes == [
        "skipped files without an image extension (5): a/1.gif, a/2.txt, a/3, …",
        "skipped hidden files and folders (4): .DS_Store, .git, a/.1.jpg, …",
        "skipped images outside the class folders (1): stray.jpg",
    ]
    source = ImageFolder(touch(tmp_path / "b", "a/0.jpg", "a/x\ny"))
    assert source.notes == ["skipped files without an image extension (1): a/x\\ny"]


def test_a_class_without_images_counts_as_torchvision_has_it_and_is_told(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/0.jpg", "c/1.jpg", "b/text.txt")
    (root / "d").mkdir()
    source = ImageFolder(root)
    assert source.classes == ["a", "b", "c", "d"]
    assert found(source) == [("a/0.jpg", 0), ("c/1.jpg", 2)]
    assert any(
        "class folders without images" in note and note.endswith("b, d") for note in source.notes
    )


def test_images_that_lie_in_folders_of_every_class_folder_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = ImageFolder(touch(tmp_path / "data", "train/a/0.jpg", "train/b/1.jpg", "val/a/2.jpg"))
    assert source.classes == ["train", "val"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(
        f"{tmp_path}/data: the class folders (train, val) have no images of their own"
    )
    assert record.message.endswith(
        f"such as train/a. If those are the classes, build {tmp_path}/data/train instead."
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
    assert source.notes[-1] == f"no labels: {root} has no class folders with images"


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


def test_other_endings_replace_those_of_torchvision(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/0.jpg", "a/1.GIF", "a/2.avif")
    assert list(ImageFolder(root, extensions=(".gif", ".AVIF")).keys) == ["a/1.GIF", "a/2.avif"]


@pytest.mark.parametrize(
    ("names", "root", "message"),
    [
        ([], "nowhere", "nowhere does not exist. Check the path"),
        (["a.jpg"], "a.jpg", "a.jpg is a file, not a folder of images. Check the path"),
        (["a.csv"], "a.csv", r"a.csv is a file, .*--manifest .*memload.Manifest\("),
        ([], "", r"has no image files \(.jpg .*\): the folder is empty. Check the path"),
        (["a/0.npy"], "", r"skipped files without an image extension \(1\): a/0\.npy"),
    ],
)
def test_a_folder_without_images_is_an_error_that_says_what_is_there(
    tmp_path: Path, names: list[str], root: str, message: str
) -> None:
    with pytest.raises(memload.SourceError, match=message) as caught:
        ImageFolder(touch(tmp_path, *names) / root)
    assert caught.value.path == str(tmp_path / root)


def test_arguments_that_would_mean_something_else_are_errors(tmp_path: Path) -> None:
    with pytest.raises(memload.SourceError, match=r"Write \. for the current folder"):
        ImageFolder("")
    with pytest.raises(TypeError, match="extensions must be a sequence"):
        ImageFolder(touch(tmp_path, "a/0.gif"), extensions=".gif")


@pytest.mark.parametrize("step", ["scandir", "stat"])
def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    root = touch(tmp_path, "a/b/0.jpg")
    target: Any = os if step == "scandir" else Path
    original = getattr(target, step)

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *arguments, **options)

    monkeypatch.setattr(target, step, refuse)
    with pytest.raises(memload.SourceError, match=r"a/b cannot be read: Permission denied"):
        ImageFolder(root)


def test_a_folder_is_opened_without_looking_at_each_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    original = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        looked_at.append(str(path))
        return original(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    assert len(ImageFolder(folder)) == 12
    assert not [path for path in looked_at if path.endswith(".jpg")]


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
        lambda path: torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous(),
        lambda path: torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous().as_subclass(Kind),
        lambda path: np.ascontiguousarray(PIXELS[::-1])[::-1],
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
        None, 7, {}, PIXELS.astype(np.float32), PIXELS[:0], torch.zeros(3, 8, 8), b"", "", "a\0",
    ],
)  # fmt: skip
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
        {"classes": 10}, {"classes": "ab"}, {"features": torch.zeros(4)}, {"features": ["label"]},
        {"features": {"label": object()}},
    ],
)  # fmt: skip
def test_attributes_that_mean_something_else_name_no_classes(
    build: Build, attributes: dict[str, Any]
) -> None:
    dataset, _ = build((PIXELS, 1), **attributes)
    assert dataset.classes == []


@pytest.mark.parametrize("label", [-1, 2, 2**40])
def test_a_label_outside_the_classes_is_rejected(build: Build, label: int) -> None:
    dataset, rejects = build((PIXELS, 0), (PIXELS, label), classes=["a", "b"])
    assert len(dataset) == 1
    assert "label" in rejects[0]


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
    assert rejects[0] == "1,the data set returned None"
    assert "ValueError: broken" in rejects[1]


def test_the_first_samples_may_be_broken(build: Build) -> None:
    dataset, rejects = build(None, ValueError("x"), (PIXELS, {"age": 3}))
    assert dataset.columns["age"].tolist() == [3]
    assert len(rejects) == 2


@pytest.mark.parametrize(
    "target",
    [
        2, {"age": 1, "more": 2}, {}, {"age": 1.5}, {"age": [1, 2]}, {"age": "old"}, {"age": 2**63},
    ],
)  # fmt: skip
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
        ("cat", r"Column 'label' is not a number .*, but str 'cat'\. Turn it into numbers"),
        ({"name": None}, "Column 'name' is not a number"),
        ({"boxes": [[1, 2], [3]]}, "Column 'boxes' is not a number"),
        ({"z": 1j}, "Column 'z' is not a number"),
        ({"row": 1}, "column 'row'"),
        ({"key": 1}, "column 'key'"),
        ({"a/b": 1}, "column 'a/b'"),
        ({3: 1}, "3"),
    ],
)
def test_columns_that_cannot_be_stored_are_errors_before_anything_is_written(
    tmp_path: Path, target: Any, message: str
) -> None:
    with pytest.raises(memload.SourceError, match=message):
        memload.build(Samples((PIXELS, target)), tmp_path / "out.bin", num_workers=0)
    assert list(tmp_path.iterdir()) == []


class UnreadableError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise AttributeError("no text")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "The data set has no samples"),
        ([{"img": PIXELS, "label": 1}], r"no entry 'image', only \['img', 'label'\]"),
        ([ValueError("broken"), None], "None of the first 2 samples .* ValueError: broken"),
        ([UnreadableError()], "UnreadableError"),
    ],
)
def test_a_data_set_without_a_usable_sample_is_an_error_that_says_why(
    samples: list[Any], message: str
) -> None:
    with pytest.raises(memload.SourceError, match=message):
        DatasetSource(Samples(*samples))


class Sleepy(Samples):
    """A data set whose first sample never comes."""

    def __getitem__(self, index: int) -> Any:
        return time.sleep(600) if index == 0 else super().__getitem__(index)


def test_a_first_sample_that_hangs_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    source = Sleepy((PIXELS, 0), (PIXELS, 1))
    with pytest.raises(memload.SourceError, match=r"Sample 0 .* took longer than 0.5 s"):
        memload.build(source, tmp_path / "out.bin", num_workers=1, timeout=0.5)


class Deadly(Samples):
    """A data set whose first sample ends the process."""

    def __getitem__(self, index: int) -> Any:
        return os._exit(3) if index == 0 else super().__getitem__(index)


def test_a_first_sample_that_ends_its_process_costs_itself(tmp_path: Path) -> None:
    source = Deadly((PIXELS, 0), (PIXELS, 1))
    report = memload.build(source, tmp_path / "out.bin", num_workers=1, size=8)
    assert (report.samples, report.rejected) == (1, 1)


def test_an_error_of_any_length_is_shortened() -> None:
    with pytest.raises(memload.SourceError) as caught:
        DatasetSource(Samples(ValueError("x" * 50_000_000)))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("mode", ["RGB", "array"])
def test_an_exception_whose_text_cannot_be_read_costs_its_sample(tmp_path: Path, mode: Any) -> None:
    source = Samples(UnreadableError(), (PIXELS, 1), UnreadableError(), (PIXELS, 2))
    report = memload.build(source, tmp_path / "out.bin", mode=mode, num_workers=0)
    assert report.rejected == 2
    assert report.ledger is not None
    assert report.ledger.read_text().count("UnreadableError") == 2
    assert memload.MemmapDataset(tmp_path / "out.bin").labels.tolist() == [1, 2]


@pytest.mark.parametrize("source", [7, None, iter(()), {1, 2}])
def test_what_is_no_source_is_told(tmp_path: Path, source: Any) -> None:
    with pytest.raises(TypeError, match="neither a folder nor a Source nor a map-style data set"):
        memload.build(source, tmp_path / "out.bin")


class Own:
    """A source of the user's own."""

    def __init__(
        self,
        records: Sequence[Any],
        schema: dict[str, Column] | None = None,
        classes: Sequence[str] | None = None,
        *,
        keys: Any = None,
    ) -> None:
        self.records, self.schema, self.classes = records, schema or {}, classes
        self.keys = keys or [f"key {number}" for number in range(len(records))]
        self.notes: list[str] = ["a note"]

    def __str__(self) -> str:
        return "source"

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> memload.Record:
        return memload.Record(self.keys[index], PIXELS, self.records[index])


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
        {}, {"label": 2}, {"label": -1}, {"label": [0, 1]}, {"label": "1"}, {"label": None}, None,
        {"label": 0.9}, {"label": np.nan}, {"label": 2**64 - 1},
        {"label": np.ma.masked_array(1, mask=True)},
    ],
)  # fmt: skip
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
        (Own([], LABEL), "no samples"),
        (Own([{}], {"crc32/image": Column("<i8")}), "column 'crc32/image'"),
        (Own([{}], {}, ["a"]), "a column 'label'"),
        (Own([{}], {"label": Column("<f8")}, ["a"]), "a column 'label'"),
        (Own([{}], {"z": Column("<c16")}), "column 'z'"),
        (Own([{}], {"z": Column("nonsense")}), "column 'z'"),
        (Own([{}], {"z": Column("<f4", (3,), points=True)}), r"\(k, 2\)"),
        (Own([{}], {"z": Column("<i4", (1, 2), points=True)}), r"\(k, 2\)"),
        (Own([{}], {"\ud800": Column("<i8")}), "names of columns"),
        (Own([{}], LABEL, [0, 1]), "classes"),  # type: ignore[list-item]
        (Own([{}], LABEL, ["x" * 50_000_000, "y" * 50_000_000]), "classes.* 100,000,054 bytes"),
        (Own([{}], keys=[b"a"]), "keys"),
        (Own([{}], keys=["\ud800"]), "keys"),
        (Own([{}], keys=["a", "b"]), "keys"),
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
