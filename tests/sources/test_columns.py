"""What values become: numbers, arrays, labels, categories, points and boxes."""

import json

import numpy as np
import pytest

import memload
from memload.sources.matching import match

from .conftest import picture, touch, write_tar


def open_columns(tmp_path, kind, columns, **options):
    """A source with these columns, read from a file of this kind."""
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    touch(tmp_path, "a.jpg")
    path = tmp_path / f"t.{kind}"
    if kind == "csv":
        lines = [["a.jpg", *("" if x is None else str(x) for x in row.values())] for row in rows]
        path.write_text("\n".join(map(",".join, [["path", *columns], *lines])))
    elif kind == "jsonl":
        path.write_text("\n".join(json.dumps({"file_name": "a.jpg", **row}) for row in rows))
    elif kind == "tar":
        texts = [(f"{n}.json", json.dumps(row).encode()) for n, row in enumerate(rows)]
        write_tar(path, [*texts, *((f"{n}.jpg", picture()) for n in range(len(rows)))])
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        table = pyarrow.table({"image": [picture()] * len(rows), **columns})
        parquet.write_table(table, path, row_group_size=2)
    return memload.open_source(path, **options)


def open_values(tmp_path, kind, values, **options):
    """A source with a column ``x`` of these values."""
    return open_columns(tmp_path, kind, {"x": values}, **options)


KINDS = ("csv", "jsonl", "tar", "parquet")
VALUES = [
    ([3, 2**60, -1], "<i8", [3, 2**60, -1]),
    ([1, None, 3], "<f8", [1.0, None, 3.0]),
    ([1.5, 2.25, 3.0], "<f8", [1.5, 2.25, 3.0]),
    ([2**53 + 1, None, 3], None, None),
    ([*["b", "a"] * 10], "<i8", [*[1, 0] * 10]),
    ([*["b", ""] * 10], "<i8", [*[1, 0] * 10]),
    (["a", "b", "c"], None, None),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("values", "dtype", "stored"), VALUES)
def test_a_column_is_the_same_from_every_kind_of_file(tmp_path, kind, values, dtype, stored):
    source = open_values(tmp_path, kind, values)
    if dtype is None:
        assert source.schema == {}
        assert any("skipped 1 column: x" in note for note in source.notes)
        return
    assert source.schema["x"].dtype == dtype
    column = [None if value != value else value for value in source.values["x"].tolist()]
    assert column == stored
    assert source[1].columns["x"] == pytest.approx(source.values["x"][1], nan_ok=True)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_chosen_by_their_values_before_types_are(tmp_path, kind):
    source = open_values(tmp_path, kind, [5, None, 7, 5, 6], where={"x": [5, 6]})
    assert source.values["x"].tolist() == [5, 5, 6]
    assert source.schema["x"].dtype == "<i8"
    commas = open_values(tmp_path, kind, [5, None, 7, 5, 6], where={"x": "5,6"})
    assert commas.values["x"].tolist() == [5, 5, 6]
    either = open_values(tmp_path, kind, ["a", "b", "b;c"], where={"x": "a,b"}, label="x")
    assert either.classes == ["a", "b"]
    text = open_values(tmp_path, kind, ["a", "b", "a"], where={"x": "b"}, label="x")
    assert (len(text), text.classes) == (1, ["b"])
    with pytest.raises(memload.SourceError, match="has no value 'c'"):
        open_values(tmp_path, kind, ["a", "b"], where={"x": "c"})


@pytest.mark.slow
def test_rows_of_hugging_face_are_chosen_by_names_of_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = {"label": datasets.ClassLabel(names=["b", "a"]), "x": datasets.Value("int64")}
    values = {"label": [0, 1, 0, 1], "x": [5, 6, 7, 8], "image": [picture(n) for n in range(4)]}
    features = datasets.Features({**features, "image": datasets.Image()})
    rows = datasets.Dataset.from_dict(values, features=features)
    source = memload.open_source(rows, where={"label": "a"})
    assert source.values["x"].tolist() == [6, 8]
    assert (source.classes, list(source.keys)) == (["b", "a"], ["1", "3"])
    assert [source[row].image for row in (0, 1)] == [picture(1), picture(3)]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_lists_of_one_shape_are_arrays(tmp_path, kind):
    source = open_values(tmp_path, kind, [[1.5, 2.0], [3.0, 4.5]])
    assert source.schema["x"].shape == (2,)
    assert source[1].columns["x"].tolist() == [3.0, 4.5]
    whole = open_values(tmp_path, kind, [[1, 2**60], [3, 4]])
    assert whole[0].columns["x"].tolist() == [1, 2**60]
    uneven = open_values(tmp_path, kind, [[1], [2, 3]])
    assert any("neither numbers of one shape" in note for note in uneven.notes)


def test_large_integers_beside_null_in_lists_are_left_out(tmp_path):
    source = open_values(tmp_path, "jsonl", [[2**53 + 1, None], [3, 4]])
    assert source.schema == {}


def test_json_and_parquet_keep_texts_of_digits(tmp_path):
    for kind in ("jsonl", "parquet"):
        source = open_values(tmp_path, kind, ["007", "042"] * 10)
        assert source.categories["x"] == ["007", "042"]
    assert open_values(tmp_path, "csv", ["007", "042"] * 10)[0].columns["x"] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_names_or_numbers(tmp_path, kind):
    source = open_values(tmp_path, kind, ["pug", "beagle", "pug"], label="x")
    assert (source.classes, source.values["label"].tolist()) == (
        ["beagle", "pug"],
        [1, 0, 1],
    )
    numbers = open_values(tmp_path, kind, [7, 0, 7], label="x")
    assert (numbers.classes, numbers[0].columns["label"]) == (None, 7)
    assert open_values(tmp_path, kind, [0.5, 2, 1], label="x")[0].columns["label"] == 0.5
    with pytest.raises(memload.SourceError, match="label is missing"):
        open_values(tmp_path, kind, [1, None, 2], label="x")


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        ("10", "ab", (["b", "a"], [1, 0])),
        ("70", "ab", (["a", "b"], [0, 1])),
        ("00", "ab", (["a", "b"], [0, 1])),
        ("10", [5, None], (None, [1, 0])),
        ("yx", "ab", (["x", "y"], [1, 0])),
    ],
)
def test_names_in_json_are_those_of_numbers_beside_it(tmp_path, labels, names, expected):
    files = []
    for row, (label, name) in enumerate(zip(labels, names, strict=True)):
        text = json.dumps({"label": name}).encode()
        files += [(f"{row}.jpg", b""), (f"{row}.cls", label.encode()), (f"{row}.json", text)]
    source = memload.open_source(write_tar(tmp_path / "t.tar", files))
    assert (source.classes, source.values["label"].tolist()) == expected


def test_numbers_of_classes_do_not_name_other_labels(tmp_path):
    files = []
    for row, (number, name, breed) in enumerate([("1", "ant", "b"), ("0", "bee", "a")]):
        text = json.dumps({"label": name, "breed": breed}).encode()
        files += [(f"{row}.jpg", b""), (f"{row}.cls", number.encode()), (f"{row}.json", text)]
    source = memload.open_source(write_tar(tmp_path / "t.tar", files), label="breed")
    assert (source.classes, source.values["label"].tolist()) == (["a", "b"], [1, 0])


@pytest.mark.parametrize("name", ["label", "class", "labels", "fine_label", "cls", "target"])
def test_usual_names_are_labels(write, name):
    source = memload.open_source(write(f"path,{name}", "a.jpg,pug", "a.jpg,beagle"))
    assert source.classes == ["beagle", "pug"]
    assert any(f"column '{name}'" in note for note in source.notes) == (name != "label")
    assert "--label" in memload.open_source(write("path,breed", "a.jpg,pug")).notes[0]


def test_class_names_of_hugging_face_are_kept(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kind = {"_type": "ClassLabel", "names": ["a", "b", "c"]}
    features = {"label": kind, "coarse": kind, "far": kind, "picture": {"_type": "Image"}}
    table = pyarrow.table(
        {"picture": [picture()] * 2, "label": [2, 0], "coarse": [1, 2], "far": [1, 7]}
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, tmp_path / "t.parquet")
    source = memload.open_source(tmp_path / "t.parquet")
    assert source.classes == ["a", "b", "c"]
    assert dict(source.categories) == {"coarse": ["a", "b", "c"]}
    assert source[1].columns == {"label": 0, "coarse": 2, "far": 7}
    chosen = memload.open_source(tmp_path / "t.parquet", where={"coarse": "c"})
    assert [record.columns["far"] for record in (chosen[0],)] == [7]
    assert (len(chosen), chosen.classes, chosen.group_starts) == (1, ["a", "b", "c"], [0])


# ------------------------------------------------------------------------------ points and boxes


@pytest.mark.parametrize("pattern", ["x*,y*", "[xy]*"])
def test_columns_of_numbers_are_points(write, pattern):
    path = write("path,x0,y0,x1,y1,z", "a.jpg,1,2,3,4,5", "a.jpg,,6,7,8,9")
    source = memload.open_source(path, points={"marks": pattern})
    assert source.schema["marks"] == ("<f4", (2, 2), True, False)
    assert source[0].columns["marks"].tolist() == [[1, 2], [3, 4]]
    assert np.isnan(source[1].columns["marks"][0, 0])
    assert source[0].columns["z"] == 5


def test_columns_of_numbers_are_boxes(write):
    path = write("path,x1,y1,x2,y2", "a.jpg,1,2,3,4", "a.jpg,,,,")
    source = memload.open_source(path, boxes={"boxes": "x1,y1,x2,y2"})
    assert source.schema["boxes"] == ("<f4", (1, 4), False, True)
    with pytest.raises(memload.SourceError, match="ends before it begins"):
        memload.open_source(write("path,x1,y1,x2,y2", "a.jpg,3,2,1,4"), boxes={"b": "x1,y1,x2,y2"})
    table = write("path,x,y,width,height", "a.jpg,3,2,10,40")
    with pytest.raises(memload.SourceError, match="x, y, width, height are sizes"):
        memload.open_source(table, boxes={"b": "x,y,width,height"})


SCENES = {
    "boxes": [[[0, 0, 5, 5]] * number for number in (2, 0, 1)],
    "ids": [[number] * number for number in (2, 0, 1)],
    "landmarks": [[[1, 2], [3, 4]]] * 3,
}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_lists_are_points_and_boxes_filled_up_to_the_most(tmp_path, kind):
    source = open_columns(tmp_path, kind, SCENES, points={"landmarks": ""}, boxes={"boxes": ""})
    assert source.schema["boxes"] == ("<f4", (2, 4), False, True)
    assert source.schema["landmarks"] == ("<f4", (2, 2), True, False)
    assert source[2].columns["boxes"][0].tolist() == [0, 0, 5, 5]
    assert np.isnan(source[2].columns["boxes"][1]).all()
    assert source.values["ids"].tolist() == [[2, 2], [-1, -1], [1, -1]]
    unnamed = open_columns(tmp_path, kind, SCENES)
    assert any("--boxes boxes" in note for note in unnamed.notes)
    assert any("--points landmarks" in note for note in unnamed.notes)


@pytest.mark.parametrize(
    ("names", "option"),
    [
        ("x0,y0,x1,y1", "--points 'points=x*,y*'"),
        ("left_eye_x,left_eye_y,nose_x,nose_y", "--points 'points=*_x,*_y'"),
        ("x1,y1,x2,y2", "--boxes 'boxes=x1,y1,x2,y2'"),
        ("xmin,ymin,xmax,ymax", "--boxes 'boxes=xmin,ymin,xmax,ymax'"),
        ("x,y", "--points 'points=x,y'"),
        ("width,height,max,may", ""),
    ],
)
def test_columns_that_may_be_points_or_boxes_are_noted_with_what_to_type(write, names, option):
    path = write(f"path,{names}", "a.jpg" + ",1,2,3,4"[: 2 * (names.count(",") + 1)])
    notes = [note for note in memload.open_source(path).notes if "as they are" in note]
    assert len(notes) == bool(option)
    if option:
        assert option in notes[0]
        kind, value = option.removeprefix("--").replace("'", "").split(" ")
        name, pattern = value.split("=")
        named = memload.open_source(path, **{kind: {name: pattern}})
        assert list(named.schema) == [name]


# ------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize(
    ("keys", "names", "expected"),
    [
        (["a/1.jpg", "b/1.jpg"], ["b/1.png", "a/1.png"], [1, 0]),
        (["a/1.jpg", "b/2.jpg"], ["2.png", "1.png"], [1, 0]),
        (["train/a/1.jpg"], ["1.png"], [0]),
        (["1.jpg"], ["1.jpg.png"], [0]),
        (["1.jpg"], ["1.npy", "1.jpg"], [1]),
        (["1.jpg", "1.png"], ["1.png"], [-1, 0]),
        (["a/1", "v1.0/2"], ["v1.0/2.png", "a/1"], [1, 0]),
        (["frame_0.25.jpg"], ["frame_0.png", "frame_0.25.png"], [1]),
        (["1.jpg"], ["2.png"], [-1]),
        (["train/1.jpg"], ["val/1.png"], [-1]),
        (["1.jpg", "2.jpg"], ["v/2.png", "w/1.png"], [1, 0]),
    ],
)
def test_names_match_with_their_folders_or_else_without(keys, names, expected):
    assert match(keys, names).tolist() == expected


@pytest.mark.parametrize(
    ("keys", "names", "message"),
    [
        (["1.jpg"], ["1.npy", "1.png"], "both fit '1.jpg'"),
        (["a/1.jpg", "b/1.jpg"], ["1.png"], "fits both 'a/1.jpg' and 'b/1.jpg'"),
        (["1.jpg", "1.bmp"], ["1.png"], "fits both"),
        (["x/a/1.jpg", "x/b/1.jpg"], ["a/1.png", "b/1.png"], "both fit"),
    ],
)
def test_names_that_are_not_clear_are_an_error(keys, names, message):
    with pytest.raises(ValueError, match=message):
        match(keys, names)


@pytest.mark.parametrize("kind", ["directory", "zip", "tar of folders"])
def test_masks_in_a_folder_belong_to_any_source(containers, tmp_path, kind):
    names = [f"{name[:-4]}.png" for name in [*containers.pictures][:-1]]
    masks = touch(tmp_path / "masks", *names, "dog/1.png", "dog/2.txt")
    made = {
        "directory": containers.directory,
        "zip": containers.zip,
        "tar of folders": lambda: containers.tar(labels=False),
    }
    source = memload.open_source(made[kind](), masks=masks, arrays={"depth": masks})
    assert source.arrays == {"mask": "mask", "depth": "array"}
    assert source[3].arrays == dict.fromkeys(("mask", "depth"), masks / "ant/03.png")
    assert source[29].arrays == {"mask": None, "depth": None}
    assert any("mask: 1 of 30 files" in note and "dog/1.png" in note for note in source.notes)
    assert source.take(np.array([7]))[0].arrays["mask"] == masks / "ant/07.png"


def test_masks_among_the_images_are_an_error(tmp_path):
    root = touch(tmp_path / "i", "a/1.jpg", "masks/a/1.png")
    with pytest.raises(memload.SourceError, match="lies within the images"):
        memload.open_source(root, masks=root / "masks")
    source = memload.open_source(root / "a", masks=root / "masks" / "a")
    assert source[0].arrays["mask"].name == "1.png"


def test_samples_that_have_only_numbers_take_no_masks_from_a_folder(tmp_path):
    masks = touch(tmp_path / "masks", "0.png")
    with pytest.raises(memload.SourceError, match="only numbers"):
        memload.open_source([b""], masks=masks)
    named = memload.DatasetSource([b""], key=["0.jpg"])
    assert memload.open_source(named, masks=masks)[0].arrays["mask"] == masks / "0.png"


@pytest.mark.parametrize("value", ["seg", "masks/{id}.png", "masks/"])
def test_a_table_names_masks(write, tmp_path, value):
    touch(tmp_path, "masks/007.png", "masks/008.png", "007.jpg", "008.jpg")
    lines = ("id,seg,label", "007,masks/007.png,a", "008,masks/008.png,b")
    options = {"image": "{id}.jpg", "masks": str(tmp_path / value) if "/" in value[-1] else None}
    options["masks"] = options["masks"] or {"mask": value}
    source = memload.open_source(write(*lines), **options)
    assert [record.image.name for record in (source[0], source[1])] == ["007.jpg", "008.jpg"]
    assert [source[row].arrays["mask"].name for row in (0, 1)] == ["007.png", "008.png"]


def test_an_empty_cell_is_no_mask(write):
    source = memload.open_source(write("path,m", "a.jpg,a.png", "a.jpg,"), masks=["m"])
    assert source[1].arrays == {"m": None}


def test_tars_and_parquet_have_masks(tmp_path):
    files = [("0.jpg", b"i"), ("0.seg.png", b"m"), ("0.x.npy", b"a"), ("1.jpg", b"j")]
    tar = write_tar(tmp_path / "t.tar", files)
    source = memload.open_source(tar, masks={"mask": "seg"}, arrays={"x": "x.npy"})
    assert source[0].arrays == {"mask": b"m", "x": b"a"}
    assert source[1].arrays == {"mask": None, "x": None}
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = {"image": [b"i", b"j"], "seg": [{"bytes": b"m", "path": None}, None]}
    parquet.write_table(pyarrow.table(table), tmp_path / "t.parquet")
    source = memload.open_source(tmp_path / "t.parquet", masks={"mask": "seg"})
    assert [source[row].arrays["mask"] for row in (0, 1)] == [b"m", None]
    assert "--mask seg=seg" in memload.open_source(tmp_path / "t.parquet").notes[-1]


# ------------------------------------------------------------------------------------ the rest


def test_the_identity_of_samples_tells_whether_a_build_may_go_on(write, tmp_path):
    def identity(*lines, **options):
        return json.dumps(memload.open_source(write(*lines), **options).identity)

    lines = ("path,label,x", "a.jpg,cat,1", "a.jpg,dog,2")
    same = identity(*lines)
    assert identity(*lines) == same
    assert identity(*lines[:2], "a.jpg,cat,2") != same
    assert identity(*lines, label="x") != same
    assert identity(*lines, masks={"mask": "label"}) != same


def test_what_a_data_set_has_is_left_out(containers, tmp_path):
    table = containers.table(name="first.csv")
    containers.directory()
    memload.build(containers.folder / "first.csv", tmp_path / "out.bin", size=8, num_workers=0)
    with pytest.raises(memload.NothingNewError):
        memload.open_source(table, new_to=tmp_path / "out.bin")
    with table.open("a") as file:
        file.write("images/cat/29.jpg.jpg,cat,1,val\n")
    (containers.folder / "images/cat/29.jpg.jpg").write_bytes(picture())
    source = memload.open_source(table, new_to=tmp_path / "out.bin")
    assert list(source.keys) == ["images/cat/29.jpg.jpg"]
    assert source.classes == ["ant", "bee", "cat"]
    assert any("30 of 31 samples are left out" in note for note in source.notes)
    other = memload.open_source(containers.directory(), new_to=tmp_path / "out.bin")
    assert any("build from the same folder as then" in note for note in other.notes)


def test_classes_come_from_a_list_a_file_or_a_data_set(containers, tmp_path):
    names = ["cat", "bee", "ant", "x"]
    (tmp_path / "names.txt").write_text("cat\nbee\n\nant\nx\n")
    memload.build(containers.directory(), tmp_path / "o.bin", classes=names, size=8, num_workers=0)
    dataset = memload.MemmapDataset(tmp_path / "o.bin")
    for classes in (names, tmp_path / "names.txt", tmp_path / "o.bin", dataset):
        source = memload.open_source(containers.directory(), classes=classes)
        assert (source.classes, source[0].columns["label"]) == (names, 2)


def test_exported_tables_keep_names_and_all_texts(write):
    lines = [
        json.dumps({"file_name": "a.jpg", "memload_key": f"k{n}", "note": f"t{n}", "cls": n})
        for n in (1, 2)
    ]
    source = memload.open_source(write(*lines, name="metadata.jsonl"))
    assert list(source.keys) == ["k1", "k2"]
    assert (source.categories, source.classes) == ({"note": ["t1", "t2"]}, None)
    assert source[0].columns == {"note": 0, "cls": 1}
    same = [line.replace("k2", "k1") for line in lines]
    source = memload.open_source(write(*same, name="metadata.jsonl"))
    assert list(source.keys) == ["a.jpg", "a.jpg"]


def test_tables_of_others_may_have_keys_beside_their_paths(write, tmp_path):
    lines = ["file_name,key,class", "a.jpg,x,pug", "b.jpg,x,beagle"]
    source = memload.open_source(write(*lines, images=("a.jpg", "b.jpg")))
    assert (list(source.keys), source.classes) == (["a.jpg", "b.jpg"], ["beagle", "pug"])
    files = []
    for number in range(2):  # as img2dataset writes them
        facts = {"key": f"{number:05d}", "url": f"https://e.org/{number}", "caption": f"c{number}"}
        files += [(f"{number}.jpg", b""), (f"{number}.json", json.dumps(facts).encode())]
    source = memload.open_source(write_tar(tmp_path / "t.tar", files))
    assert list(source.keys) == ["t.tar/0.jpg", "t.tar/1.jpg"]
    assert (source.schema, source.categories) == ({}, {})


def test_parquet_keeps_row_groups_together(containers):
    source = memload.open_source(containers.parquet())
    assert source.group_starts == [0, 7, 14, 21, 28]
    assert source.take(np.array([1, 8, 9, 22])).group_starts == [0, 1, 3, 4]


def test_texts_with_many_values_are_not_read_to_their_end(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = 10_050
    table = pyarrow.table({"image": [b""] * rows, "caption": [f"c{row}" for row in range(rows)]})
    parquet.write_table(table, tmp_path / "t.parquet")
    assert (
        "caption (more than 10,000 texts)" in memload.open_source(tmp_path / "t.parquet").notes[-1]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_names_if_the_classes_are_called_by_numbers(tmp_path, kind):
    source = open_values(tmp_path, kind, [2, 10, 2], label="x", classes=["0", "1", "10", "2"])
    assert source.values["label"].tolist() == [3, 2, 3]
    with pytest.raises(memload.SourceError, match="not among the 2 given: 10"):
        open_values(tmp_path, kind, [2, 10, 2], label="x", classes=["1", "2"])


def test_names_beside_tar_samples_that_are_no_utf_8_are_refused(tmp_path):
    files = [("0.jpg", b""), ("0.cls", "\ufeff1".encode()), ("1.jpg", b""), ("1.cls", b"0")]
    assert memload.open_source(write_tar(tmp_path / "bom.tar", files)).values["label"].tolist() == [
        1,
        0,
    ]
    files[1] = ("0.cls", "é".encode("latin-1"))
    with pytest.raises(memload.SourceError, match=r"The .cls beside 0.jpg is no UTF-8"):
        memload.open_source(write_tar(tmp_path / "latin.tar", files))


def test_labels_too_large_for_an_array_of_labels_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, 4, 4, 3), np.uint8))
    np.save(tmp_path / "y.npy", np.array([1, 2**63], np.uint64))
    with pytest.raises(memload.SourceError, match=r"The labels in .*y.npy are"):
        memload.open_source(tmp_path / "x.npy", label=tmp_path / "y.npy")


def test_boxes_by_their_size_are_noted_as_no_boxes(write):
    (note,) = memload.open_source(write("path,label,x,y,width,height", "a.jpg,b,1,2,3,4")).notes
    assert note.startswith("x,y,width,height are stored as they are; boxes have corners")


def test_lines_of_one_image_are_noted(write):
    path = write("path,label", "a.jpg,cat", "b.jpg,dog", "a.jpg,dog")
    assert "also 1 whose image came before" in memload.open_source(path).notes[0]
    assert len(memload.open_source(path)) == 3
