"""Pictures made to do harm, through the command: each costs its own sample, and the build ends."""

import csv
import io
import os
import re
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image, features

import memload

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="pipes, devices and limits as Linux has them"
)

GOOD = 6
LARGE = 60_000


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    width: int, height: int, before: bytes = b"", pixels: bytes | None = None, after: bytes = b""
) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = zlib.compress(bytes(height * (1 + 3 * width))) if pixels is None else pixels
    return (
        b"\x89PNG\r\n\x1a\n" + header + before + chunk(b"IDAT", data) + after + chunk(b"IEND", b"")
    )


def zeros(megabytes: int) -> bytes:
    """What zlib unpacks to so many megabytes, a thousandth as long."""
    compressor = zlib.compressobj(9)
    start = compressor.compress(b"") + compressor.flush(zlib.Z_FULL_FLUSH)
    return (
        start
        + (compressor.compress(bytes(1 << 20)) + compressor.flush(zlib.Z_FULL_FLUSH)) * megabytes
    )


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(encode(Image.new("RGB", (8, 8)), "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def gif(
    screen: tuple[int, int], frame: tuple[int, int], frames: int, comment: bytes = b""
) -> bytes:
    data = encode(Image.new("P", (8, 8)), "GIF")
    start = data.index(b"\x2c")
    one = data[start : start + 5] + struct.pack("<HH", *frame) + data[start + 9 : -1]
    return b"GIF89a" + struct.pack("<HH", *screen) + data[10:start] + comment + one * frames


def webp(width: int, height: int, frames: int) -> bytes:
    picture = encode(Image.new("RGB", (8, 8)), "WEBP")[12:]
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    frame = bytes(6) + (7).to_bytes(3, "little") * 2 + (1).to_bytes(3, "little") + b"\0" + picture
    parts = [(b"VP8X", b"\2\0\0\0" + size), (b"ANIM", bytes(6)), *[(b"ANMF", frame)] * frames]
    body = b"WEBP" + b"".join(name + struct.pack("<I", len(data)) + data for name, data in parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bmp(width: int, height: int, compression: int, data: bytes) -> bytes:
    header = struct.pack(
        "<IIIIiiHHIIIIII", 0, 0, 1078, 40, width, height, 1, 8, compression, len(data), 0, 0, 256, 0
    )
    return b"BM" + header + bytes(1024) + data


def tiff(*fields: tuple[int, int], data: bytes = bytes(100)) -> bytes:
    body = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in sorted(fields))
    return (
        b"II*\0"
        + struct.pack("<I", 8 + len(data))
        + data
        + struct.pack("<H", len(fields))
        + body
        + bytes(4)
    )


def avif(width: int, height: int) -> bytes:
    data = bytearray(encode(Image.new("RGB", (64, 64)), "AVIF"))
    at = data.index(b"ispe") + 8
    data[at : at + 8] = struct.pack(">II", width, height)
    return bytes(data)


TOO_LARGE, TEXT = r"\(--max-pixels\)", "too large|Too much memory|MAX_TEXT"
GREY = [(258, 8), (259, 8), (262, 1), (277, 1)]
TILES = [(256, 10), (257, 10), *GREY, (324, 8), (325, 100)]
STRIP = [*GREY, (273, 8), (279, 100)]

#: What a picture is, and the reason in the ledger; None where it is one, however odd.
PICTURES: dict[str, tuple[Callable[[], bytes], str | None]] = {
    "size.png": (lambda: png(LARGE, LARGE, pixels=b""), TOO_LARGE),
    "size-2e31.png": (lambda: png(2**31 - 1, 2**31 - 1, pixels=b""), TOO_LARGE),
    "size-0.png": (lambda: png(0, 5, pixels=b""), "."),
    "text.png": (lambda: png(8, 8, chunk(b"zTXt", b"a\0\0" + zeros(2000))), TEXT),
    "texts.png": (lambda: png(8, 8, chunk(b"zTXt", b"a\0\0" + zeros(1)[:-4]) * 500), TEXT),
    "unicode-text.png": (lambda: png(8, 8, chunk(b"iTXt", b"a\0\1\0\0\0" + zeros(2000))), TEXT),
    "text-behind.png": (lambda: png(8, 8, after=chunk(b"zTXt", b"a\0\0" + zeros(2000))), TEXT),
    "profile.png": (lambda: png(8, 8, chunk(b"iCCP", b"a\0\0" + zeros(2000))), TEXT),
    "pixels.png": (lambda: png(8, 8, pixels=zeros(2000)), None),
    "frames.png": (lambda: png(8, 8, chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))), None),
    "exif.png": (
        lambda: png(8, 8, chunk(b"eXIf", b"MM\0*\0\0\0\x08\xff\xff" + bytes(1 << 20))),
        None,
    ),
    "cut.png": (lambda: png(64, 64)[:60], "."),
    "size.jpg": (lambda: jpeg(65535, 65535), TOO_LARGE),
    "size-0.jpg": (lambda: jpeg(0, 64), "."),
    "cut.jpg": (lambda: encode(Image.effect_noise((64, 64), 50), "JPEG")[:900], "truncated"),
    "profiles.jpg": (
        lambda: jpeg(8, 8)[:2] + (b"\xff\xe2\xff\xff" + bytes(65533)) * 200 + jpeg(8, 8)[2:],
        None,
    ),
    "screen.gif": (lambda: gif((LARGE, LARGE), (8, 8), 1), TOO_LARGE),
    "frame.gif": (lambda: gif((8, 8), (LARGE, LARGE), 1), TOO_LARGE),
    "endless.gif": (lambda: gif((8, 8), (8, 8), 100_000), None),
    "comment.gif": (
        lambda: gif((8, 8), (8, 8), 1, b"\x21\xfe" + (b"\xff" + b"c" * 255) * 10_000 + b"\0"),
        None,
    ),
    "comment-without-end.gif": (
        lambda: gif((8, 8), (8, 8), 0, b"\x21\xfe" + (b"\xff" * 256) * 10_000),
        ".",
    ),
    "canvas.webp": (lambda: webp(16383, 16383, 1), TOO_LARGE),
    "canvas-2e24.webp": (lambda: webp(1 << 24, 255, 1), "."),
    "endless.webp": (lambda: webp(8, 8, 10_000), None),
    "size.bmp": (lambda: bmp(2**31 - 1, 2**31 - 1, 0, bytes(100)), TOO_LARGE),
    "size-negative.bmp": (lambda: bmp(5, -(2**31), 0, bytes(100)), TOO_LARGE),
    "runs.bmp": (lambda: bmp(1 << 20, 1, 1, b"\0\2\xff\xff" * 1000), None),
    "runs-without-end.bmp": (lambda: bmp(64, 64, 1, b"\0\0" * 100_000), "."),
    "size.tif": (lambda: tiff((256, LARGE), (257, LARGE), (278, LARGE), *STRIP), TOO_LARGE),
    "tile.tif": (lambda: tiff((322, 2**31), (323, 16), *TILES), TOO_LARGE),
    "tile-32768.tif": (lambda: tiff((322, 32768), (323, 32768), *TILES), TOO_LARGE),
    "channels.tif": (
        lambda: tiff(*[(tag, 65535 if tag == 277 else value) for tag, value in TILES]),
        ".",
    ),
    "big.tif": (
        lambda: b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**60) + bytes(100),
        "not an image",
    ),
    "size.ppm": (lambda: b"P6 60000 60000 255\n" + bytes(9), TOO_LARGE),
    "digits.ppm": (lambda: b"P6 " + b"9" * (1 << 20), "."),
    "cut.ppm": (lambda: b"P6 9000 9000 255\n" + bytes(9), "."),
    "script.png": (
        lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(/etc/passwd) (r) file\n",
        "not an image",
    ),
    "zip.png": (lambda: b"PK\3\4" + bytes(1000), "not an image"),
    "empty.png": (lambda: b"", "the file is empty"),
}
if features.check("avif"):
    PICTURES["size-avif.png"] = (lambda: avif(16384, 16384), TOO_LARGE)
    PICTURES["size-2e31-avif.png"] = (lambda: avif(2**31, 2**31), ".")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six good pictures; names sort them among those that a test adds."""
    root = tmp_path / "images" / "class"
    root.mkdir(parents=True)
    for number in range(GOOD):
        Image.new("RGB", (30, 20), (40 * number, 0, 0)).save(root / f"{'acgmsz'[number]}-good.png")
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


def build(root: Path, output: Path, *options: str, before: str = "") -> tuple[dict[str, str], int]:
    """Run the command. Return the ledger, without class, and the megabytes that it took."""
    arguments = ["build", str(root.parent), str(output), "--size", "8", "--quiet", *options]
    arguments += ["--extensions", ",".join(sorted({Path(name).suffix for name in PICTURES}))]
    command = [sys.executable, "-c", COMMAND.format(before), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    with output.with_suffix(".rejects.csv").open(newline="", encoding="utf-8") as file:
        ledger = {
            path.removeprefix("class/"): reason for path, reason in list(csv.reader(file))[1:]
        }
    return ledger, int(done.stdout.split()[-1])


def check_the_good(root: Path, output: Path, odd: int = 0) -> None:
    """The good pictures are there, and right; and nothing else but so many that are odd."""
    dataset = memload.MemmapDataset(output)
    good = {
        key: int(image[0, 4, 4])
        for key, (image, _) in zip(dataset.keys, dataset, strict=True)
        if "good" in key
    }
    assert good == {f"class/{'acgmsz'[number]}-good.png": 40 * number for number in range(GOOD)}
    assert len(dataset) == GOOD + odd
    assert memload.verify(output).ok


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_a_hostile_picture_costs_its_own_sample_and_little_memory(
    num_workers: int, pictures: Path, tmp_path: Path
) -> None:
    for name, (make, _) in PICTURES.items():
        (pictures / name).write_bytes(make())
    ledger, megabytes = build(pictures, tmp_path / "out.bin", "--num-workers", str(num_workers))
    expected = {name: reason for name, (_, reason) in PICTURES.items() if reason}
    assert ledger.keys() == expected.keys()
    assert {
        name: ledger[name] for name in expected if not re.search(expected[name], ledger[name])
    } == {}
    assert megabytes < 500  # any of the bombs is 2,000 and more
    check_the_good(pictures, tmp_path / "out.bin", odd=len(PICTURES) - len(expected))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_is_no_file_costs_its_own_sample(
    num_workers: int, pictures: Path, tmp_path: Path
) -> None:
    os.mkfifo(pictures / "pipe.jpg")
    for name, target in {
        "zero.jpg": "/dev/zero",
        "random.jpg": "/dev/urandom",
        "terminal.jpg": "/dev/tty",
        "loop.jpg": "loop.jpg",
        "nothing.jpg": "no such file",
        "memory.jpg": "/proc/self/mem",
        "long.jpg": "x" * 255 + "/" + "x" * 300,
    }.items():
        (pictures / name).symlink_to(target)
    with (pictures / "sparse.jpg").open("wb") as file:
        file.truncate(1 << 40)
    with (pictures / "sparse-100MB.bmp").open("wb") as file:
        file.write(bmp(8, 8, 0, b""))
        file.truncate(100 << 20)
    (pictures / "folder.jpg").mkdir()
    (pictures / "folder.jpg" / "back").symlink_to(pictures)
    ledger, megabytes = build(pictures, tmp_path / "out.bin", "--num-workers", str(num_workers))
    assert ledger.keys() == {path.name for path in pictures.iterdir()} - {
        *(f"{letter}-good.png" for letter in "acgmsz"),
        "sparse-100MB.bmp",
        "folder.jpg",
    }
    assert (
        ledger["pipe.jpg"] == ledger["zero.jpg"] == "not a file, but a folder, a pipe or a device"
    )
    assert ledger["nothing.jpg"] == "a link to a file that does not exist"
    assert "symbolic links" in ledger["loop.jpg"]
    assert megabytes < 500
    check_the_good(pictures, tmp_path / "out.bin", odd=1)


#: Makes decoders do harm, by the width of a picture, in the processes that are forked from this one.
HARM = """
import ctypes, os, time
import numpy as np
from PIL import ImageFile
load = ImageFile.ImageFile.load
def harm(self):
    if self.width == 101:
        ctypes.string_at(0)
    if self.width == 102:
        os.abort()
    if self.width == 103:
        os._exit(0)
    if self.width == 104:
        time.sleep(600)
    if self.width == 105:
        np.empty(3 << 30, np.uint8)
    if self.width == 106:
        os.kill(os.getpid(), 9)
    return load(self)
ImageFile.ImageFile.load = harm
"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_decoder_that_crashes_hangs_or_wants_all_memory_costs_its_own_sample(
    num_workers: int, pictures: Path, tmp_path: Path
) -> None:
    for width in range(100, 107):
        (pictures / f"{width}.png").write_bytes(png(width, 5))
    options = ("--num-workers", str(num_workers), "--timeout", "2", "--max-pixels", "10000")
    ledger, megabytes = build(pictures, tmp_path / "out.bin", *options, before=HARM)
    assert ledger == {
        "101.png": "decoding it killed the process (SIGSEGV)",
        "102.png": "decoding it killed the process (SIGABRT)",
        "103.png": "decoding it ended the process (exit status 0)",
        "104.png": "it took longer than 2 s",
        "105.png": "there is not enough memory to decode it",
        "106.png": "decoding it killed the process (SIGKILL)",
    }
    assert megabytes < 500
    check_the_good(pictures, tmp_path / "out.bin", odd=1)


def test_folders_that_all_link_to_one_another_are_walked_in_no_time(pictures: Path) -> None:
    for number in range(14):
        folder = pictures / f"f{number:02}"
        folder.mkdir()
        (folder / "x.png").touch()
        for other in range(14):
            (folder / f"to{other}").symlink_to(f"../f{other:02}")
    started = time.process_time()
    source = memload.ImageFolder(pictures.parent)
    assert time.process_time() - started < 10  # there are 14! ways through them
    assert GOOD + 14 <= len(source) <= GOOD + 14 * 100
    assert any("there 100 times already" in note for note in source.notes)
