"""What has the name of a picture and is no file costs its own sample, and is not waited for."""

import os

import pytest
from PIL import Image

import memload


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_not_a_file_costs_its_own_sample(num_workers, tmp_path, ledger):
    pictures = tmp_path / "images" / "class"
    pictures.mkdir(parents=True)
    Image.new("RGB", (30, 20)).save(pictures / "good.jpg")
    os.mkfifo(pictures / "pipe.jpg")
    links = {
        "zero.jpg": "/dev/zero",
        "terminal.jpg": "/dev/tty",
        "loop.jpg": "loop.jpg",
        "nothing.jpg": "no such file",
        "memory.jpg": "/proc/self/mem",
        "long.jpg": "x" * 255 + "/" + "x" * 300,
    }
    for name, target in links.items():
        (pictures / name).symlink_to(target)
    with (pictures / "sparse.jpg").open("wb") as file:
        file.truncate(1 << 40)
    (pictures / "folder.jpg").mkdir()
    (pictures / "folder.jpg" / "back").symlink_to(pictures)
    options = {"size": 8, "max_rejects": "100%", "progress": False}
    output = tmp_path / "out.bin"
    report = memload.build(pictures.parent, output, num_workers=num_workers, **options)
    assert report.samples == 1
    rejected = {path.removeprefix("class/"): reason for path, reason in ledger().items()}
    assert rejected.keys() == {*links, "pipe.jpg", "sparse.jpg"}
    assert "a folder, a pipe or a device" in rejected["pipe.jpg"]
    assert "a folder, a pipe or a device" in rejected["zero.jpg"]
    assert rejected["nothing.jpg"] == "a link to a file that does not exist"
    assert "symbolic links" in rejected["loop.jpg"]
