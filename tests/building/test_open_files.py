"""Data sets that open their files before workers are forked: what is read does not depend on it."""

import io
import os
import signal
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import memload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")

ROWS, SIDE = 400, 16
PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, SIDE, SIDE, 3), np.uint8)


def encoded(row):
    file = io.BytesIO()
    Image.fromarray(PIXELS[row]).save(file, "PNG", compress_level=0)
    return file.getvalue()


class OpenFile:
    """A data set that holds something open. ``read(opened, row)`` returns an image."""

    def __init__(self, opened, read):
        self.opened, self.read = opened, read

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return self.read(self.opened, row), row


def raw(folder, buffering=-1):
    path = folder / "pixels.raw"
    path.write_bytes(PIXELS.tobytes())
    row_bytes = PIXELS[0].nbytes

    def read(file, row):
        file.seek(row * row_bytes)
        return np.frombuffer(file.read(row_bytes), np.uint8).reshape(SIDE, SIDE, 3)

    return OpenFile(path.open("rb", buffering=buffering), read)


def deleted(folder):
    dataset = raw(folder)
    (folder / "pixels.raw").unlink()
    return dataset


def tar(folder):
    with tarfile.open(folder / "images.tar", "w") as archive:
        for row in range(ROWS):
            info = tarfile.TarInfo(f"{row}.png")
            info.size = len(encoded(row))
            archive.addfile(info, io.BytesIO(encoded(row)))
    opened = tarfile.open(folder / "images.tar")  # noqa: SIM115
    opened.getmembers()
    return OpenFile(opened, lambda opened, row: opened.extractfile(f"{row}.png").read())


def zip_archive(folder):
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for row in range(ROWS):
            archive.writestr(f"{row}.png", encoded(row))
    opened = zipfile.ZipFile(folder / "images.zip")
    return OpenFile(opened, lambda opened, row: opened.read(f"{row}.png"))


def lazy_images(folder):
    for row in range(ROWS):
        (folder / f"{row}.png").write_bytes(encoded(row))
    images = [Image.open(folder / f"{row}.png") for row in range(ROWS)]
    dataset = OpenFile(images, lambda images, row: images[row])
    dataset.close = lambda: [image.close() for image in images]  # type: ignore[attr-defined]
    return dataset


KINDS = [raw, deleted, tar, zip_archive, lazy_images]


def close(dataset):
    getattr(dataset, "close", getattr(dataset.opened, "close", None))()  # type: ignore[misc]


def check(dataset, output, **options):
    """Build a data set, and compare all of its pixels."""
    report = memload.build(dataset, output, size=SIDE, overwrite=True, **options)
    assert report.rejected == 0
    assert np.array_equal(np.load(output), PIXELS)
    assert memload.MemmapDataset(output).columns["label"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_the_same_as_this_process(kind, tmp_path):
    dataset = kind(tmp_path)
    check(dataset, tmp_path / "out.bin", num_workers=2)
    close(dataset)


def test_the_files_of_this_process_stay_where_they_are(tmp_path):
    dataset = raw(tmp_path)
    dataset.opened.seek(1234)
    check(dataset, tmp_path / "out.bin", num_workers=2)
    assert dataset.opened.tell() == 1234
    assert os.lseek(dataset.opened.fileno(), 0, os.SEEK_CUR) == 1234
    close(dataset)


@pytest.mark.parametrize("kind", [raw, tar, lazy_images])
def test_a_killed_worker_costs_no_sample_of_an_open_file(kind, tmp_path):
    dataset, mark = kind(tmp_path), tmp_path / "killed"
    read, parent = dataset.read, os.getpid()

    def die_once(opened, row):
        image = read(opened, row)
        if row == 333 and os.getpid() != parent and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return image

    dataset.read = die_once
    check(dataset, tmp_path / "out.bin", num_workers=2)
    assert mark.exists()
    close(dataset)


def test_arrays_and_their_first_samples_are_read_from_an_open_file(tmp_path):
    dataset = raw(tmp_path)
    check(dataset, tmp_path / "out.bin", num_workers=2, mode="array")
    close(dataset)


def test_a_file_that_cannot_be_opened_again_is_named(tmp_path, monkeypatch):
    dataset, open_file = raw(tmp_path), os.open

    def refuse(path, *arguments, **options):
        if str(path).startswith("/proc/self/fd/") and Path(path).samefile(dataset.opened.name):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(memload.BuildError, match=r"pixels\.raw is open .* cannot open it again"):
        memload.build(dataset, tmp_path / "out.bin", size=SIDE, num_workers=2)
    assert not list(tmp_path.glob("out*"))
    close(dataset)
