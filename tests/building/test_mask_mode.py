"""Masks that are built by themselves, with mode "mask"."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import memload
from memload.building.resizing import Placement, place_mask
from memload.storage.index import Index
from tests.building.test_resuming import Interrupted, Stop, files


def ids(number: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 21, (8, 9 + number)).astype(dtype)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of six masks, whose EXIF orientation is to be ignored."""
    folder = tmp_path / "masks"
    folder.mkdir()
    for number in range(6):
        exif = Image.Exif()
        exif[0x0112] = 1 + number
        Image.fromarray(ids(number)).save(folder / f"{number}.png", exif=exif)
    return folder


def build(source: Any, place: Path, **options: Any) -> memload.BuildReport:
    defaults = {"mode": "mask", "size": 6, "num_workers": 0, "max_rejects": "50%"}
    return memload.build(source, place / "out.bin", **defaults | options)


def stored(place: Path) -> np.ndarray:
    """The masks by sample ``(n, H, W)``."""
    index = Index.open(place / "out.bin")
    rows = np.concatenate([np.load(place / shard.file) for shard in index.image.shards])
    return rows[index.row][..., 0]


class Samples:
    """A data set whose images are the masks given."""

    def __init__(self, *masks: Any) -> None:
        self.masks = masks

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, index: int) -> Any:
        return self.masks[index]


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ids_are_kept_with_nearest_neighbor(
    folder: Path, tmp_path: Path, fit: Any, num_workers: int
) -> None:
    build(folder, tmp_path, fit=fit, mask_fill=77, num_workers=num_workers)
    for number, found in enumerate(stored(tmp_path)):
        placement = Placement.of((9 + number, 8), (6, 6), fit)
        assert np.array_equal(found, place_mask(ids(number), 1, placement, 77))
    assert (77 in stored(tmp_path)) == (fit == "pad")


def test_only_what_acts_is_recorded(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path, fit="pad", mask_fill=0)
    assert Index.open(tmp_path / "out.bin").build["settings"] == {
        "mode": "mask",
        "size": [6, 6],
        "fit": "pad",
        "mask_fill": 0,
        "max_pixels": 89_478_485,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"background": "red"}, "background: 'red' has no effect in mode 'mask'"),
        ({"fast": True}, "fast: True has no effect in mode 'mask'"),
        ({"strict": True}, "strict: True has no effect"),
        ({"exif": False}, "exif: False has no effect"),
        ({"decoder": "jpeg4py"}, "decoder: 'jpeg4py' has no effect"),
        ({"interpolation": "bicubic"}, "interpolation: 'bicubic' has no effect"),
        ({"fill": "white"}, "fill: 'white' has no effect in mode 'mask', .* Give mask_fill inst"),
        ({"missing_masks": "fill"}, "missing_masks: 'fill' has no effect, since no masks are"),
        ({"fit": "stretch"}, "fit must be one of crop, squash, pad"),
        ({"max_pixels": 0}, "max_pixels must be 1 or more"),
        ({"size": 70_000}, "size must be a height and a width"),
        ({"mask_fill": 256}, "mask_fill: 256 does not fit the masks, whose ids go up to 255"),
    ],
)
def test_options_without_effect_and_wrong_ones_are_errors(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(folder, tmp_path, **options)
    assert list(tmp_path.iterdir()) == [folder]


def test_the_first_usable_mask_decides_the_type(folder: Path, tmp_path: Path) -> None:
    Image.new("RGB", (9, 8)).save(folder / "0.png")
    Image.fromarray(ids(1, np.uint16) + 60_000).save(folder / "1.png")
    report = build(folder, tmp_path, mask_fill=65_535, fit="pad")
    assert (report.dtype, report.rejected) == ("uint16", 1)
    assert stored(tmp_path)[0].max() == 65_535
    assert {*stored(tmp_path)[1].ravel()} <= {*range(21), 65_535}
    statistics = memload.info(tmp_path / "out.bin")["statistics"]
    index = Index.open(tmp_path / "out.bin")
    assert statistics["mean"][0] == pytest.approx(stored(tmp_path).mean() / 65_535)
    assert memload.verify(index.path).ok


def test_masks_with_larger_ids_than_the_first_are_rejected(folder: Path, tmp_path: Path) -> None:
    Image.fromarray(ids(3, np.uint16) + 300).save(folder / "3.png")
    build(folder, tmp_path)
    reason = (tmp_path / "out.rejects.csv").read_text()
    assert "but all masks are stored with 8 bits" in reason
    assert "Save the first one with 16 bits (uint16)" in reason


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("uint16", "uint16"),
        *((name, "uint8") for name in ("int64", "uint64", "int32", "uint32", "int16", "uint8")),
    ],
)
def test_integers_that_are_no_uint16_are_as_small_as_their_ids(
    tmp_path: Path, dtype: str, expected: str
) -> None:
    masks = [ids(number, dtype) for number in range(3)]
    assert build(Samples(*masks), tmp_path).dtype == expected
    if dtype != "uint8":
        masks[2] = masks[2] + masks[2].dtype.type(250)
        assert build(Samples(*masks), tmp_path, overwrite=True).dtype == "uint16"


def test_tensors_are_as_small_as_their_ids(tmp_path: Path) -> None:
    masks = [torch.from_numpy(ids(number, np.int64)) for number in range(3)]
    assert build(Samples(*masks), tmp_path).dtype == "uint8"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_pictures_of_more_than_8_bits_are_uint16(tmp_path: Path, dtype: type) -> None:
    pictures = [Image.fromarray(ids(number, dtype)) for number in range(3)]
    for number, image in enumerate(pictures):
        image.save(tmp_path / f"{number}.tif")
    assert build(tmp_path, tmp_path).dtype == "uint16"
    assert build(Samples(*pictures), tmp_path, overwrite=True).dtype == "uint16"


def test_points_and_boxes_move_with_masks(tmp_path: Path) -> None:
    boxes, points = np.array([[0, 0, 8, 4]], np.float32), np.array([[1.5, 1.5]])
    samples = [{"image": np.ones((8, 8), np.uint8), "boxes": boxes, "points": points}] * 2
    build(samples, tmp_path, size=4, points=["points"], boxes={"boxes": 1})
    index = Index.open(tmp_path / "out.bin")
    assert index.columns["boxes"][0].tolist() == [[0, 0, 4, 2]]
    assert index.columns["points"][0].tolist() == [[0.5, 0.5]]


def test_small_masks_are_noted(folder: Path, tmp_path: Path) -> None:
    notes = build(folder, tmp_path, size=16).notes
    assert any(note.startswith("6 of 6 pictures were smaller than 16×16") for note in notes)


def test_an_unfinished_build_goes_on(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "expected").mkdir()
    build(folder, tmp_path / "expected")
    with pytest.raises(Stop):
        build(Interrupted(folder), tmp_path)
    assert build(folder, tmp_path).converted < 6
    assert files(tmp_path) == files(tmp_path / "expected")


def test_masks_of_masks_have_the_same_fill(tmp_path: Path) -> None:
    samples = [{"image": ids(0), "other": ids(0) + 1}] * 2
    report = build(samples, tmp_path, masks=["other"], fit="pad", mask_fill=99)
    assert [array.name for array in report.arrays] == ["other"]
    other = np.load(tmp_path / "out.other.bin")
    assert np.array_equal(other == 99, stored(tmp_path) == 99)
    assert np.array_equal(other[other != 99], stored(tmp_path)[other != 99] + 1)


def test_a_data_set_of_masks_stays_one(folder: Path, tmp_path: Path) -> None:
    build(folder, tmp_path)
    memload.build(tmp_path / "out.bin", tmp_path / "small.bin", size=3, num_workers=0)
    small = Index.open(tmp_path / "small.bin")
    assert small.setting("mode") == "mask"
    pixels = np.load(tmp_path / "small.bin")[small.row][..., 0]
    assert np.array_equal(pixels, stored(tmp_path)[:, 1::2, 1::2])
    Image.fromarray(ids(9)).save(folder / "9.png")
    memload.build(folder, tmp_path / "more.bin", new_to=tmp_path / "out.bin", num_workers=0)
    assert Index.open(tmp_path / "more.bin").setting("mode") == "mask"
