"""Contact sheets, from Python. tests/test_cli.py tests the command."""

import io
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload
from memload.errors import FormatError, MissingError
from memload.storage.format import npy_header
from memload.storage.index import Index

Make = Callable[..., Index]
Add = Callable[..., Index]
Tamper = Callable[..., Path]

GAP, LINE = 4, 14


def tiles(path: Path, width: int, height: int) -> list[np.ndarray]:
    """Return the tiles of a contact sheet, row by row, without those left white."""
    with Image.open(path) as sheet:
        pixels = np.asarray(sheet.convert("RGB"))
    assert (pixels.shape[1] - GAP) % (width + GAP) == 0
    assert (pixels.shape[0] - GAP) % (height + LINE + GAP) == 0
    cells = [
        pixels[y : y + height, x : x + width]
        for y in range(GAP, pixels.shape[0] - GAP, height + LINE + GAP)
        for x in range(GAP, pixels.shape[1] - GAP, width + GAP)
    ]
    return [cell for cell in cells if not (cell == 255).all()]


@pytest.mark.parametrize("indices", [[0], [4, 2, 2], [-1, 0], [3] * 30])
def test_a_preview_shows_the_samples_asked_for_in_their_order(
    indices: list[int], make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(rows=(5, 4), shape=(8, 12, 3), row=np.arange(9)[::-1].copy())
    parts = [np.load(path) for path in sorted(tmp_path.glob("*.bin"))]
    pixels = np.concatenate(parts)[::-1]
    chosen = memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", indices=indices, tile=12)
    assert chosen == [index % 9 for index in indices]
    found = tiles(tmp_path / "grid.png", 12, 8)
    assert len(found) == len(indices)
    for tile, index in zip(found, chosen, strict=True):
        np.testing.assert_array_equal(tile, pixels[index])


def test_random_samples_follow_from_the_seed_and_the_class(
    make_dataset: Make, tmp_path: Path
) -> None:
    path = make_dataset(rows=(50,)).path

    def chosen(name: str, **options: Any) -> list[int]:
        return memload.preview(path, tmp_path / name, tile=16, **options)

    first = chosen("a.png", count=10, seed=3)
    assert first == sorted(set(first))
    assert len(first) == 10
    assert chosen("b.png", count=10, seed=3) == first
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert chosen("c.png", count=10, seed=4) != first
    bees = list(range(1, 50, 3))
    assert chosen("d.png", class_name="bee") == bees
    some = chosen("e.png", class_name="bee", count=4)
    assert len(some) == 4
    assert set(some) <= set(bees)


def test_a_notebook_shows_a_preview_without_a_file(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset()
    shown = memload.preview(index.path, indices=[3, 1], tile=12)
    assert shown == [3, 1]
    memload.preview(index.path, tmp_path / "grid.png", indices=[3, 1], tile=12)
    with (
        Image.open(io.BytesIO(shown._repr_png_())) as image,
        Image.open(tmp_path / "grid.png") as file,
    ):
        assert np.array_equal(np.asarray(image), np.asarray(file))
        assert np.array_equal(np.asarray(shown.image), np.asarray(file))


@pytest.mark.parametrize(
    ("descr", "channels"), [("|u1", 1), ("<u2", 3), ("<i2", 1), ("<f2", 2), ("<f4", 1), ("<f4", 4)]
)
def test_other_types_and_channels_are_shown_from_their_least_to_their_greatest_value(
    descr: str, channels: int, make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(shape=(8, 12, channels), descr=descr)
    memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", indices=[1], tile=12)
    (tile,) = tiles(tmp_path / "grid.png", 12, 8)
    values = np.load(tmp_path / "made.bin")[1].astype(float)
    if descr != "|u1":
        values = (values - values.min()) / (values.max() - values.min()) * 255
    expected = values[:, :, :3] if channels > 2 else values[:, :, :1].repeat(3, 2)
    np.testing.assert_allclose(tile, expected, atol=1)


def test_values_without_end_are_shown(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(shape=(8, 12, 1), descr="<f4")
    pixels = np.load(tmp_path / "made.bin")
    pixels[1], pixels[2, 0], pixels[2, 1], pixels[2, 2] = np.nan, np.inf, -np.inf, 3e38
    header = (tmp_path / "made.bin").read_bytes()[:4096]
    (tmp_path / "made.bin").write_bytes(header + pixels.tobytes())
    make = {"image": np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)}
    Index(**{**vars(index), "crc32": make}).write(index.path)
    assert memload.preview(index.path, tmp_path / "grid.png", indices=[1, 2], tile=12) == [1, 2]


def points_sheet(make: Make, folder: Path, points: list[list[float]], **options: Any) -> np.ndarray:
    """Return where a sheet of one sample, 8×12 shown at 96×144, is drawn on in pure red."""
    columns = {"label": np.zeros(1, np.int64), "eyes": np.array([points], np.float64)}
    index = make(rows=(1,), shape=(8, 12, 3), columns=columns, points=("eyes",), **options)
    memload.preview(index.path, folder / "grid.png", tile=144)
    with Image.open(folder / "grid.png") as sheet:
        pixels = np.asarray(sheet)
    assert pixels.shape[:2] == (96 + LINE + 2 * GAP, 144 + 2 * GAP)
    return (pixels == (255, 0, 0)).all(2)


def test_points_are_drawn_where_they_lie(make_dataset: Make, tmp_path: Path) -> None:
    red = points_sheet(make_dataset, tmp_path, [[0, 0], [11, 7], [5.5, 2]])
    # A pixel of the picture has 12 pixels of the sheet.
    assert red[GAP + 6, GAP + 6]
    assert red[GAP + 90, GAP + 138]
    assert red[GAP + 30, GAP + 72]
    assert 3 * 4 <= red.sum() <= 3 * 25


@pytest.mark.parametrize(
    "point", [[-3, 2], [3, 9], [np.nan, 1], [np.inf, 1], [1e300, 1e300], [2.0**31, 1]], ids=str
)
def test_points_outside_the_picture_are_not_drawn(
    point: list[float], make_dataset: Make, tmp_path: Path
) -> None:
    assert not points_sheet(make_dataset, tmp_path, [point]).any()


def boxes_sheet(make: Make, folder: Path, boxes: list[list[float]]) -> np.ndarray:
    """Return where a sheet of one sample, 8×12 shown at 96×144, is yellow; without margins."""
    columns = {"label": np.zeros(1, np.int64), "faces": np.array([boxes], np.float32)}
    make(rows=(1,), shape=(8, 12, 3), columns=columns, boxes=("faces",))
    memload.preview(folder / "made.bin", folder / "grid.png", tile=144)
    (tile,) = tiles(folder / "grid.png", 144, 96)
    return (tile == (255, 255, 0)).all(2)


def frame(left: int, top: int, right: int, bottom: int) -> np.ndarray:
    """Return the outermost pixels of these columns and rows of a tile."""
    expected = np.zeros((96, 144), bool)
    expected[top:bottom, left:right] = True
    expected[top + 1 : bottom - 1, left + 1 : right - 1] = False
    return expected


def test_boxes_are_drawn_along_their_edges(make_dataset: Make, tmp_path: Path) -> None:
    # A pixel of the picture has 12 pixels of the sheet. The whole picture is (0, 0, 12, 8).
    yellow = boxes_sheet(make_dataset, tmp_path, [[0, 0, 12, 8], [1, 2, 3, 4.5], [np.nan] * 4])
    np.testing.assert_array_equal(yellow, frame(0, 0, 144, 96) | frame(12, 24, 36, 54))


def test_boxes_are_clipped_and_those_outside_are_not_drawn(
    make_dataset: Make, tmp_path: Path
) -> None:
    outside = [[13, 1, 20, 3], [-5, -5, -1, -1], [4, 4, 2, 6], [3, 3, 3, 5], [np.nan, 1, 2, 3]]
    yellow = boxes_sheet(make_dataset, tmp_path, [*outside, [-np.inf, 4, 1e30, 9]])
    np.testing.assert_array_equal(yellow, frame(0, 48, 144, 96))


def test_boxes_have_their_labels(make_dataset: Make) -> None:
    boxes = np.full((5, 2, 4), np.nan, np.float32)
    boxes[:, 0] = 0, 0, 6, 4

    def shown(**columns: np.ndarray) -> np.ndarray:
        columns = {"label": np.zeros(5, np.int64), "boxes": boxes, **columns}
        index = make_dataset(columns=columns, boxes=("boxes",))
        return np.asarray(memload.preview(index.path, indices=[0], tile=96).image)

    plain = shown()
    ones, sevens = shown(labels=np.full((5, 2), 1)), shown(labels=np.full((5, 2), 7))
    assert (ones != plain).any()
    assert (ones != sevens).any()
    np.testing.assert_array_equal(shown(labels=np.full((5, 3), 1)), plain)  # not of the boxes


@pytest.fixture
def masked(make_dataset: Make, add_array: Add) -> Make:
    """A function that makes a data set of black pictures (4, 6), each with a mask."""

    def make(ids: np.ndarray, **facts: Any) -> Index:
        index = make_dataset(rows=(len(ids),), shape=(4, 6, 3))
        pixels = np.zeros((len(ids), 4, 6, 3), np.uint8)
        header = npy_header("|u1", pixels.shape)
        index.path.with_suffix(".bin").write_bytes(header + pixels.tobytes())
        crc32 = np.full(len(ids), zlib.crc32(pixels[0].tobytes()), np.uint32)
        index = replace(index, crc32={"image": crc32})
        return add_array(index, "mask", ids, "mask", **facts)

    return make


def sheet_of(index: Index, tile: int, **options: Any) -> np.ndarray:
    return np.asarray(memload.preview(index.path, tile=tile, **options).image)


@pytest.mark.parametrize("dtype", ["|u1", "<u2"])
def test_a_mask_covers_half_of_the_picture_with_a_color_for_each_id(
    dtype: str, masked: Make
) -> None:
    ids = np.zeros((2, 4, 6), dtype)
    ids[1, 1, :3], ids[1, 2, 3:], ids[1, 3] = 1, 2, 255
    tile = sheet_of(masked(ids), 12, indices=[1])[GAP : GAP + 8, GAP : GAP + 12]
    colors = tile[::2, ::2]
    np.testing.assert_array_equal(colors.repeat(2, 0).repeat(2, 1), tile)
    assert (colors[ids[1] == 0] == 0).all()  # the background
    assert (colors[ids[1] == 255] == 0).all()  # the fill
    one, two = colors[1, 0], colors[2, 3]
    assert (colors[1, :3] == one).all()
    assert (colors[2, 3:] == two).all()
    assert 0 < one.max() <= 128
    assert np.abs(one.astype(int) - two).max() > 40


def test_ids_near_each_other_and_in_round_steps_have_different_colors(masked: Make) -> None:
    for step in (1, 10, 256, 1000, 2500):
        ids = (step * np.arange(1, 13, dtype="<u2")).reshape(1, 2, 6).repeat(2, 1)
        tile = sheet_of(masked(ids), 12)[GAP : GAP + 8, GAP : GAP + 12]
        assert len({tuple(color) for color in tile.reshape(-1, 3).tolist()}) == 12, step


def test_the_fill_is_that_of_the_build(masked: Make) -> None:
    ids = np.full((1, 4, 6), 7, np.uint8)
    ids[0, 0] = 255
    index = masked(ids, build={"settings": {"mask_fill": 7}})
    tile = sheet_of(index, 12)[GAP : GAP + 8, GAP : GAP + 12]
    assert (tile[2:] == 0).all()
    assert (tile[:2].max(2) > 0).all()


def test_a_large_mask_is_shown_by_its_nearest_pixels(masked: Make) -> None:
    ids = np.random.default_rng(0).integers(1, 4, (1, 36, 54), np.uint8)
    index = masked(ids)  # not of the size of its picture, as other programs may write
    tile = sheet_of(index, 18)[GAP : GAP + 12, GAP : GAP + 18]
    expected = ids[0, 1::3, 1::3]
    colors = [{*map(tuple, tile[expected == number].tolist())} for number in (1, 2, 3)]
    assert [len(found) for found in colors] == [1, 1, 1]
    assert len(set.union(*colors)) == 3


def test_masks_in_rows_of_their_own_are_shown_with_their_samples(masked: Make) -> None:
    ids = np.arange(1, 4, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(6, 2)
    straight = sheet_of(masked(ids), 12, indices=[0, 1, 2])
    rows = {"mask": np.array([2, 1, 0])}
    turned = sheet_of(masked(ids[::-1].copy(), other_rows=rows), 12, indices=[0, 1, 2])
    np.testing.assert_array_equal(straight, turned)


def test_of_two_masks_the_first_is_shown_or_the_one_named(masked: Make, add_array: Add) -> None:
    left, right = np.zeros((2, 1, 4, 6), np.uint8)
    left[..., :3], right[..., 3:] = 1, 1
    alone = sheet_of(masked(left), 12)
    index = add_array(masked(left), "other", right, "mask")
    np.testing.assert_array_equal(sheet_of(index, 12, mask="mask"), alone)
    np.testing.assert_array_equal(sheet_of(index, 12), alone)
    tile = sheet_of(index, 12, mask="other")[GAP : GAP + 8, GAP : GAP + 12]
    assert not tile[:, :6].any()
    assert (tile[:, 6:].max(2) > 0).all()
    assert memload.preview(index.path, mask="other", tile=12).masks == ["other", "mask"]
    with pytest.raises(ValueError, match=r"no mask 'depth' in .*: the masks are mask, other"):
        memload.preview(index.path, mask="depth")


def test_a_mask_of_many_ids_is_shown_in_levels_of_gray(masked: Make) -> None:
    ids = np.zeros((4, 4, 6), np.uint16)
    ids.flat[: 96 - 10] = np.arange(1000, 1000 + 96 - 10)
    sheet = sheet_of(masked(ids, build={"settings": {"mask_fill": 0}}), 6, indices=[0, 1, 2, 3])
    tiles = [
        sheet[y : y + 4, x : x + 6]
        for y in range(GAP, len(sheet) - LINE - GAP, 4 + LINE + GAP)
        for x in range(GAP, sheet.shape[1] - GAP, 6 + GAP)
    ]
    levels = np.stack(tiles).reshape(-1, 3).astype(int)[: 96 - 10]
    assert (levels == levels[:, :1]).all()
    assert (np.diff(levels[:, 0]) >= 0).all()
    assert (levels[0, 0], levels[-1, 0]) == (0, 127)


def test_a_line_says_which_color_is_which_id(masked: Make) -> None:
    ids = np.zeros((1, 4, 6), np.uint8)
    ids[..., :3], ids[..., 3] = 5, 255
    sheet = sheet_of(masked(ids), 120)
    shown = sheet[GAP + 2, GAP + 2].astype(int)
    legend = sheet[-LINE:].astype(int)
    assert (np.abs(legend - 2 * shown).max(2) <= 1).sum() == 10 * 10  # a square in the full color
    colored = legend.max(2) - legend.min(2) > 60
    assert colored.sum() == 10 * 10  # the fill and the background have none
    many = np.arange(24, dtype=np.uint8).reshape(1, 4, 6)
    assert sheet_of(masked(many), 120).shape == sheet.shape


def test_a_data_set_of_masks_alone_is_shown_in_their_colors(
    make_dataset: Make, tmp_path: Path
) -> None:
    for number in range(3):
        ids = np.zeros((40, 60), np.uint8)
        ids[10:30, 20:40] = number
        Image.fromarray(ids).save(tmp_path / f"{number}.png")
    memload.build(
        tmp_path, tmp_path / "masks.bin", mode="L", interpolation="nearest", size=20, num_workers=0
    )
    index = memload.Index.open(tmp_path / "masks.bin")  # as an earlier version built them
    settings = {**index.build["settings"], "mode": "mask"}
    replace(index, build={**index.build, "settings": settings}).write(index.path)
    sheet = np.asarray(memload.preview(tmp_path / "masks.bin", indices=[1, 2], tile=20).image)
    one, two = sheet[GAP + 10, [GAP + 10, 20 + 2 * GAP + 10]]
    assert one.max() > 100
    assert two.max() > 60
    assert (one != two).any()
    wrong = make_dataset(build={"settings": {"mode": "mask"}})  # with three channels
    assert memload.preview(wrong.path, tile=12) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("build", [{"settings": {"mask_fill": "x"}}, {}])
def test_a_preview_does_not_rely_on_what_the_build_noted(
    build: dict[str, Any], masked: Make
) -> None:
    ids = np.full((1, 4, 6), 255, np.uint8)
    assert (sheet_of(masked(ids, build=build), 12)[GAP : GAP + 8, GAP + 1] == 0).all()


def test_captions_name_the_class_the_number_or_the_file(make_dataset: Make, tmp_path: Path) -> None:
    def caption(**facts: Any) -> bytes:
        index = make_dataset(rows=(1,), **facts)
        memload.preview(index.path, tmp_path / "grid.png", tile=144)
        with Image.open(tmp_path / "grid.png") as sheet:
            drawn = sheet.crop((GAP, GAP + 96, GAP + 144, GAP + 96 + LINE))
        assert np.asarray(drawn).min() < 100
        return drawn.tobytes()

    one = caption(classes=("a class",))
    other = caption(classes=("class two",))
    number = caption(classes=None)
    named = caption(classes=None, columns={})
    assert len({one, other, number, named}) == 4


@pytest.mark.parametrize("name", ["two\nlines", "\udcff", "日本語", "zoë", "", "long " * 100, "\0"])
def test_any_name_can_be_a_caption(name: str, make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(classes=(name, name + "2", name + "3"))
    assert memload.preview(index.path, tmp_path / "grid.png", tile=60) == [0, 1, 2, 3, 4]


def test_a_preview_may_be_of_one_label_without_a_name(make_dataset: Make) -> None:
    index = make_dataset(classes=None)
    assert memload.preview(index.path, class_name="1") == [1, 4]
    with pytest.raises(ValueError, match="no sample"):
        memload.preview(index.path, class_name="7")


@pytest.mark.parametrize("position", [5, -6, 10**30])
def test_an_index_out_of_range_is_an_error(
    position: int, make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(IndexError, match=f"index {position} is out of range for 5 samples"):
        memload.preview(make_dataset().path, tmp_path / "grid.png", indices=[0, position])
    assert not (tmp_path / "grid.png").exists()


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (("ant", "bee", "cat"), "There is no class 'dog': the classes are ant, bee, cat$"),
        (tuple(f"c{number}" for number in range(1_020)), r"c18, c19, …$"),
        (None, "There is no class 'dog': this data set has no classes"),
    ],
    ids=["few", "many", "none"],
)
def test_an_unknown_class_is_an_error_that_names_the_known_ones(
    classes: tuple[str, ...] | None, message: str, make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        memload.preview(make_dataset(classes=classes).path, tmp_path / "grid.png", class_name="dog")


def test_a_preview_of_no_samples_is_an_error(make_dataset: Make, tmp_path: Path) -> None:
    index = make_dataset(columns={"label": np.zeros(5, np.int64)})
    with pytest.raises(ValueError, match="no sample to show"):
        memload.preview(index.path, tmp_path / "grid.png", class_name="cat")
    with pytest.raises(MissingError):
        memload.preview(tmp_path / "none.bin", tmp_path / "grid.png")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("grid", ValueError, r"grid'.*Pillow cannot write.*grid\.png$"),
        ("grid.psd", ValueError, r"grid\.psd'.*Pillow cannot write.*grid\.png$"),
        ("folder.png", FormatError, r"folder\.png cannot be written: .*Check its"),
        ("none/grid.png", FormatError, r"none/grid\.png cannot be written: .*Check its"),
    ],
)
def test_an_output_that_cannot_be_written_is_an_error(
    name: str, error: type[Exception], message: str, make_dataset: Make, tmp_path: Path
) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(error, match=message) as caught:
        memload.preview(make_dataset().path, tmp_path / name)
    assert getattr(caught.value, "path", str(tmp_path / name)) == str(tmp_path / name)


def test_a_preview_that_would_fill_the_memory_is_an_error(
    make_dataset: Make, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"5 tiles of 9000×6000.* At most 134,217,728 pixels"):
        memload.preview(make_dataset().path, tmp_path / "grid.png", tile=9000)
    assert not (tmp_path / "grid.png").exists()


@pytest.mark.parametrize("shape", [(100_000, 1, 3), (1, 100_000, 3)])
def test_a_preview_of_strips_is_no_larger_than_one_of_pictures(
    shape: tuple[int, int, int], make_dataset: Make, tmp_path: Path
) -> None:
    make_dataset(shape=shape)
    memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", tile=32)
    with Image.open(tmp_path / "grid.png") as sheet:
        assert max(sheet.size) < 3000
