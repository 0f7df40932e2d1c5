"""Wrong options, and what the error says."""

import pytest

import memload
from memload.sources.opening import open_source

from .conftest import touch, write_tar


class Pairs:
    def __init__(self, *targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return b"", self.targets[index]


WRONG = {
    "a template of a folder": (lambda made: made.directory(), {"image": "{id}.jpg"}, "a folder"),
    "a column of a zip": (lambda made: made.zip(), {"label": "x"}, "--label: .* is a zip"),
    "boxes of Parquet as a number": (
        lambda made: made.parquet(), {"boxes": {"boxes": 2}}, "the most is found"
    ),
    "boxes of a table as a number": (
        lambda made: made.table(), {"boxes": {"boxes": 9}}, r"boxes=\['boxes'\]"
    ),
    "extensions of a table": (lambda made: made.table(), {"extensions": [".jpg"]}, "--extensions"),
    "an unknown column": (lambda made: made.table(), {"label": "breed"}, "There is no column 'breed'"),
    "an unknown condition": (lambda made: made.table(), {"where": {"x": "y"}}, "no column 'x'"),
    "a condition without lines": (
        lambda made: made.table(), {"where": {"split": "test"}}, "no value 'test'. It has val, train"
    ),
    "conditions that no line has together": (
        lambda made: made.table(), {"where": {"split": "val", "age": "0.25"}}, "no images with split=val and age=0.25"
    ),
    "an unknown column in a template": (
        lambda made: made.table(), {"image": "images/{id}.jpg"}, "no column 'id'"
    ),
    "a pattern that fits no columns": (
        lambda made: made.table(), {"points": {"marks": "x*,y*"}}, "fits 0 and 0 columns"
    ),
    "a root that is missing": (lambda made: made.table(), {"root": "none"}, "such as none/images.* --root"),
    "an unknown class": (
        lambda made: made.table(), {"classes": ["ant", "bee"]}, "not among the 2 given: cat"
    ),
    "masks that are missing": (
        lambda made: made.directory(), {"masks": "none"}, "none cannot be read"
    ),
    "a mask with the name of an array": (
        lambda made: made.table(),
        {"masks": {"x": "image"}, "arrays": {"x": "image"}},
        "arrays: 'x' is a mask, too",
    ),
    "several folders": (
        lambda made: [str(made.directory()) + ".csv", str(made.zip())], {}, "2 sources are given"
    ),
    "a pattern without files": (lambda made: f"{made.folder}/*.tar", {}, "no file has such a name"),
    "numbers in the wrong order": (lambda made: "a{9..1}.tar", {}, "no file has such a name"),
    "labels without a list": (lambda made: Pairs("a", "b"), {}, r"classes=\[…\]"),
    "an unknown entry": (lambda made: Pairs(1, 2), {"masks": ["seg"], "points": ["x"]}, "no entry 'x'"),
    "boxes without their most": (lambda made: Pairs({}), {"boxes": ["boxes"]}, "not a mapping .* {'boxes': 100}"),
    "a class that is no text": (lambda made: made.directory(), {"classes": [1]}, "different texts"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_an_error(containers, name):
    make, options, message = WRONG[name]
    containers.directory()
    with pytest.raises((ValueError, memload.SourceError), match=message):
        open_source(make(containers), **options)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ({"train": []}, {}, "holds several data sets"),
        (iter([]), {}, "pass list"),
        (7, {}, "neither a path nor a map-style"),
        ("images", {"extensions": ".jpg"}, "must be a list"),
        ("images", {"arrays": "depth"}, "mapping such as"),
    ],
)
def test_a_wrong_type_is_an_error(containers, monkeypatch, source, options, message):
    containers.directory()
    monkeypatch.chdir(containers.folder)
    with pytest.raises(TypeError, match=message):
        open_source(source, **options)


def test_an_opened_source_takes_what_lies_in_folders_only(containers, tmp_path):
    source = open_source(containers.directory())
    masks = touch(tmp_path / "masks", *(name[:-4] + ".png" for name in containers.pictures))
    assert open_source(source, masks=masks).arrays == {"mask": "mask"}
    assert open_source(source, classes=["ant", "bee", "cat", "dog"]).classes[3] == "dog"
    with pytest.raises(ValueError, match="opened already"):
        open_source(source, label="breed")


def test_a_pattern_stands_for_files(containers, tmp_path):
    for number in range(3):
        write_tar(tmp_path / f"s{number:02d}.tar", [(f"{number}.jpg", b"")])
    for pattern in ("s{00..02}.tar", "s*.tar"):
        keys = list(open_source(f"{tmp_path}/{pattern}").keys)
        assert keys == ["s00.tar/0.jpg", "s01.tar/1.jpg", "s02.tar/2.jpg"]
    paths = [tmp_path / "s02.tar", tmp_path / "s00.tar"]
    assert list(open_source(paths).keys) == ["s00.tar/0.jpg", "s02.tar/2.jpg"]
