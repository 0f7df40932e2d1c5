from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.building.resizing import Fit
from memload.building.sources import Column

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


def test_paths_are_relative_to_the_manifest(write: Write, tmp_path: Path) -> None:
    manifest = memload.Manifest(write("path", "a/1.jpg", "b.png"))
    assert list(manifest.keys) == ["a/1.jpg", "b.png"]
    assert manifest[1].image == tmp_path / "b.png"
    assert manifest.schema == {}
    assert manifest.classes is None


def test_paths_are_relative_to_a_root_where_one_is_given(write: Write, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    manifest = memload.Manifest(write("path", "1.jpg"), root=tmp_path / "pictures")
    assert manifest[0].image == tmp_path / "pictures" / "1.jpg"


def test_the_first_column_is_the_path_whatever_its_name(write: Write) -> None:
    manifest = memload.Manifest(write("label,image", "3,4", "5,6"))
    assert list(manifest.keys) == ["3", "5"]
    assert values(manifest, "image") == [4, 6]


def test_the_order_is_that_of_the_lines(write: Write) -> None:
    assert list(memload.Manifest(write("path", "b", "a", "c", "a")).keys) == ["b", "a", "c", "a"]


def test_labels_by_name_count_into_sorted_classes(write: Write) -> None:
    manifest = memload.Manifest(write("path,label", "1,cat", "2,ant", "3,Bee", "4,cat", "5,10"))
    assert manifest.classes == ["10", "Bee", "ant", "cat"]
    assert values(manifest, "label") == [3, 2, 1, 3, 0]
    assert manifest.schema == {"label": Column("<i8")}


def test_labels_by_number_are_taken_as_they_are(write: Write) -> None:
    manifest = memload.Manifest(write("path,label", "1,7", "2,-1", "3,007", "4,+3"))
    assert manifest.classes is None
    assert values(manifest, "label") == [7, -1, 7, 3]


def test_columns_of_numbers_keep_their_names(write: Write) -> None:
    manifest = memload.Manifest(
        write("path,age, weight ,score", "1,3,0.5,1e3", "2,4,1,", "3,-5, 2 ,nan")
    )
    assert manifest.schema == {
        "age": Column("<i8"),
        "weight": Column("<f8"),
        "score": Column("<f8"),
    }
    assert values(manifest, "age") == [3, 4, -5]
    assert values(manifest, "weight") == [0.5, 1, 2]
    assert np.array_equal(values(manifest, "score"), [1000, np.nan, np.nan], equal_nan=True)


def test_integers_beyond_a_float_keep_every_digit(write: Write) -> None:
    manifest = memload.Manifest(write("path,id", "1,9007199254740993", "2,-9223372036854775808"))
    assert values(manifest, "id") == [9007199254740993, -9223372036854775808]


def test_columns_of_text_are_left_out_and_told(write: Write) -> None:
    manifest = memload.Manifest(write("path,name,age,code", "1,x,3,1_0", "2,y,4,20"))
    assert set(manifest.schema) == {"age"}
    assert manifest.notes == [
        "skipped 2 columns of text: name ('x' in line 2), code ('1_0' in line 2)"
    ]


def test_quotes_commas_newlines_and_blank_lines_are_read_as_csv(write: Write) -> None:
    manifest = memload.Manifest(
        write("path,label", "", '"a, b.jpg",x', '"new', 'line.jpg",y', "", '"quo""te.jpg",x')
    )
    assert list(manifest.keys) == ["a, b.jpg", "new\nline.jpg", 'quo"te.jpg']
    assert values(manifest, "label") == [0, 1, 0]


@pytest.mark.parametrize(
    ("encoding", "end"), [("utf-8-sig", "\n"), ("utf-8", "\r\n"), ("utf-8-sig", "\r\n")]
)
def test_files_of_spreadsheets_are_read(write: Write, encoding: str, end: str) -> None:
    manifest = memload.Manifest(write("path,label", "é.jpg,1", encoding=encoding, end=end))
    assert list(manifest.keys) == ["é.jpg"]
    assert values(manifest, "label") == [1]


def test_names_that_are_no_utf8_are_those_of_the_files(write: Write) -> None:
    assert list(memload.Manifest(write("path", "\udcff.jpg")).keys) == ["\udcff.jpg"]


HEADER = "path,label,part_0,part_1,part_2,part_3,age"
ROWS = ("a,1,10,20,30,40,7", "b,2,11,21,31,41,8")
PAIRS = [[[10, 20], [30, 40]], [[11, 21], [31, 41]]]


@pytest.mark.parametrize(
    "pattern", ["part_*", "part_[0-3]", "part_[02],part_[13]", " part_[02] , part_[13] "]
)
def test_points_gather_columns_in_the_order_of_the_file(write: Write, pattern: str) -> None:
    manifest = memload.Manifest(write(HEADER, *ROWS), points={"landmarks": pattern})
    assert manifest.schema == {
        "label": Column("<i8"),
        "landmarks": Column("<f4", (2, 2), points=True),
        "age": Column("<i8"),
    }
    assert values(manifest, "landmarks") == PAIRS


def test_points_may_stand_in_columns_for_x_and_for_y(write: Write) -> None:
    path = write("path,x1,x2,y1,y2", "a,1,2,3,4")
    assert values(memload.Manifest(path, points={"p": "x*,y*"}), "p") == [[[1, 3], [2, 4]]]


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


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("q*", "fits 0 of the columns part_0, part_1, part_2, part_3, age"),
        ("part_[012]", "fits 3 of"),
        ("part_*,age", "fits 4 and 1 columns"),
        ("part_0,part_1,part_2", "Give one pattern, or one for x and one for y"),
        (2, "fits 5 of"),
    ],
)
def test_points_that_fit_no_pairs_of_columns_are_wrong_usage(
    write: Write, pattern: str | int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"points 'p'.*{message}"):
        memload.Manifest(write(HEADER, *ROWS), points={"p": pattern})


@pytest.mark.parametrize(
    "pattern", ["q*", "part_*:3x3", "part_*:2x", "part_*:two", "part_*:-2x-2", "part_*:2x3", ":4"]
)
def test_arrays_of_another_shape_are_wrong_usage(write: Write, pattern: str) -> None:
    with pytest.raises(ValueError, match=r"arrays 'pose': .* Give a pattern and a shape"):
        memload.Manifest(write(HEADER, *ROWS), arrays={"pose": pattern})


def refused(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(memload.SourceError, match=message) as caught:
        memload.Manifest(path, **options)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("line", ["a", "a,1,2", "a,1,"])
def test_a_line_with_other_columns_is_named(write: Write, line: str) -> None:
    refused(
        write("path,label", "x,1", "", line, "y,2"),
        r"list\.csv, line 4: it has \d columns?, but the first line has 2",
    )


def test_the_line_is_that_of_the_file_where_a_path_has_newlines(write: Write) -> None:
    refused(write("path,label", '"a', 'b",1', "c"), "line 4: ")


@pytest.mark.parametrize("line", ['"a,1', '"a"b,1'])
def test_a_line_with_wrong_quotes_is_named(write: Write, line: str) -> None:
    refused(write("path,label", "x,1", line), "line 3: this is not CSV")


@pytest.mark.parametrize("cell", ["", " "])
def test_a_line_without_a_label_is_named(write: Write, cell: str) -> None:
    for good in ("cat", "1"):
        refused(
            write("path,label", f"x,{good}", f"y,{cell}", f"z,{cell}"),
            "line 3: 2 labels are missing",
        )


@pytest.mark.parametrize("options", [{"points": {"p": "x,y"}}, {"arrays": {"p": "[xy]"}}])
def test_text_among_numbers_is_named_with_its_line(write: Write, options: Any) -> None:
    refused(
        write("path,x,y", "a,1,2", "b,3,4", "c,5,six", "d,7,eight"),
        "line 4: 'six' in column 'y' is not a number",
        **options,
    )


def test_a_file_without_names_of_columns_is_told(write: Write) -> None:
    refused(
        write("a.JPG,1", "b.jpg,2"),
        r"line 1: the column names are missing: .* an image \(a\.JPG\)",
    )


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("path,a,a", "two columns have the same name: a"),
        ("path,", "a column has no name"),
        ("path,label,label", "two columns have the same name: label"),
    ],
)
def test_names_of_columns_that_are_none_are_told(write: Write, header: str, message: str) -> None:
    refused(write(header, "x,1,2"[: 2 * header.count(",") + 1]), f"line 1: {message}")


def test_points_with_the_name_of_another_column_are_told(write: Write) -> None:
    refused(write("path,x,y,p", "a,1,2,3"), "two columns would be named 'p'", points={"p": "x,y"})


@pytest.mark.parametrize("lines", [(), ("path,label",), ("path", "", "")])
def test_a_file_without_images_is_told(write: Write, lines: Sequence[str]) -> None:
    refused(write(*lines), "it lists no images")


def test_a_file_that_is_no_text_is_told(write: Write) -> None:
    refused(write("path,label", "a,1", encoding="utf-16"), "perhaps in UTF-16")


def test_what_is_not_a_csv_file_is_told(tmp_path: Path) -> None:
    refused(tmp_path, "it is a folder or a device, not a CSV file")
    refused(tmp_path / "none.csv", "cannot be read: No such file")


def test_no_such_root_is_told(write: Write, tmp_path: Path) -> None:
    with pytest.raises(
        memload.SourceError, match=r"The folder of the images, .* does not exist\. Check --root"
    ):
        memload.Manifest(write("path", "a"), root=tmp_path / "none")


def test_where_no_image_is_found_the_folder_that_was_searched_is_named(
    write: Write, folder: Path
) -> None:
    manifest = memload.Manifest(write("path,label", "00.jpg,x", "03.jpg,y"), root=folder / "bee")
    with pytest.raises(
        memload.BuildError,
        match=rf"none of 2 pictures in {folder / 'bee'} can be used: .*no such file.*--root",
    ):
        memload.build(manifest, folder.parent / "out.bin", num_workers=0)


def test_images_that_are_not_there_end_in_the_ledger(
    write: Write, folder: Path, tmp_path: Path
) -> None:
    path = write("path,label", "gone.jpg,x", "ant/00.jpg,y", '"",y', name="images/list.csv")
    report = memload.build(memload.Manifest(path), tmp_path / "out.bin", size=8, num_workers=0)
    assert (report.samples, report.rejected) == (1, 2)
    assert report.ledger is not None
    assert report.ledger.read_text().splitlines()[1].startswith("gone.jpg,no such file")
    dataset = memload.MemmapDataset(tmp_path / "out.bin")
    assert dataset.classes == ["x", "y"]
    assert dataset[0][1] == 1


SPOTS = ((5, 4), (30, 20), (59, 35), (20, 30))


def spotted(orientation: int) -> Image.Image:
    """White spots of 5×5 around SPOTS, on black, 64×40 as stored."""
    pixels = np.zeros((40, 64), np.uint8)
    for x, y in SPOTS:
        pixels[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3] = 255
    image = Image.fromarray(pixels)
    image.getexif()[274] = orientation
    return image


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
def test_points_stay_on_their_pixels_from_the_manifest_to_the_data_set(
    write: Write, tmp_path: Path, fit: Fit, orientation: int
) -> None:
    image = spotted(orientation)
    image.save(tmp_path / "spots.png", exif=image.getexif())
    numbers = ",".join(str(v) for spot in SPOTS for v in spot)
    names = ",".join(f"part_{i}" for i in range(2 * len(SPOTS)))
    path = write(f"path,label,{names}", f"spots.png,7,{numbers}")
    manifest = memload.Manifest(path, points={"landmarks": "part_*"})
    memload.build(manifest, tmp_path / "out.bin", size=48, fit=fit, mode="L", num_workers=1)
    dataset = memload.MemmapDataset(tmp_path / "out.bin", columns=["landmarks", "label"])
    picture, points, label = dataset[0]
    assert label == 7
    assert dataset.index.points == ("landmarks",)
    inside = 0
    for x, y in points.tolist():
        if 1 <= x <= 46 and 1 <= y <= 46:
            inside += 1
            assert picture[0, round(y), round(x)] > 200, (fit, orientation, x, y)
    assert inside == (2 if fit == "crop" else 4)
    assert bool(dataset.index.flags[0] & 4) == (fit == "crop")  # of the cropped, some lie outside


def test_columns_keep_the_order_of_the_manifest(folder: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "numbers.csv"
    manifest.write_text("path,zebra,ape,x0,y0\nant/00.jpg,1,2.5,3,4\n")
    source = memload.Manifest(manifest, root=folder, points={"nose": "x*,y*"})
    memload.build(source, tmp_path / "order.bin", size=16, num_workers=0)
    dataset = memload.MemmapDataset(tmp_path / "order.bin")
    assert list(dataset.columns) == ["nose", "zebra", "ape"]
    assert dataset[0][2:] == (1, 2.5)
