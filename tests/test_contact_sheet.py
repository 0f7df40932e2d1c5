"""Contact sheets, from Python. tests/test_cli.py tests the command."""

import io
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import memload
from memload.storage.format import npy_header
from memload.storage.index import Index

GAP, LINE = 4, 14


def sheet_of(index, tile, **options):
    return np.asarray(memload.preview(index.path, tile=tile, **options).image)


def tiles(sheet, width, height):
    """Return the tiles of a contact sheet, row by row, without those left white."""
    assert (sheet.shape[1] - GAP) % (width + GAP) == 0
    assert (sheet.shape[0] - GAP) % (height + LINE + GAP) == 0
    cells = [
        sheet[y : y + height, x : x + width]
        for y in range(GAP, len(sheet) - GAP, height + LINE + GAP)
        for x in range(GAP, sheet.shape[1] - GAP, width + GAP)
    ]
    return [cell for cell in cells if not (cell == 255).all()]


@pytest.mark.parametrize("indices", [[0], [4, 2, 2], [-1, 0], [3] * 30])
def test_a_preview_shows_the_samples_asked_for_in_their_order(make_dataset, tmp_path, indices):
    make_dataset(rows=(5, 4), shape=(8, 12, 3), row=np.arange(9)[::-1].copy())
    parts = [np.load(path) for path in sorted(tmp_path.glob("*.bin"))]
    pixels = np.concatenate(parts)[::-1]
    shown = memload.preview(tmp_path / "made.bin", tmp_path / "grid.png", indices=indices, tile=12)
    assert shown == [index % 9 for index in indices]
    with Image.open(tmp_path / "grid.png") as file:
        found = tiles(np.asarray(file), 12, 8)
    np.testing.assert_array_equal(found, pixels[shown])


def test_random_samples_follow_from_the_seed_and_the_class(make_dataset, tmp_path):
    path = make_dataset(rows=(50,)).path

    def chosen(name, **options):
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


def test_a_preview_may_be_of_one_label_without_a_name(make_dataset):
    assert memload.preview(make_dataset(classes=None).path, class_name="1") == [1, 4]


def test_a_notebook_shows_a_preview_without_a_file(make_dataset):
    shown = memload.preview(make_dataset().path, indices=[3, 1], tile=12)
    with Image.open(io.BytesIO(shown._repr_png_())) as image:
        assert np.array_equal(np.asarray(image), np.asarray(shown.image))


@pytest.mark.parametrize(
    ("descr", "channels"), [("|u1", 1), ("<u2", 3), ("<i2", 1), ("<f2", 2), ("<f4", 4)]
)
def test_other_types_and_channels_are_shown_from_their_least_to_their_greatest_value(
    make_dataset, tmp_path, descr, channels
):
    index = make_dataset(shape=(8, 12, channels), descr=descr)
    (tile,) = tiles(sheet_of(index, 12, indices=[1]), 12, 8)
    values = np.load(tmp_path / "made.bin")[1].astype(float)
    if descr != "|u1":
        values = (values - values.min()) / (values.max() - values.min()) * 255
    expected = values[:, :, :3] if channels > 2 else values[:, :, :1].repeat(3, 2)
    np.testing.assert_allclose(tile, expected, atol=1)


def test_values_without_end_are_shown(make_dataset, tmp_path):
    index = make_dataset(shape=(8, 12, 1), descr="<f4")
    pixels = np.load(tmp_path / "made.bin")
    pixels[1], pixels[2, 0], pixels[2, 1], pixels[2, 2] = np.nan, np.inf, -np.inf, 3e38
    header = (tmp_path / "made.bin").read_bytes()[:4096]
    (tmp_path / "made.bin").write_bytes(header + pixels.tobytes())
    crc32 = np.array([zlib.crc32(row.tobytes()) for row in pixels], np.uint32)
    Index(**{**vars(index), "crc32": {"image": crc32}}).write(index.path)
    assert memload.preview(index.path, indices=[1, 2], tile=12) == [1, 2]


@pytest.fixture
def drawn_on(make_dataset):
    """A function that draws one sample, 8×12 shown at 96×144, and returns where it has a color.

    A pixel of the picture has 12 pixels of the tile.
    """

    def draw(color, columns, **kind):
        facts = {"columns": columns, "classes": None, **kind}
        index = make_dataset(rows=(1,), shape=(8, 12, 3), **facts)
        (tile,) = tiles(sheet_of(index, 144), 144, 96)
        return (tile == color).all(2)

    return draw


def test_points_are_drawn_where_they_lie_and_not_outside(drawn_on):
    inside = [[0, 0], [11, 7], [5.5, 2]]
    outside = [[-3, 2], [3, 9], [np.nan, 1], [np.inf, 1], [1e300, 1e300], [2.0**31, 1]]
    columns = {"eyes": np.array([[*inside, *outside]], np.float64)}
    red = drawn_on((255, 0, 0), columns, points=("eyes",))
    assert red[6, 6]
    assert red[90, 138]
    assert red[30, 72]
    assert 3 * 4 <= red.sum() <= 3 * 25


def test_boxes_are_drawn_along_their_edges_clipped_and_not_outside(drawn_on):
    def frame(left, top, right, bottom):
        expected = np.zeros((96, 144), bool)
        expected[top:bottom, left:right] = True
        expected[top + 1 : bottom - 1, left + 1 : right - 1] = False
        return expected

    outside = [[13, 1, 20, 3], [-5, -5, -1, -1], [4, 4, 2, 6], [3, 3, 3, 5], [np.nan, 1, 2, 3]]
    inside = [[0, 0, 12, 8], [1, 2, 3, 4.5], [np.nan] * 4, [-np.inf, 4, 1e30, 9]]
    columns = {"faces": np.array([[*outside, *inside]], np.float32)}
    yellow = drawn_on((255, 255, 0), columns, boxes=("faces",))
    expected = frame(0, 0, 144, 96) | frame(12, 24, 36, 54) | frame(0, 48, 144, 96)
    np.testing.assert_array_equal(yellow, expected)


@pytest.fixture
def masked(make_dataset, add_array):
    """A function that makes a data set of black pictures (8, 12), each with a mask."""

    def make(ids, **facts):
        pixels = np.zeros((len(ids), 8, 12, 3), np.uint8)
        index = make_dataset(rows=(len(ids),), shape=pixels.shape[1:])
        header = npy_header("|u1", pixels.shape)
        index.path.with_suffix(".bin").write_bytes(header + pixels.tobytes())
        crc32 = np.full(len(ids), zlib.crc32(pixels[0].tobytes()), np.uint32)
        return add_array(replace(index, crc32={"image": crc32}), "mask", ids, "mask", **facts)

    return make


@pytest.mark.parametrize("dtype", ["|u1", "<u2"])
def test_a_mask_covers_half_of_the_picture_with_a_color_for_each_id(masked, dtype):
    ids = np.zeros((2, 8, 12), dtype)
    ids[1, 1, :3], ids[1, 2, 3:], ids[1, 3] = 1, 2, 255
    (tile,) = tiles(sheet_of(masked(ids), 12, indices=[1]), 12, 8)
    assert not tile[(ids[1] == 0) | (ids[1] == 255)].any()  # the background and the margins
    one, two = tile[1, 0], tile[2, 3]
    assert (tile[1, :3] == one).all()
    assert (tile[2, 3:] == two).all()
    assert 0 < one.max() <= 128
    assert np.abs(one.astype(int) - two).max() > 40


def test_ids_near_each_other_and_in_round_steps_have_different_colors(masked):
    for step in (1, 10, 256, 1000, 2500):
        ids = (step * np.arange(1, 25, dtype="<u2")).reshape(1, 2, 12).repeat(4, 1)
        (tile,) = tiles(sheet_of(masked(ids), 12), 12, 8)
        assert len({tuple(color) for color in tile.reshape(-1, 3).tolist()}) == 24, step


def test_a_mask_of_another_size_is_shown_by_its_nearest_pixels(masked):
    ids = np.random.default_rng(0).integers(1, 4, (1, 24, 36), np.uint8)
    (tile,) = tiles(sheet_of(masked(ids), 12), 12, 8)  # as other programs may write
    expected = ids[0, 1::3, 1::3]
    colors = [{*map(tuple, tile[expected == number].tolist())} for number in (1, 2, 3)]
    assert [len(found) for found in colors] == [1, 1, 1]
    assert len(set.union(*colors)) == 3


def test_masks_in_rows_of_their_own_are_shown_with_their_samples(masked):
    ids = np.arange(1, 4, dtype=np.uint8)[:, None, None].repeat(8, 1).repeat(12, 2)
    straight = sheet_of(masked(ids), 12, indices=[0, 1, 2])
    rows = {"mask": np.array([2, 1, 0])}
    turned = sheet_of(masked(ids[::-1].copy(), other_rows=rows), 12, indices=[0, 1, 2])
    np.testing.assert_array_equal(straight, turned)


def test_of_two_masks_the_first_is_shown_or_the_one_named(masked, add_array):
    left, right = np.zeros((2, 1, 8, 12), np.uint8)
    left[..., :6], right[..., 6:] = 1, 1
    alone = sheet_of(masked(left), 12)
    index = add_array(masked(left), "other", right, "mask")
    np.testing.assert_array_equal(sheet_of(index, 12, mask="mask"), alone)
    np.testing.assert_array_equal(sheet_of(index, 12), alone)
    (tile,) = tiles(sheet_of(index, 12, mask="other"), 12, 8)
    assert not tile[:, :6].any()
    assert (tile[:, 6:].max(2) > 0).all()


def test_captions_name_the_class_the_number_or_the_file(make_dataset):
    def caption(**facts):
        drawn = sheet_of(make_dataset(rows=(1,), **facts), 144)[GAP + 96 : GAP + 96 + LINE]
        assert drawn.min() < 100
        return drawn.tobytes()

    facts = ({"classes": ("a class",)}, {"classes": ("class two",)}, {"classes": None})
    assert len({*(caption(**each) for each in facts), caption(classes=None, columns={})}) == 4


@pytest.mark.parametrize("name", ["two\nlines", "\udcff", "日本語", "zoë", "", "long " * 100, "\0"])
def test_any_name_can_be_a_caption(make_dataset, name):
    index = make_dataset(classes=(name, name + "2", name + "3"))
    assert memload.preview(index.path, tile=60) == [0, 1, 2, 3, 4]


WRONG = {
    "an index": ({"indices": [0, 5]}, IndexError, "index 5 is out of bounds .* size 5"),
    "a class": ({"class_name": "dog"}, ValueError, "no value 'dog'. It has ant, bee, cat"),
    "no index": ({"indices": []}, ValueError, "no sample to show"),
    "a mask": ({"mask": "depth"}, ValueError, r"no mask 'depth' in .*made\.idx: it has none"),
    "no ending": ({"output": "grid"}, ValueError, r"grid'.*Pillow cannot write.*grid\.png$"),
    "a format": ({"output": "grid.psd"}, ValueError, r"grid\.psd'.*Pillow cannot write"),
    "a folder": ({"output": "none/grid.png"}, FileNotFoundError, r"none/grid\.png"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_told(make_dataset, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    index = make_dataset()
    options, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        memload.preview(index.path, **{"output": "grid.png", **options})
    assert {path.name for path in tmp_path.iterdir()} == {"made.bin", "made.idx"}
