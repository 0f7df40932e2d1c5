"""Rows of a data set that are stored as they are: what is known of them stays known."""

import numpy as np
import pytest
from PIL import Image

import memload
from memload.storage.index import Index

SETTINGS = {"fit": "pad", "interpolation": "bicubic", "fast": True, "background": "red"}


@pytest.fixture
def images(tmp_path):
    """Six pictures, of which the second is turned by its EXIF orientation."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(6):
        exif = Image.Exif()
        exif[274] = 6 if number == 1 else 1
        picture = Image.fromarray(rng.integers(0, 255, (20, 30, 3), np.uint8))
        picture.save(folder / f"{number}.jpg", exif=exif)
    return folder


def build(source, output, **options):
    memload.build(source, output, num_workers=0, progress=False, **options)
    return Index.open(output)


@pytest.mark.parametrize("mode", ["RGB", "L", "I;16"])
def test_a_packed_data_set_keeps_how_its_rows_were_made(images, tmp_path, mode):
    first = build(images, tmp_path / "a.bin", size=16, mode=mode, **SETTINGS)
    first.subset(np.array([5, 1, 1, 0])).write(tmp_path / "some.idx")
    packed = build(tmp_path / "some.idx", tmp_path / "packed.bin")
    assert packed.build["settings"] == first.build["settings"]
    assert packed.build["libraries"] == first.build["libraries"]
    assert packed.flags.tolist() == [0, 1, 1, 0]
    assert packed.crc32["image"].tolist() == first.crc32["image"][[5, 1, 1, 0]].tolist()
    memload.verify(tmp_path / "packed.bin")


def test_a_selection_keeps_the_flags_of_its_rows(images, tmp_path):
    first = build(images, tmp_path / "a.bin", size=16)
    memload.with_columns(first, split=[*"aabbbb"]).write(tmp_path / "b.idx")
    assert build(tmp_path / "b.idx", tmp_path / "c.bin", where={"split": "a"}).flags.tolist() == [
        0,
        1,
    ]


def test_settings_that_differ_are_not_claimed(images, tmp_path):
    build(images, tmp_path / "a.bin", size=16, **SETTINGS)
    build(images, tmp_path / "b.bin", size=16)
    memload.concat(tmp_path / "a.bin", tmp_path / "b.bin").write(tmp_path / "all.idx")
    packed = build(tmp_path / "all.idx", tmp_path / "packed.bin")
    assert not {*SETTINGS} & {*packed.build["settings"]}
    assert packed.setting("size") == [16, 16]


def test_rows_that_change_have_the_settings_and_flags_of_this_build(images, tmp_path):
    build(images, tmp_path / "a.bin", size=16, **SETTINGS)
    smaller = build(tmp_path / "a.bin", tmp_path / "b.bin", size=8)
    assert (smaller.setting("fit"), smaller.setting("size")) == ("crop", [8, 8])
    assert not smaller.flags.any()


def test_masks_of_a_packed_data_set_still_fit_its_images(images, tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    for path in images.iterdir():
        Image.fromarray(np.ones((20, 30), np.uint8)).save(masks / f"{path.stem}.png")
    first = build(images, tmp_path / "a.bin", size=16, masks=masks, missing_masks=9, **SETTINGS)
    packed = build(tmp_path / "a.bin", tmp_path / "packed.bin")
    assert packed.build["settings"] == first.build["settings"]
    plain = build(images, tmp_path / "plain.bin", size=16)
    with pytest.raises(ValueError, match="other or unknown settings"):
        memload.join(plain, mask=packed)


def test_masks_are_added_to_rows_that_stay(images, tmp_path):
    masks = tmp_path / "masks"
    masks.mkdir()
    for path in images.iterdir():
        Image.fromarray(np.ones((16, 16), np.uint8)).save(masks / f"{path.stem}.png")
    build(images, tmp_path / "a.bin", size=16, **SETTINGS)
    packed = build(tmp_path / "a.bin", tmp_path / "packed.bin", masks=masks)
    assert (packed.setting("fit"), packed.setting("mask_fill")) == ("pad", 255)
