"""Pictures made to do harm, through the command: each costs its own sample, and the build ends."""

import csv
import io
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable

import pytest
from PIL import Image

import memload

GOOD = {f"{letter}-good.png": 40 * number for number, letter in enumerate("acgmsz")}
SIDE = 60_000


def encode(image, format):
    buffer = io.BytesIO()
    image.save(buffer, format)
    return buffer.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, extra=b"", pixels=None):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = zlib.compress(bytes(height * (1 + 3 * width))) if pixels is None else pixels
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def zeros(megabytes):
    """Return what zlib decompresses to so many megabytes, a thousandth as long."""
    compressor = zlib.compressobj(9)
    start = compressor.compress(b"") + compressor.flush(zlib.Z_FULL_FLUSH)
    block = compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)
    return start + block * megabytes


def jpeg(width, height):
    data = bytearray(encode(Image.new("RGB", (8, 8)), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


TOO_LARGE, TEXT = r"\(--max-pixels\)", "too large|Too much memory|MAX_TEXT"
#: Each picture, and a pattern of the reason in the ledger, or None if it is usable, however odd.
PICTURES: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "size.png": (lambda: png(SIDE, SIDE, pixels=b""), TOO_LARGE),
    "size-0.png": (lambda: png(0, 5, pixels=b""), "."),
    "text.png": (lambda: png(8, 8, chunk(b"zTXt", b"a\0\0" + zeros(2000))), TEXT),
    "profile.png": (lambda: png(8, 8, chunk(b"iCCP", b"a\0\0" + zeros(2000))), TEXT),
    "pixels.png": (lambda: png(8, 8, pixels=zeros(2000)), None),
    "exif.png": (lambda: png(8, 8, chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + bytes(999))), None),
    "cut.png": (lambda: png(64, 64)[:60], "."),
    "size.jpg": (lambda: jpeg(65535, 65535), TOO_LARGE),
    "size-0.jpg": (lambda: jpeg(0, 64), "."),
    "cut.jpg": (lambda: encode(Image.effect_noise((64, 64), 50), "JPEG")[:900], "truncated"),
    "size.ppm": (lambda: b"P6 60000 60000 255\n" + bytes(9), TOO_LARGE),
    "digits.ppm": (lambda: b"P6 " + b"9" * (1 << 20), "."),
    "script.png": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) (r) file\n", "not an image"),
    "empty.png": (lambda: b"", "the file is empty"),
}


@pytest.fixture
def pictures(tmp_path):
    """Six good pictures; names sort them among those that a test adds."""
    root = tmp_path / "images" / "class"
    root.mkdir(parents=True)
    for name, level in GOOD.items():
        Image.new("RGB", (30, 20), (level, 0, 0)).save(root / name)
    return root


#: The command, and then the most memory that one of its processes took, in MB; ``{0}`` is done before.
COMMAND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
{0}
from memload.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    assert not ended.code
# not its own ru_maxrss, which begins with that of the process that started it
own = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) // 1024)
"""


def build(root, num_workers, *options, before="", odd=0):
    """Run the command, check the good pictures, and return the ledger, without class."""
    output = root.parent.parent / "out.bin"
    arguments = ["build", str(root.parent), str(output), "--size", "8", "--quiet", *options]
    arguments += ["--num-workers", str(num_workers), "--max-rejects", "100%"]
    arguments += ["--extensions", ".png,.jpg,.gif,.webp,.bmp,.tif,.ppm"]
    command = [sys.executable, "-c", COMMAND.format(before), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 500  # any of the bombs is 2,000 MB and more
    dataset = memload.MemmapDataset(output)
    found = {key.removeprefix("class/"): dataset[i][0] for i, key in enumerate(dataset.keys)}
    assert {name: int(found[name][0, 4, 4]) for name in GOOD} == GOOD
    assert len(dataset) == len(GOOD) + odd
    assert memload.verify(output).ok
    with output.with_suffix(".rejects.csv").open(newline="", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return {path.removeprefix("class/"): reason for path, reason in rows}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_hostile_picture_costs_its_own_sample_and_little_memory(num_workers, pictures):
    for name, (make, _) in PICTURES.items():
        (pictures / name).write_bytes(make())
    expected = {name: reason for name, (_, reason) in PICTURES.items() if reason}
    if num_workers == 0:  # Pillow's own limit holds, as it is one of the whole process
        expected |= dict.fromkeys(["size.png", "size.jpg", "size.ppm"], "DecompressionBomb|pixels")
    ledger = build(pictures, num_workers, odd=len(PICTURES) - len(expected))
    assert ledger.keys() == expected.keys()
    assert not [name for name in expected if not re.search(expected[name], ledger[name])]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_not_a_file_costs_its_own_sample(num_workers, pictures):
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
    ledger = build(pictures, num_workers)
    assert ledger.keys() == {*links, "pipe.jpg", "sparse.jpg"}
    assert "a folder, a pipe or a device" in ledger["pipe.jpg"]
    assert "a folder, a pipe or a device" in ledger["zero.jpg"]
    assert ledger["nothing.jpg"] == "a link to a file that does not exist"
    assert "symbolic links" in ledger["loop.jpg"]


#: Makes decoders do harm, by the width of a picture, in the processes that are forked from this one.
HARM = """
import ctypes, time
import numpy as np
from PIL import ImageFile
load = ImageFile.ImageFile.load
def harm(self):
    if self.width == 101:
        ctypes.string_at(0)
    if self.width == 104:
        time.sleep(600)
    if self.width == 105:
        np.empty(1 << 50, np.uint8)
    return load(self)
ImageFile.ImageFile.load = harm
"""


@pytest.mark.slow
def test_a_decoder_that_crashes_hangs_or_wants_all_memory_costs_its_own_sample(
    pictures,
):
    for width in (100, 101, 104, 105):
        (pictures / f"{width}.png").write_bytes(png(width, 5))
    options = ("--timeout", "2", "--max-pixels", "10000")
    assert build(pictures, 2, *options, before=HARM, odd=1) == {
        "101.png": "decoding it killed the process (SIGSEGV)",
        "104.png": "it took longer than 2 s",
        "105.png": "it asks for more memory than a picture of its size needs",
    }
