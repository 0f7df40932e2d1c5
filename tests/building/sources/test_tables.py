"""Tables: delimiters, columns by name, categories. Labels and points are tested with Manifest."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memload
from memload.building.sources.classes import PinnedClasses
from memload.building.sources.opening import open_source
from memload.building.sources.record import Column, Record
from memload.building.sources.table import Manifest
from memload.errors import SourceError


def write(path: Path, *lines: str, encoding: str = "utf-8") -> Path:
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


@pytest.mark.parametrize(
    ("name", "delimiter"), [("x.csv", ","), ("x.csv", ";"), ("x.tsv", "\t"), ("x.txt", "\t")]
)
def test_the_delimiter_is_found(containers: Any, name: str, delimiter: str) -> None:
    containers.directory()
    source = open_source(containers.table(name, delimiter))
    assert source.classes == ["ant", "bee", "cat"]
    assert source.categories == {"split": ["train", "val"]}
    assert source.columns["age"].tolist() == containers.ages
    assert [record.image.read_bytes() for record in source] == list(containers.pictures.values())


def test_columns_may_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "id,file,kind,fold", "7,a,dog,0", "8,b.PNG,cat,1")
    source = Manifest(path, path_column="file", label_column="kind", extension=".jpg")
    assert list(source.keys) == ["a.jpg", "b.PNG"]
    assert source.classes == ["cat", "dog"]
    assert source.columns["label"].tolist() == [1, 0]
    assert source.columns["id"].tolist() == [7, 8]


def test_the_only_column_of_text_has_the_labels(tmp_path: Path) -> None:
    source = Manifest(write(tmp_path / "x.csv", "image_id,breed,fold", "a,dog,0", "b,cat,1"))
    assert source.classes == ["cat", "dog"]
    assert any("'breed'" in note for note in source.notes)


def test_a_column_called_class_has_the_labels_if_there_are_several_of_text(tmp_path: Path) -> None:
    source = Manifest(write(tmp_path / "x.csv", "id,split,class", "a,train,dog", "b,val,cat"))
    assert source.classes == ["cat", "dog"]
    assert any("'class'" in note for note in source.notes)


def test_where_keeps_the_lines_with_a_text(tmp_path: Path) -> None:
    lines = ["p,label,split,fold", "a,x,train,0", "b,y,val,1", "c,x,train,1", "d,y, train ,1"]
    path = write(tmp_path / "x.csv", *lines)
    source = Manifest(path, where={"split": "train", "fold": "1"})
    assert list(source.keys) == ["c", "d"]
    with pytest.raises(SourceError, match="split=test"):
        Manifest(path, where={"split": "test"})
    with pytest.raises(SourceError, match="no column 'part'"):
        Manifest(path, where={"part": "test"})


def test_spaces_around_cells_do_not_make_a_class(tmp_path: Path) -> None:
    source = Manifest(write(tmp_path / "x.csv", "p,label", "a,cat", "b,cat ", "c, dog"))
    assert source.classes == ["cat", "dog"]


def test_a_wrong_number_leaves_its_column_out_and_names_the_line(tmp_path: Path) -> None:
    lines = ["p;label;age", *[f"{n};1;{n}.5" for n in range(30)], 'x;1;"2,5"']
    source = Manifest(write(tmp_path / "x.csv", *lines))
    assert "age" not in source.schema
    assert any("age ('2,5' in line 32 is not a number)" in note for note in source.notes)


def test_text_with_many_values_is_left_out(tmp_path: Path) -> None:
    lines = ["p,label,caption,site", *[f"{n},1,text {n},{'ab'[n % 2]}" for n in range(40)]]
    source = Manifest(write(tmp_path / "x.csv", *lines))
    assert source.categories == {"site": ["a", "b"]}
    np.testing.assert_array_equal(source.columns["site"], np.arange(40) % 2)
    assert any("caption" in note for note in source.notes)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_another_encoding_is_told(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "x.csv", "path,label", "a,1", encoding=encoding)
    with pytest.raises(SourceError, match="UTF-16"):
        Manifest(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [(b"p,label\na,x\nb\xe9,y\n", 3), (b"p,label\na,caf\xe9\n", 2), (b"p,\xe9tat\na,x\n", 1)],
)
def test_bytes_that_are_not_utf8_are_told_with_their_line(
    tmp_path: Path, text: bytes, line: int
) -> None:
    (tmp_path / "x.csv").write_bytes(text)
    message = rf"line {line}: .*\\xe9.* Latin-1, where it is .*é.*Save the table as UTF-8"
    with pytest.raises(SourceError, match=message):
        Manifest(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("files", "options", "remedy"),
    [
        (["7.jpg", "8.jpg"], {}, r"--extension \.jpg\."),
        (["7.PNG", "8.PNG"], {}, r"--extension \.PNG\."),
        (["images/7", "images/8"], {}, "--root .*/images"),
        (["images/7.jpg", "images/8.jpg"], {}, r"--extension \.jpg --root .*/images"),
        (["7", "8", "images/x"], {"root": "images"}, r"--root \S*[^s]\.$"),
    ],
)
def test_images_in_another_place_are_found(
    tmp_path: Path, files: list[str], options: dict[str, str], remedy: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    path = write(tmp_path / "x.csv", "id,label", "7,dog", "8,cat")
    root = {name: tmp_path / folder for name, folder in options.items()}
    with pytest.raises(SourceError, match=remedy):
        Manifest(path, **root)


def test_numbers_may_have_decimal_commas_if_cells_are_separated_otherwise(tmp_path: Path) -> None:
    lines = ["p;breed;age;weight;note", "a;dog;0,50;1.000;0,5", "b;cat;;2.5;0,5 kg", "c;cat;-3;1;"]
    source = Manifest(write(tmp_path / "x.csv", *lines), label_column="breed")
    assert source.columns["age"][[0, 2]].tolist() == [0.5, -3]
    assert source.columns["weight"].tolist() == [1, 2.5, 1]
    assert "note" not in source.columns
    assert source.notes[0] == "commas are read as decimal points: age (0,50 is 0.5)"
    source = Manifest(write(tmp_path / "x.csv", "p;breed;age", "a;dog;0,50", "b;cat;1,5"))
    assert source.classes == ["cat", "dog"]


@pytest.mark.parametrize("option", ["path_column", "label_column"])
def test_an_unknown_column_is_named(tmp_path: Path, option: str) -> None:
    path = write(tmp_path / "x.csv", "path,label", "a,1")
    with pytest.raises(SourceError, match=r"no column 'nope', only .*label"):
        Manifest(path, **{option: "nope"})


def test_options_of_tables_do_not_apply_to_folders(containers: Any) -> None:
    with pytest.raises(ValueError, match="where"):
        open_source(containers.directory(), where={"a": "b"})


def test_categories_are_built_and_kept_when_a_data_set_is_built_again(
    containers: Any, tmp_path: Path
) -> None:
    containers.directory()
    memload.build(containers.table("x.csv"), tmp_path / "large.bin", size=16, num_workers=0)
    memload.build(tmp_path / "large.bin", tmp_path / "small.bin", size=8, num_workers=0)
    large, small = (memload.MemmapDataset(tmp_path / f"{name}.bin") for name in ("large", "small"))
    assert large.categories == small.categories == {"split": ["train", "val"]}
    names = list(small.where(split="val").keys)
    assert names == list(large.where(split="val").keys)
    assert 0 < len(names) < len(small)


def test_a_category_without_a_text_rejects_its_sample(tmp_path: Path) -> None:
    class Numbered:
        classes, keys, notes = None, ["a", "b"], ()
        schema, categories = {"split": Column("<i8")}, {"split": ["train"]}

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Record:
            return Record(self.keys[index], np.zeros((4, 4, 3), np.uint8), {"split": index})

    report = memload.build(Numbered(), tmp_path / "x.bin", size=4, num_workers=0, max_rejects=1)
    assert (report.samples, report.rejected) == (1, 1)
    assert "split 1 is not within 0 to 0" in (tmp_path / "x.rejects.csv").read_text()
    Numbered.schema = {"split": Column("<f8")}
    with pytest.raises(SourceError, match="'split' must be a column of int64"):
        memload.build(Numbered(), tmp_path / "y.bin", size=4, num_workers=0)


def test_parts_of_a_data_set_are_no_classes_unless_they_are_named(
    containers: Any, tmp_path: Path
) -> None:
    containers.directory()
    table = containers.table()
    message = r"--label-column.*--where split=train.*--classes train,val"
    with pytest.raises(SourceError, match=message):
        memload.build(open_source(table, label_column="split"), tmp_path / "x.bin", num_workers=0)
    memload.build(
        open_source(table, label_column="split"),
        tmp_path / "x.bin",
        size=8,
        num_workers=0,
        classes=["train", "val"],
    )
    assert memload.MemmapDataset(tmp_path / "x.bin").classes == ["train", "val"]


# --------------------------------------------------------------------------- masks and other arrays


def test_columns_of_paths_are_masks_and_arrays(tmp_path: Path) -> None:
    for name in ("a.jpg", "m/a.png", "d/a.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = ["path,segm,depth,kind,r1,r2", "a.jpg,m/a.png,d/a.npy,x,1,2", "b.jpg,,d/b.npy,y,3,4"]
    path = write(tmp_path / "x.csv", *lines)
    source = open_source(path, masks=["segm"], arrays={"z": "depth", "pose": "r*"})
    assert source.arrays == {"segm": "mask", "z": "array"}
    assert source[0].arrays == {"segm": tmp_path / "m/a.png", "z": tmp_path / "d/a.npy"}
    assert source.without_image(1).arrays == {"z": tmp_path / "d/b.npy"}
    assert (source.classes, list(source.schema)) == (["x", "y"], ["label", "pose"])
    assert open_source(path, masks={"mask": "segm"}, arrays=["depth"]).arrays == {
        "mask": "mask",
        "depth": "array",
    }
    assert open_source(path, masks={"mask": f"{tmp_path}/m/"}).arrays == {"mask": "mask"}
    with pytest.raises(SourceError, match="no column 'mask', only path, segm"):
        open_source(path, masks=["mask"])


def test_a_column_of_masks_that_are_all_missing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    path = write(tmp_path / "x.csv", "path,mask", "a.jpg,masks/a.png")
    with pytest.raises(SourceError, match=r"first files for 'mask' exists: there is no .*/masks/a"):
        open_source(path, masks=["mask"])


def test_columns_form_boxes(tmp_path: Path) -> None:
    header = "path,a_x1,b_x1,a_y1,b_y1,a_x2,b_x2,a_y2,b_y2,w"
    lines = [header, "a.jpg,1,,2,,3,,4,,5", "b.jpg,1,5,2,6,3,7,4,8,6"]
    path = write(tmp_path / "x.csv", *lines)
    source = open_source(path, boxes={"boxes": "*_x1,*_y1,*_x2,*_y2"})
    assert source.schema["boxes"] == Column("<f4", (2, 4), boxes=True)
    assert list(source.schema) == ["boxes", "w"]
    np.testing.assert_array_equal(source[0].columns["boxes"], [[1, 2, 3, 4], [np.nan] * 4])
    np.testing.assert_array_equal(source[1].columns["boxes"], [[1, 2, 3, 4], [5, 6, 7, 8]])
    assert not any("boxes" in note for note in source.notes)
    ordered = write(tmp_path / "y.csv", "path,box_0,box_1,box_2,box_3", "a.jpg,1,2,3,4")
    assert open_source(ordered, boxes={"b": "box_*"})[0].columns["b"].tolist() == [[1, 2, 3, 4]]


def test_columns_that_are_called_as_boxes_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "path,label,Xmin,ymin,xmax,ymax,w", "a.jpg,cat,1,2,3,4,5")
    assert open_source(path).notes == [
        "Xmin,ymin,xmax,ymax are stored as they are; --boxes 'boxes=Xmin,ymin,xmax,ymax' lets them "
        "move with their images, as boxes"
    ]
    assert open_source(path, boxes={"boxes": "Xmin,ymin,xmax,ymax"}).notes == []


@pytest.mark.parametrize(
    ("boxes", "error", "message"),
    [
        ({"b": "x,y,w,h"}, SourceError, r"line 3: the box \[9.0, 2.0, 3.0, 4.0\] of 'b' is not x1"),
        ({"b": "x,y"}, ValueError, "boxes 'b'.*one for each of x1, y1, x2, y2"),
        ({"b": "[xyw]"}, ValueError, "boxes 'b'.*fits 3 of the columns .* groups of four columns"),
        ({"b": 10}, ValueError, r"--boxes: .* read as a table, .* form NAME=x1\*,y1\*,x2\*,y2\*"),
    ],
)
def test_wrong_boxes_are_errors(
    tmp_path: Path, boxes: Any, error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "x.csv", "path,x,y,w,h", "a.jpg,1,2,3,4", "b.jpg,9,2,3,4")
    with pytest.raises(error, match=message):
        open_source(path, boxes=boxes)


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (["10", "2", "1"], ["1", "10", "11", "2"], [1, 3, 0]),
        (["01", "02"], ["01", "02"], [0, 1]),
        (["0", "1", "2"], ["1", "2", "3"], [0, 1, 2]),
        (["0", "1"], ["cat", "dog"], [0, 1]),
    ],
)
def test_numbers_may_be_names_of_given_classes(
    tmp_path: Path, labels: list[str], classes: list[str], expected: list[int]
) -> None:
    lines = [f"{number}.jpg,{label}" for number, label in enumerate(labels)]
    source = PinnedClasses(open_source(write(tmp_path / "x.csv", "path,label", *lines)), classes)
    assert [source[index].columns["label"] for index in range(len(source))] == expected
    assert list(source.classes) == classes


def test_a_number_that_is_no_name_of_the_given_classes_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "path,label", "a.jpg,2", "b.jpg,13")
    with pytest.raises(SourceError, match="names of classes, such as '2', but '13' is none"):
        PinnedClasses(open_source(path), ["1", "10", "2"])


def test_the_column_of_masks_is_not_taken_for_that_of_the_images(tmp_path: Path) -> None:
    (tmp_path / "m.png").touch()
    path = write(tmp_path / "x.csv", "mask,image,label", "m.png,a.jpg,x")
    source = open_source(path, masks=["mask"])
    assert (list(source.keys), list(source.arrays)) == (["a.jpg"], ["mask"])


def test_points_of_all_other_columns_leave_those_that_patterns_take(tmp_path: Path) -> None:
    lines = "file,b_x,b_y,p_x,p_y,note,r0", "a.png,1,2,3,4,7,9", "b.png,5,6,7,8,late,9"
    path = write(tmp_path / "x.csv", *lines, "c.png,5,6,7,8,early,9")
    source = Manifest(path, points={"b": 2, "a": "p_*"}, arrays={"rest": "r*"})
    assert source.columns["a"][:, 0].tolist() == [[3, 4], [7, 8], [7, 8]]
    assert source.columns["b"][:, 0].tolist() == [[1, 2], [5, 6], [5, 6]]
    assert list(source.columns) == ["b", "a", "rest"]


def test_a_wrong_cell_of_points_is_named_even_if_it_is_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "file,x,y", "a.png,?,2", "b.png,3,4", "c.png,5,6")
    for pattern in (2, "x,y"):
        with pytest.raises(SourceError, match=r"line 2: '\?' in column 'x' is not a number"):
            Manifest(path, points={"marks": pattern})
