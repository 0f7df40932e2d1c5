"""What a build says about its pictures: enlarged ones, and transparent ones."""

import numpy as np
import pytest
from PIL import Image

import memload


def build(source, folder, **options):
    return memload.build(source, folder / "out.bin", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fit", "size", "enlarged"),
    [
        ("crop", 16, 0),
        ("crop", (30, 40), 0),
        ("crop", (31, 40), 3),  # three pictures are 30 high, and one of them 40 wide
        ("crop", 256, 12),
        ("squash", (30, 41), 1),
        ("pad", (100, 40), 0),
        ("pad", (100, 41), 1),
    ],
)
def test_enlarged_pictures_are_counted(fit, size, enlarged, folder, tmp_path):
    report = build(folder, tmp_path, size=size, fit=fit, num_workers=0)
    notes = [note for note in report.notes if "enlarged" in note]
    assert [note.split(" pictures")[0] for note in notes] == [f"{enlarged} of 12"] * bool(enlarged)


@pytest.fixture
def transparent(tmp_path):
    """Four kinds of pictures with transparent pixels, and four without."""
    root = tmp_path / "images"
    root.mkdir()
    alpha = np.zeros((20, 20, 4), np.uint8)
    Image.fromarray(alpha).save(root / "alpha.png")
    Image.fromarray(alpha).save(root / "alpha.tif")
    Image.fromarray(alpha[:, :, :2], "LA").save(root / "gray.png")
    Image.fromarray(alpha[:, :, 0]).convert("P").save(root / "palette.png", transparency=0)
    Image.fromarray(alpha | 255).save(root / "opaque.png")
    Image.fromarray(alpha[:, :, 0]).convert("P").save(root / "unused.png", transparency=1)
    Image.fromarray(alpha[:, :, :3]).save(root / "plain.png")
    Image.fromarray(alpha[:, :, :3]).save(root / "plain.jpg")
    return root


def test_transparency_is_noted_once(transparent, tmp_path):
    report = build(transparent, tmp_path, size=16, background="red", num_workers=2)
    (note,) = (note for note in report.notes if "transparent" in note)
    assert note == "4 of 8 pictures have transparent pixels, which are red now"


@pytest.mark.parametrize(("foreground", "notes"), [(255, 1), (1, 0), (7, 0)])
def test_masks_of_black_and_white_are_noted(foreground, notes, folder, tmp_path):
    for path in folder.rglob("*.jpg"):
        with Image.open(path) as image:
            ids = np.zeros((image.height, image.width), np.uint8)
        ids[5:20, 10:30] = foreground
        mask = tmp_path / "masks" / path.relative_to(folder).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(ids).save(mask)
    report = build(folder, tmp_path, masks=tmp_path / "masks", size=16, num_workers=0)
    found = [note for note in report.notes if "ids 0 and 255" in note]
    assert len(found) == notes
    assert all(note.startswith("the first mask ") and "ignore_index" in note for note in found)
