from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.sources.record import Column
from memload.storage.format import FLAG_OUTSIDE

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A function that writes lines as a CSV file."""

    def lines(*text: str, name: str = "list.csv", encoding: str = "utf-8", end: str = "\n") -> Path:
        path = tmp_path / name
        path.write_bytes("".join(line + end for line in text).encode(encoding, "surrogateescape"))
        return path

    return lines


def values(manifest: memload.Manifest, name: str) -> list[Any]:
    return [np.asarray(manifest[i].columns[name]).tolist() for i in range(len(manifest))]


def test_paths_are_relative_to_the_manifest_or_to_a_root(write: Write, tmp_path: Path) -> None:
    path = write("image", "b/1.jpg", "a.png", "é.jpg", "a.png")
    (tmp_path / "pictures").mkdir()
    for options, root in [({}, tmp_path), ({"root": tmp_path / "pictures"}, tmp_path / "pictures")]:
        manifest = memload.Manifest(path, **options)  # type: ignore[arg-type]
        assert list(manifest.keys) == ["b/1.jpg", "a.png", "é.jpg", "a.png"]
        assert manifest[0].image == root / "b" / "1.jpg"
        assert (manifest.schema, manifest.classes) == ({}, None)


@pytest.mark.parametrize(
    ("cells", "classes", "labels"),
    [
        (["cat", "ant", "Bee", "cat", "10"], ["10", "Bee", "ant", "cat"], [3, 2, 1, 3, 0]),
        (["7", "-1", "007", "+3"], None, [7, -1, 7, 3]),  # numbers are kept
    ],
)
def test_labels_by_name_count_into_sorted_classes(
    write: Write, cells: list[str], classes: list[str] | None, labels: list[int]
) -> None:
    manifest = memload.Manifest(write("path,label", *(f"a.jpg,{cell}" for cell in cells)))
    assert manifest.classes == classes
    assert values(manifest, "label") == labels
    assert manifest.schema == {"label": Column("<i8")}


def test_columns_of_numbers_keep_their_names(write: Write) -> None:
    manifest = memload.Manifest(
        write("path,id, weight ,score", "1,9007199254740993,0.5,1e3", "2,4,1,", "3,-5, 2 ,nan")
    )
    schema = {"id": Column("<i8"), "weight": Column("<f8"), "score": Column("<f8")}
    assert manifest.schema == schema
    assert values(manifest, "id") == [9007199254740993, 4, -5]  # more digits than a float has
    assert values(manifest, "weight") == [0.5, 1, 2]
    assert np.array_equal(values(manifest, "score"), [1000, np.nan, np.nan], equal_nan=True)


def test_columns_of_text_are_left_out_and_told(write: Write) -> None:
    manifest = memload.Manifest(write("path,label,name,age,code", "1,7,x,3,1_0", "2,8,y,4,20"))
    assert set(manifest.schema) == {"label", "age"}
    assert manifest.notes[-1] == "skipped 2 columns: name ('x' in line 2), code ('1_0' in line 2)"


def test_quotes_commas_newlines_and_blank_lines_are_read_as_csv(write: Write) -> None:
    manifest = memload.Manifest(
        write("path,label", "", '"a, b.jpg",x', '"new', 'line.jpg",y', "", '"quo""te.jpg",x')
    )
    assert list(manifest.keys) == ["a, b.jpg", "new\nline.jpg", 'quo"te.jpg']
    assert values(manifest, "label") == [0, 1, 0]


def test_files_of_spreadsheets_are_read(write: Write) -> None:
    manifest = memload.Manifest(write("path,label", "é.jpg,1", encoding="utf-8-sig", end="\r\n"))
    assert list(manifest.keys) == ["é.jpg"]
    assert values(manifest, "label") == [1]


HEADER = "path,label,part_0,part_1,part_2,part_3,age"
ROWS = ("a,1,10,20,30,40,7", "b,2,11,21,31,41,8")
PAIRS = [[[10, 20], [30, 40]], [[11, 21], [31, 41]]]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("part_*", PAIRS),
        (" part_[02] , part_[13] ", PAIRS),
        ("part_[01],part_[23]", [[[10, 30], [20, 40]], [[11, 31], [21, 41]]]),
    ],
)
def test_points_gather_columns_in_the_order_of_the_file(
    write: Write, pattern: str, expected: list[Any]
) -> None:
    manifest = memload.Manifest(write(HEADER, *ROWS), points={"landmarks": pattern})
    assert list(manifest.schema.items()) == [
        ("label", Column("<i8")),
        ("landmarks", Column("<f4", (2, 2), points=True)),
        ("age", Column("<i8")),
    ]
    assert values(manifest, "landmarks") == expected


@pytest.mark.parametrize("two", [2, "2"])
def test_points_may_be_all_further_columns(write: Write, two: int | str) -> None:
    manifest = memload.Manifest(write("path,label,name,a,b,c,d", "1,0,x,1,2,3,"), points={"p": two})
    assert list(manifest.schema) == ["label", "p"]
    assert np.array_equal(values(manifest, "p")[0], [[1, 2], [3, np.nan]], equal_nan=True)


def test_arrays_gather_columns_into_a_shape(write: Write) -> None:
    path = write("path,r0,r1,r2,r3,t0,t1", "a,1,2,3,4,5,6")
    manifest = memload.Manifest(path, arrays={"pose": "r*:2x2", "shift": "t*"})
    assert manifest.schema == {"pose": Column("<f4", (2, 2)), "shift": Column("<f4", (2,))}
    assert values(manifest, "pose") == [[[1, 2], [3, 4]]]
    assert values(manifest, "shift") == [[5, 6]]


SHAPES = "arrays 'p'.* Give a pattern and a shape"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"points": {"p": "q*"}}, "points 'p'.*fits 0 of the columns part_0, part_1, .*, age"),
        ({"points": {"p": "part_[012]"}}, "points 'p'.*fits 3 of"),
        ({"points": {"p": "part_*,age"}}, "points 'p'.*fits 4 and 1 columns"),
        (
            {"points": {"p": "part_0,part_1,part_2"}},
            "Give one pattern, or one for each of x, y, which",
        ),
        ({"points": {"p": 2}}, "points 'p'.*fits 5 of"),
        ({"arrays": {"p": "q*"}}, SHAPES),
        ({"arrays": {"p": "part_*:3x3"}}, SHAPES),
        ({"arrays": {"p": "part_*:2x"}}, SHAPES),
        ({"arrays": {"p": "part_*:-2x-2"}}, SHAPES),
    ],
)
def test_patterns_that_do_not_fit_the_columns_are_wrong_usage(
    write: Write, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        memload.Manifest(write(HEADER, *ROWS), **options)


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(memload.SourceError, match=message) as caught:
        memload.Manifest(path, **options)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["path,label", "x,1", "", "a", "y,2"], r"list\.csv, line 4: it has 1 column, but the fir"),
        (["path,label", "x,1", "a,1,"], "line 3: it has 3 columns, but the first line has 2"),
        (["path,label", '"a', 'b",1', "c"], "line 4: "),  # a path with a newline
        (["path,label", "x,1", '"a,1'], "line 3: this is not CSV"),
        (["path,label", "x,1", '"a"b,1'], "line 3: this is not CSV"),
        (["path,label", "x,cat", "y,", "z, "], "line 3: 2 labels are missing"),
        (["path,label", "x,1", "y, "], "line 3: 1 label is missing"),
        (["a.JPG,1", "b.jpg,2"], r"line 1: the column names are missing: .* image \(a\.JPG\)"),
        (["path,a,a", "x,1,2"], "line 1: two columns have the same name: a"),
        (["path,", "x,1"], "line 1: a column has no name"),
        ([], "it lists no images"),
        (["path,label", ""], "it lists no images"),
    ],
)
def test_a_wrong_file_is_refused_and_the_line_is_named(
    write: Write, lines: Sequence[str], message: str
) -> None:
    refused(write(*lines), message)


@pytest.mark.parametrize("options", [{"points": {"p": "x,y"}}, {"arrays": {"p": "[xy]"}}])
def test_what_cannot_be_gathered_is_refused(write: Write, options: Any) -> None:
    lines = ["a,1,2,3", "b,3,4,3", "c,5,six,3", "d,7,eight,3"]
    refused(write("path,x,y,z", *lines), "line 4: 'six' in column 'y' is not a number", **options)
    refused(write("path,x,y,p", "a,1,2,3"), "two columns would be named 'p'", **options)


def test_what_is_not_a_text_file_is_refused(write: Write, tmp_path: Path) -> None:
    refused(write("path,label", "a,1", encoding="utf-16"), "perhaps in UTF-16")
    refused(tmp_path, "it is a folder or a device, not a CSV file")
    refused(tmp_path / "none.csv", "cannot be read: No such file")


def test_a_wrong_root_is_reported(write: Write, folder: Path) -> None:
    message = r"The folder of the images, .* does not exist\. Check --root"
    with pytest.raises(memload.SourceError, match=message):
        memload.Manifest(write("path", "a"), root=folder / "none")
    manifest = memload.Manifest(write("path,label", "00.jpg,x", "03.jpg,y"), root=folder / "bee")
    message = rf"none of 2 pictures in {folder / 'bee'} can be used: .*no such file.*--root"
    with pytest.raises(memload.BuildError, match=message):
        memload.build(manifest, folder.parent / "out.bin", num_workers=0)


def test_images_that_are_not_there_end_in_the_ledger(
    write: Write, folder: Path, tmp_path: Path
) -> None:
    path = write("path,label", "gone.jpg,x", "ant/00.jpg,y", '"",y', name="images/list.csv")
    report = memload.build(
        memload.Manifest(path), tmp_path / "out.bin", size=8, num_workers=0, max_rejects="90%"
    )
    assert (report.samples, report.rejected) == (1, 2)
    assert report.ledger is not None
    assert report.ledger.read_text().splitlines()[1].startswith("gone.jpg,no such file")
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert dataset.classes == ["x", "y"]
    assert dataset[0][1] == 1


def test_points_go_from_the_manifest_through_the_build_to_the_data_set(
    write: Write, folder: Path, tmp_path: Path
) -> None:
    with Image.open(folder / "ant" / "00.jpg") as image:
        width, height = image.size
    inside, outside = "ant/00.jpg,1,2.5,3,4", f"ant/00.jpg,2,3.5,3,{height}"
    path = write("path,zebra,ape,x0,y0", inside, outside)
    manifest = memload.Manifest(path, root=folder, points={"nose": "x*,y*"})
    memload.build(manifest, tmp_path / "out.bin", size=16, fit="squash", num_workers=1)
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert list(dataset.columns) == ["nose", "zebra", "ape"]
    assert dataset[0][2:] == (1, 2.5)
    assert dataset.index.points == ("nose",)
    assert dataset.index.flags.tolist() == [0, FLAG_OUTSIDE]
    expected = [[3.5 * 16 / width - 0.5, 4.5 * 16 / height - 0.5]]
    np.testing.assert_allclose(dataset.columns["nose"][0], expected, rtol=1e-6)
