import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memload
from memload.building.sources.folder import ImageFolder
from memload.building.sources.record import EXTENSIONS, Column


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
    root = touch(tmp_path / "root", *(f"{folder}/{file}" for folder in folders for file in files))
    touch(tmp_path / "elsewhere", "deep/1.jpg", "2.jpg")
    (root / "a" / "link").symlink_to(tmp_path / "elsewhere")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "d").mkdir()  # a class without images
    samples, classes = as_torchvision(root)
    source = ImageFolder(root)
    assert source.classes == classes
    assert found(source) == samples
    assert len(samples) == 12 * len(folders) + 4
    assert list(source.keys) == [key for key, _ in samples]
    assert "class folders without images (which still count as classes) (1): d" in source.notes


def test_links_to_a_folder_above_are_not_followed(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/b/0.jpg")
    (root / "a" / "b" / "again").symlink_to(root / "a")
    (root / "a" / "c").symlink_to(root / "a" / "b")  # beside it, which is followed
    source = ImageFolder(root)
    assert list(source.keys) == ["a/b/0.jpg", "a/c/0.jpg"]
    (note,) = source.notes
    assert note.startswith("skipped links to a folder that contains them (2): a/b/again")


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


@pytest.mark.parametrize("own", [None, "train/1.jpg", "val/2.jpg"])
def test_only_if_all_images_lie_in_folders_of_the_class_folders_is_it_warned_of(
    own: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["train/a/0.jpg", "train/b/1.jpg", "val/a/2.jpg"]
    source = ImageFolder(touch(tmp_path / "data", *names, *([own] if own else [])))
    assert source.classes == ["train", "val"]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/data: the class folders (train, val) have no images of their own, only "
        "folders with images, such as train/a. If those are the classes, build "
        f"{tmp_path}/data/train instead."
    ] * (own is None)


def test_a_flat_folder_has_no_label(tmp_path: Path) -> None:
    root = touch(tmp_path, "b.jpg", "B.JPG", "a b.png", "10.jpg", "9.jpg", "x.txt")
    (root / "empty").mkdir()
    source = ImageFolder(root)
    assert list(source.keys) == ["10.jpg", "9.jpg", "B.JPG", "a b.png", "b.jpg"]
    assert source.classes is None
    assert source.schema == {}
    assert source[0].columns == {}
    assert source.notes[-1] == f"no labels: {root} has no class folders with images"


def test_other_endings_replace_those_of_torchvision(tmp_path: Path) -> None:
    root = touch(tmp_path, "a/0.jpg", "a/1.GIF", "a/2.avif")
    assert list(ImageFolder(root, extensions=(".gif", ".AVIF")).keys) == ["a/1.GIF", "a/2.avif"]


@pytest.mark.parametrize(
    ("names", "root", "message"),
    [
        ([], "nowhere", "nowhere does not exist. Check the path"),
        (["a.jpg"], "a.jpg", "a.jpg is a file, not a folder of images. Check the path"),
        (["a.csv"], "a.csv", r"a.csv is a file, not a folder of images. Check the path"),
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


def test_a_source_without_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(memload.SourceError, match=r"The path of the source is empty\."):
        memload.build("", tmp_path / "out.bin")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_nobody_may_open_is_told_by_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, output = touch(tmp_path / "images", "a/0.jpg"), tmp_path / "out.bin"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(memload.SourceError, match=f"^{root} cannot be read: Permission"):
            memload.build(root, output)

    original = Path.is_dir

    def refuse(path: Path) -> bool:
        if path == root:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(Path, "is_dir", refuse)  # as below a folder that nobody may open
    with pytest.raises(memload.SourceError, match=f"^{root} cannot be read: Permission"):
        memload.build(root, output)


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
            Samples(*samples, **attributes),
            path,
            size=8,
            num_workers=0,
            overwrite=True,
            max_rejects="90%",
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


TENSOR = torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: Image.fromarray(PIXELS),
        lambda path: PIXELS,
        lambda path: png(),
        lambda path: path,
        str,
        lambda path: TENSOR,
        lambda path: TENSOR.as_subclass(Kind),
        lambda path: {"bytes": png(), "path": None},  # as Hugging Face has them undecoded
        lambda path: {"bytes": None, "path": str(path)},
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


def test_gray_tensors_of_two_or_three_axes_become_gray_pictures(build: Build) -> None:
    dataset, rejects = build(TENSOR[0], TENSOR[:1])
    assert rejects == []
    expected = np.repeat(PIXELS[:, :, :1], 3, axis=2)
    assert (dataset.gather([0, 1]).numpy() == expected).all()


@pytest.mark.parametrize("image", [None, {}, PIXELS.astype(np.float32), b"", "", "a\0"])
def test_what_is_no_image_is_rejected_and_costs_nothing_else(build: Build, image: Any) -> None:
    dataset, rejects = build((PIXELS, 1), (image, 2), (PIXELS, 3))
    assert dataset.columns["label"].tolist() == [1, 3]
    assert len(rejects) == 1
    assert rejects[0].startswith("1,")


@pytest.mark.parametrize(
    ("target", "columns"),
    [
        (np.uint8(5), {"label": 5}),
        (torch.tensor(5), {"label": 5}),
        (True, {"label": 1}),
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
    types = ("uint8", ">i2", "float16", "float32", "bool")
    arrays = {f"of {name}": np.arange(6).reshape(2, 3).astype(name) for name in types}
    dataset, _ = build({"image": PIXELS, **arrays})
    for name, array in arrays.items():
        assert dataset.index.columns[name].dtype == array.dtype.newbyteorder("<")
        assert np.array_equal(dataset.index.columns[name][0], array)


class ClassLabel:
    names = ("no", "yes")


@pytest.mark.parametrize(
    ("attributes", "classes"),
    [
        ({"classes": ["a", "b"]}, ["a", "b"]),  # as torchvision's
        ({"features": {"image": object(), "label": ClassLabel()}}, ["no", "yes"]),  # Hugging Face's
        ({"classes": 10}, []),
        ({"classes": "ab"}, []),
        ({"features": torch.zeros(4)}, []),
        ({"features": {"label": object()}}, []),
    ],
)
def test_names_of_classes_are_taken_over_from_the_data_set(
    build: Build, attributes: dict[str, Any], classes: list[str]
) -> None:
    dataset, rejects = build((PIXELS, 1), (PIXELS, 2), (PIXELS, -1), **attributes)
    assert dataset.classes == classes
    assert len(rejects) == (2 if classes else 0)  # labels outside the classes


class UnreadableError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise AttributeError("no text")


@pytest.mark.parametrize("mode", ["RGB", "array"])
def test_samples_that_are_none_or_raise_are_rejected(tmp_path: Path, mode: Any) -> None:
    errors: list[Any] = [
        None,
        ValueError("broken"),
        StopIteration(),
        memload.DecodeError(""),
        RuntimeError("\ud800"),
        UnreadableError(),
        (),
    ]
    source = Samples(*errors, (PIXELS, 0), *errors, (PIXELS, 1))  # the first ones, and later ones
    report = memload.build(
        source, tmp_path / "out.bin", mode=mode, num_workers=0, max_rejects="90%"
    )
    assert memload.MemmapDataset(tmp_path / "out.bin").labels.tolist() == [0, 1]
    assert report.ledger is not None
    reasons = [line.partition(",")[2] for line in report.ledger.read_text().splitlines()[1:]]
    assert len(reasons) == 2 * len(errors)
    assert all(reasons)
    assert reasons[0] == "the data set returned None"
    assert "ValueError: broken" in reasons[1]
    assert "UnreadableError" in reasons[5]


@pytest.mark.parametrize(
    ("first", "second", "is_rejected"),
    [
        ({"age": 1}, 2, True),
        ({"age": 1}, {}, True),
        ({"age": 1}, {"age": 1, "more": 2}, True),
        ({"age": 1}, {"age": 1.5}, True),
        ({"age": 1}, {"age": [1, 2]}, True),
        ({"age": 1}, {"age": "old"}, True),
        ({"age": 1}, {"age": 2**63}, True),
        ({"age": np.zeros(2, np.float32)}, {"age": np.zeros(2)}, True),
        ({"age": np.zeros(2)}, {"age": 3.0}, True),
        ({"age": 0.5}, {"age": 1}, False),  # an integer may stand for a float
    ],
)
def test_a_sample_whose_columns_are_unlike_those_of_the_first_is_rejected(
    build: Build, first: Any, second: Any, is_rejected: bool
) -> None:
    dataset, rejects = build((PIXELS, first), (PIXELS, second), (PIXELS, first))
    assert len(rejects) == is_rejected
    assert len(dataset) == 3 - is_rejected


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cat", "labels are texts such as 'cat'"),
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


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "The data set has no samples"),
        ([{"foto": PIXELS, "label": 1}], r"no entry image or img .*, only \['foto', 'label'\]"),
        ([ValueError("broken"), None], "None of the first 2 samples .* ValueError: broken"),
        ([UnreadableError()], "UnreadableError"),
        ([ValueError("x" * 50_000_000)], r"x{99}"),
    ],
)
def test_a_data_set_without_a_usable_sample_is_an_error_that_says_why(
    tmp_path: Path, samples: list[Any], message: str
) -> None:
    with pytest.raises(memload.SourceError, match=message) as caught:
        memload.build(Samples(*samples), tmp_path / "out.bin", num_workers=0)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("source", [7, None, iter(()), {1, 2}])
def test_what_is_no_source_is_told(tmp_path: Path, source: Any) -> None:
    with pytest.raises(TypeError, match="neither a path nor a Source nor a map-style data set"):
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
    report = memload.build(source, tmp_path / "out.bin", size=4, num_workers=0, max_rejects="90%")
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert list(dataset.keys) == ["key 0", "key 1", "key 2"]
    assert dataset.index.points == ("p",)
    assert dataset.columns["p"].tolist() == [[[0.25, 0.25]]] * 3
    assert report.notes == ("a note",)


def test_columns_are_stored_as_they_are(tmp_path: Path) -> None:
    schema = {"label": "<i8", "f": "<f4", "b": "|b1", "u": "|u1", "big": ">i2"}
    samples = [
        {"label": 3.0, "f": np.nan, "b": True, "u": np.int64(255), "big": -7},
        {"label": 2**62 + 1, "f": 1e-3, "b": False, "u": 0, "big": True},
    ]
    source = Own(samples, {name: Column(dtype) for name, dtype in schema.items()})
    memload.build(source, tmp_path / "out.bin", size=4, num_workers=0, max_rejects="90%")
    columns = memload.MemmapDataset(tmp_path / "out.bin").index.columns
    assert columns["label"].tolist() == [3, 2**62 + 1]
    np.testing.assert_array_equal(columns["f"], np.array([np.nan, 1e-3], np.float32))
    assert columns["b"].tolist() == [True, False]
    assert (columns["u"].tolist(), columns["big"].tolist()) == ([255, 0], [-7, 1])


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("<i8", [0.9, np.nan, np.inf, "1", 1j, None, 2**63, [1], np.datetime64(5, "s")]),
        ("<i8", [np.ma.masked_array(1, mask=True)]),
        ("|u1", [-1, 256, np.int64(300), 0.5]),
        ("|b1", [2, 0.5]),
        ("<f8", ["1.5", 1j, np.ma.masked_array(1.0, mask=True)]),
        ("<f4", [1e39]),
        ("<f2", [70000.0]),
    ],
)
def test_a_sample_whose_value_would_become_another_is_rejected(
    tmp_path: Path, dtype: str, values: list[Any]
) -> None:
    source = Own([{"x": value} for value in [1, *values, 0]], {"x": Column(dtype)})
    report = memload.build(source, tmp_path / "out.bin", size=4, num_workers=0, max_rejects="90%")
    assert report.ledger is not None
    assert report.ledger.read_text().count("column 'x'") == report.rejected == len(values)
    assert memload.MemmapDataset(tmp_path / "out.bin").columns["x"].tolist() == [1, 0]


def test_a_record_that_breaks_the_promise_of_its_source_costs_itself_alone(
    tmp_path: Path,
) -> None:
    wrong = [None, {}, {"label": 2}, {"label": -1}]
    source = Own([{"label": 1}, *wrong, {"label": 0}], LABEL, ["a", "b"])
    report = memload.build(source, tmp_path / "out.bin", size=4, num_workers=0, max_rejects="90%")
    assert report.rejected == len(wrong)
    assert memload.MemmapDataset(tmp_path / "out.bin").columns["label"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Own([], LABEL), "no samples"),
        (Own([{}], {"crc32/image": Column("<i8")}), "column 'crc32/image'"),
        (Own([{}], {"label": Column("<f8")}, ["a"]), "a column 'label'"),
        (Own([{}], {"z": Column("nonsense")}), "column 'z'"),
        (Own([{}], {"z": Column("<f4", (3,), points=True)}), r"\(k, 2\)"),
        (Own([{}], {"\ud800": Column("<i8")}), "names of columns"),
        (Own([{}], LABEL, [0, 1]), "classes"),  # type: ignore[list-item]
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
