"""What a build says about its pictures: enlarged ones, and transparent ones."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import memload


def build(source: object, folder: Path, **options: object) -> memload.BuildReport:
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
def test_enlarged_pictures_are_counted(
    fit: str, size: int, enlarged: int, folder: Path, tmp_path: Path
) -> None:
    report = build(folder, tmp_path, size=size, fit=fit, num_workers=0)
    notes = [note for note in report.notes if "enlarged" in note]
    assert [note.split(" pictures")[0] for note in notes] == [f"{enlarged} of 12"] * bool(enlarged)


@pytest.fixture
def transparent(tmp_path: Path) -> Path:
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


def test_transparency_is_noted_once(transparent: Path, tmp_path: Path) -> None:
    report = build(transparent, tmp_path, size=16, background="red", num_workers=2)
    (note,) = (note for note in report.notes if "transparent" in note)
    assert note == "4 of 8 pictures have transparent pixels, which are red now"


def test_notes_are_the_same_after_an_interruption(
    transparent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    expected = build(transparent, tmp_path / "whole", size=64, num_workers=0).notes
    with monkeypatch.context() as patch:
        patch.setattr(memload.ImageFolder, "__getitem__", _interrupted_at_five)
        with pytest.raises(KeyboardInterrupt):
            build(transparent, tmp_path, size=64, num_workers=0)
    report = build(transparent, tmp_path, size=64, num_workers=0)
    assert report.converted < 8
    assert report.notes == expected
    assert len([note for note in expected if "8 of 8" in note or "4 of 8" in note]) == 2


_getitem = memload.ImageFolder.__getitem__


def _interrupted_at_five(source: memload.ImageFolder, row: int) -> object:
    if row == 5:
        raise KeyboardInterrupt
    return _getitem(source, row)
