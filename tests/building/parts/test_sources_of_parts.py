"""A part that is run when the data set is published: only that data set counts as done."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload

OPTIONS: dict[str, Any] = {"size": 8, "num_workers": 0, "progress": False}


@pytest.fixture
def late_part(tmp_path: Path) -> Callable[..., Callable[..., memload.BuildReport]]:
    """A function that publishes a data set, and returns one that runs a late part of a build.

    The same build finds it published.
    """

    def publish(**options: Any) -> Callable[..., memload.BuildReport]:
        build = partial(memload.build, output=tmp_path / "out.bin", **OPTIONS)
        build(**options)
        late = partial(build, part=(1, 2))
        assert late(**options).part.was_published
        return late

    return publish


@pytest.fixture
def table(tmp_path: Path, pictures: Path) -> Callable[..., Path]:
    """A function that writes a table of ten pictures with columns, and returns its path."""

    def write(**columns: Any) -> Path:
        names = [str(path) for path in sorted(pictures.rglob("*.jpg"))[:10]]
        values = [names, *([str(value(row)) for row in range(10)] for value in columns.values())]
        lines = [",".join(["path", *columns]), *map(",".join, zip(*values, strict=True))]
        path = tmp_path / "table.csv"
        path.write_text("\n".join([*lines, ""]))
        return path

    return write


def write_masks(pictures: Path, folder: Path, depth: type) -> Path:
    for path in sorted(pictures.rglob("*.jpg")):
        name = (folder / path.relative_to(pictures)).with_suffix(".png")
        name.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(path) as picture:
            ids = np.full(picture.size[::-1], 7, depth)
        Image.fromarray(ids).save(name)
    return folder


def test_other_masks_and_arrays_are_refused(
    late_part: Callable[..., Any], pictures: Path, tmp_path: Path
) -> None:
    masks = write_masks(pictures, tmp_path / "masks", np.uint8)
    wide = write_masks(pictures, tmp_path / "wide", np.uint16)
    late = partial(late_part(source=pictures, masks=masks), source=pictures)
    with pytest.raises(memload.BuildError, match="the array 'mask' is gone"):
        late()
    with pytest.raises(memload.BuildError, match="the array 'seg' is new"):
        late(masks={"mask": masks, "seg": masks})
    with pytest.raises(memload.BuildError, match="the array 'mask' was mask of uint8 8×8 and is "):
        late(masks=wide)


@pytest.mark.parametrize(
    ("first", "late", "difference"),
    [
        ({"label": int}, {"label": lambda row: row + 1}, "values of the column 'label'"),
        ({"label": int}, {"label": lambda row: f"c{row}"}, "classes was None and is [c0, c1, c2, "),
        (
            {"label": lambda row: f"c{row % 2}"},
            {"label": lambda row: f"d{row % 2}"},
            "classes was [c0, c1] and is [d0, d1]",
        ),
        ({"age": int}, {"age": float}, "the column 'age' was int64 and is float64"),
        ({}, {"age": int}, "the column 'age' is new"),
        ({"age": int}, {}, "the column 'age' is gone"),
        (
            {"label": int, "sex": lambda row: "f"},
            {"label": int, "sex": lambda row: "m"},
            "the category 'sex' was [f] and is [m]",
        ),
    ],
    ids=["labels", "texts", "classes", "type", "new", "gone", "category"],
)
def test_other_columns_are_refused(
    late_part: Callable[..., Any],
    table: Callable[..., Path],
    first: dict[str, Any],
    late: dict[str, Any],
    difference: str,
) -> None:
    run_late = late_part(source=table(**first))
    with pytest.raises(memload.BuildError) as raised:
        run_late(source=table(**late))
    assert difference in str(raised.value)


def test_points_are_no_other_columns(
    late_part: Callable[..., Any], table: Callable[..., Path]
) -> None:
    columns = {"eye_x": float, "eye_y": float, "label": int}
    late = late_part(source=table(**columns), points={"eye": "eye_x,eye_y"})
    with pytest.raises(memload.BuildError, match="the column 'eye' is gone; the column 'eye_x' is"):
        late(source=table(**columns))


def test_another_list_of_classes_is_refused(late_part: Callable[..., Any], pictures: Path) -> None:
    late = late_part(source=pictures, classes=["class2", "class1", "class0"])
    with pytest.raises(memload.BuildError, match=r"classes was \[class2, .* and is \[class0, "):
        late(source=pictures)
    with pytest.raises(memload.BuildError, match=r"classes was \[class2, .* and is \[class1, "):
        late(source=pictures, classes=["class1", "class2", "class0"])


def test_pictures_that_were_added_and_removed_since_do_not_stop_a_late_part(
    late_part: Callable[..., Any], pictures: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = late_part(source=pictures)
    first, *_ = sorted(pictures.rglob("*.jpg"))
    for name in ("a.jpg", "b.jpg"):
        (first.parent / name).write_bytes(first.read_bytes())
    first.unlink()
    with caplog.at_level("INFO", logger="memload"):
        assert late(source=pictures).part.was_published
    assert "The source has changed since: 2 names more, 1 fewer. --new-to builds" in caplog.text
    report = late(source=pictures, overwrite=True)
    assert not report.is_published  # it has begun the build anew


def test_another_source_is_refused(
    late_part: Callable[..., Any], pictures: Path, make_pictures: Any, tmp_path: Path
) -> None:
    late = late_part(source=pictures)
    other = make_pictures(tmp_path / "other", 100)
    for path in sorted(other.rglob("*.jpg"))[:90]:
        path.rename(path.with_name(f"other{path.name}"))
    with pytest.raises(memload.BuildError, match="samples: 0 of its 40 names are in the source"):
        late(source=other)
