"""Data sets that open their files before workers are forked: what is read does not depend on it."""

import io
import logging
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import memload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork")

ROWS, SIDE = 400, 16
PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, SIDE, SIDE, 3), np.uint8)


def encoded(row: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS[row]).save(file, "PNG", compress_level=0)
    return file.getvalue()


class OpenFile:
    """A data set that holds something open. ``read(opened, row)`` returns an image."""

    def __init__(self, opened: Any, read: Callable[[Any, int], Any]) -> None:
        self.opened, self.read = opened, read

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.read(self.opened, row), row


def raw(folder: Path, buffering: int = -1) -> OpenFile:
    path = folder / "pixels.raw"
    path.write_bytes(PIXELS.tobytes())
    row_bytes = PIXELS[0].nbytes

    def read(file: Any, row: int) -> np.ndarray:
        file.seek(row * row_bytes)
        return np.frombuffer(file.read(row_bytes), np.uint8).reshape(SIDE, SIDE, 3)

    return OpenFile(path.open("rb", buffering=buffering), read)


def unbuffered(folder: Path) -> OpenFile:
    return raw(folder, buffering=0)


def deleted(folder: Path) -> OpenFile:
    dataset = raw(folder)
    (folder / "pixels.raw").unlink()
    return dataset


def deleted_in_ram(folder: Path) -> OpenFile:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("this system has no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder_in_ram:
        return deleted(Path(folder_in_ram))


def tar(folder: Path) -> OpenFile:
    with tarfile.open(folder / "images.tar", "w") as archive:
        for row in range(ROWS):
            info = tarfile.TarInfo(f"{row}.png")
            info.size = len(encoded(row))
            archive.addfile(info, io.BytesIO(encoded(row)))
    opened = tarfile.open(folder / "images.tar")  # noqa: SIM115
    opened.getmembers()
    return OpenFile(opened, lambda opened, row: opened.extractfile(f"{row}.png").read())


def zip_archive(folder: Path) -> OpenFile:
    with zipfile.ZipFile(folder / "images.zip", "w") as archive:
        for row in range(ROWS):
            archive.writestr(f"{row}.png", encoded(row))
    opened = zipfile.ZipFile(folder / "images.zip")
    return OpenFile(opened, lambda opened, row: opened.read(f"{row}.png"))


def hdf5(folder: Path) -> OpenFile:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "images.h5", "w") as file:
        file.create_dataset("x", data=PIXELS, chunks=(7, SIDE, SIDE, 3), compression="gzip")
    return OpenFile(h5py.File(folder / "images.h5", "r"), lambda file, row: file["x"][row])


def lazy_images(folder: Path) -> OpenFile:
    for row in range(ROWS):
        (folder / f"{row}.png").write_bytes(encoded(row))
    images = [Image.open(folder / f"{row}.png") for row in range(ROWS)]
    dataset = OpenFile(images, lambda images, row: images[row])
    dataset.close = lambda: [image.close() for image in images]  # type: ignore[attr-defined]
    return dataset


KINDS = [raw, unbuffered, deleted, deleted_in_ram, tar, zip_archive, hdf5, lazy_images]


def close(dataset: OpenFile) -> None:
    getattr(dataset, "close", getattr(dataset.opened, "close", None))()  # type: ignore[misc]


def check(dataset: OpenFile, output: Path, **options: Any) -> None:
    """Build a data set, and compare all of its pixels."""
    report = memload.build(dataset, output, size=SIDE, overwrite=True, **options)
    assert report.rejected == 0
    assert np.array_equal(np.load(output), PIXELS)
    assert memload.MemmapDataset(output).columns["label"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_the_same_as_this_process(
    kind: Callable[[Path], OpenFile], num_workers: int, tmp_path: Path
) -> None:
    dataset = kind(tmp_path)
    check(dataset, tmp_path / "out.bin", num_workers=num_workers)
    close(dataset)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_the_same_in_many_rounds(
    kind: Callable[[Path], OpenFile], num_workers: int, tmp_path: Path
) -> None:
    dataset = kind(tmp_path)
    for _ in range(3 if kind is lazy_images else 10):
        check(dataset, tmp_path / "out.bin", num_workers=num_workers)
    close(dataset)


def test_the_files_of_this_process_stay_where_they_are(tmp_path: Path) -> None:
    dataset = raw(tmp_path)
    dataset.opened.seek(1234)
    check(dataset, tmp_path / "out.bin", num_workers=2)
    assert dataset.opened.tell() == 1234
    assert os.lseek(dataset.opened.fileno(), 0, os.SEEK_CUR) == 1234
    close(dataset)


@pytest.mark.parametrize("kind", [raw, tar, lazy_images])
def test_a_killed_worker_costs_no_sample_of_an_open_file(
    kind: Callable[[Path], OpenFile], tmp_path: Path
) -> None:
    dataset, mark = kind(tmp_path), tmp_path / "killed"
    read, parent = dataset.read, os.getpid()

    def die_once(opened: Any, row: int) -> Any:
        image = read(opened, row)
        if row == 333 and os.getpid() != parent and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return image

    dataset.read = die_once
    check(dataset, tmp_path / "out.bin", num_workers=2)
    assert mark.exists()
    close(dataset)


def test_arrays_and_their_first_samples_are_read_from_an_open_file(tmp_path: Path) -> None:
    dataset = raw(tmp_path)
    check(dataset, tmp_path / "out.bin", num_workers=2, mode="array")
    close(dataset)


def test_a_subclass_of_a_folder_may_hold_an_open_file(folder: Path, tmp_path: Path) -> None:
    dataset = raw(tmp_path)

    class Folder(memload.ImageFolder):
        def __getitem__(self, row: int) -> Any:
            return super().__getitem__(row)._replace(image=dataset[row][0])

    memload.build(Folder(folder), tmp_path / "out.bin", size=SIDE, num_workers=4)
    assert np.array_equal(np.load(tmp_path / "out.bin"), PIXELS[:12])
    close(dataset)


def test_a_file_that_cannot_be_opened_again_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, open_file = raw(tmp_path), os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).startswith("/proc/self/fd/") and Path(path).samefile(dataset.opened.name):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(memload.BuildError, match=r"pixels\.raw is open .* cannot open it again"):
        memload.build(dataset, tmp_path / "out.bin", size=SIDE, num_workers=2)
    assert not list(tmp_path.glob("out*"))
    close(dataset)


def test_a_file_that_was_shared_after_all_stops_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = raw(tmp_path)
    monkeypatch.setattr("memload.building.worker.reopen_files", lambda: None)
    with pytest.raises(memload.BuildError, match=r"pixels\.raw was shared by workers"):
        memload.build(dataset, tmp_path / "out.bin", size=SIDE, num_workers=2)
    assert not list(tmp_path.glob("out*"))
    monkeypatch.undo()
    check(dataset, tmp_path / "out.bin", num_workers=2)
    close(dataset)


SCRIPT = """
import logging, sys
import numpy as np
import memload

class Chatty:
    def __len__(self):
        return 100
    def __getitem__(self, row):
        for stream in (sys.stdout, sys.stderr):
            # One write, where print() may do two, between which another worker writes.
            stream.write(f"{row}\\n")
            stream.flush()
        logging.getLogger("mine").error("sample %d", row)
        return np.full((8, 8, 3), row, np.uint8), row

if __name__ == "__main__":
    log = open(sys.argv[1], "w+")
    logging.basicConfig(stream=log, level=logging.INFO)
    report = memload.build(Chatty(), sys.argv[2], size=8, num_workers=2)
    log.write(str(report))
    assert (np.load(sys.argv[2])[:, 0, 0, 0] == np.arange(100)).all()
"""


def test_output_and_logs_that_go_to_files_raise_no_alarm(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, tmp_path / "log.txt", tmp_path / "out.bin"]
    with script.open() as stdin, (tmp_path / "printed.txt").open("w+") as printed:
        subprocess.run(command, stdin=stdin, stdout=printed, stderr=printed, check=True)
    assert {str(row) for row in range(100)} <= set((tmp_path / "printed.txt").read_text().split())


def test_a_log_of_this_process_raises_no_alarm(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("a+") as log:
        handler = logging.StreamHandler(log)
        logging.getLogger("memload").addHandler(handler)
        dataset = raw(tmp_path)
        check(dataset, tmp_path / "out.bin", num_workers=2)
        logging.getLogger("memload").removeHandler(handler)
        close(dataset)
