"""A server for pictures, tars, and the records of a source as plain values."""

import io
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


def content(image):
    """The bytes or the values of an image of a record."""
    if isinstance(image, Path):
        return image.read_bytes()
    return image if isinstance(image, bytes) else np.asarray(image).tolist()


def picture(number=0, size=(8, 6), kind="PNG"):
    """The bytes of a picture of one color."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (number % 256, 100, 50)).save(buffer, kind)
    return buffer.getvalue()


def write_tar(path, files, **options):
    with tarfile.open(path, "w", **options) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_zip(path, files, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files:
            archive.writestr(name, data)
    return path


def touch(root, *names):
    """Write pictures with these names below a folder."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return root


@pytest.fixture
def write(tmp_path):
    """A function that writes a table of lines. Its images are there."""

    def write_lines(*lines, name="table.csv", images=("a.jpg",)):
        touch(tmp_path, *images)
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write_lines
