"""A folder on a disk that fails: the kernel's own way of it, by a file system whose reads give EIO where asked to."""

import contextlib
import ctypes
import errno
import os
import signal
import stat
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.drills.ground import Skipped

# What of the protocol of /dev/fuse is needed to read files: linux/fuse.h has all of it.
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT = 1, 2, 3, 14, 15, 18, 25, 26
BATCH_FORGET, INTERRUPT, ROOT = 42, 36, 1


@contextlib.contextmanager
def mounted(folder: Path, at: Path, bad: Mapping[str, tuple[int, int]]) -> Iterator[None]:
    """Show the files of a folder at another place, where bytes from … to … of those named cannot be read."""
    if sys.platform != "linux" or not Path("/dev/fuse").exists():
        raise Skipped("this system has no /dev/fuse")
    libc = ctypes.CDLL(None, use_errno=True)
    files = sorted(
        path for path in folder.iterdir() if path.is_file()
    )  # before it may have the mount in it
    at.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        raise Skipped(f"/dev/fuse: {error.strerror}") from None
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"drill", os.fsencode(at), b"fuse", 0, options.encode()):
        os.close(device)
        raise Skipped(
            f"a file system of /dev/fuse cannot be mounted here: {os.strerror(ctypes.get_errno())}"
        )
    server = os.fork()  # a process: this one may wait for it in a page fault, with the GIL held
    if not server:
        signal.alarm(120)
        with contextlib.suppress(BaseException):  # when it is unmounted, reads of the device fail
            _serve(device, folder, files, bad)
        os._exit(0)
    os.close(device)
    try:
        yield
    finally:
        libc.umount2(os.fsencode(at), 2)  # MNT_DETACH
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def _serve(
    device: int, folder: Path, files: Sequence[Path], bad: Mapping[str, tuple[int, int]]
) -> None:
    numbers = {path.name: ROOT + 1 + place for place, path in enumerate(files)}
    while True:
        request = os.read(device, 1 << 20)
        _, what, unique, node = struct.unpack_from("<IIQQ", request)
        if what in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        rest, answer, error = request[40:], b"", 0
        file = files[node - ROOT - 1] if node > ROOT else folder
        if what == INIT:
            answer = struct.pack(
                "<IIIIHHIIHHI", 7, 31, 131072, 0, 16, 12, 131072, 1, 32, 0, 0
            ).ljust(64, b"\0")
        elif what == LOOKUP and (name := os.fsdecode(rest.split(b"\0")[0])) in numbers:
            number = numbers[name]
            answer = struct.pack("<QQQQII", number, 0, 60, 60, 0, 0) + _attributes(
                number, files[number - ROOT - 1]
            )
        elif what == LOOKUP:
            error = errno.ENOENT
        elif what == GETATTR:
            answer = struct.pack("<QII", 60, 0, 0) + _attributes(node, file)
        elif what == OPEN:
            answer = struct.pack("<QII", node, 0, 0)
        elif what == READ:
            _, offset, size = struct.unpack_from("<QQI", rest)
            start, stop = bad.get(file.name, (0, 0))
            if offset < stop and start < offset + size:
                error = errno.EIO
            else:
                with file.open("rb") as opened:
                    opened.seek(offset)
                    answer = opened.read(size)
        elif what not in (RELEASE, FLUSH):
            error = errno.ENOSYS
        os.write(device, struct.pack("<IiQ", 16 + len(answer), -error, unique) + answer)


def _attributes(number: int, path: Path) -> bytes:
    found = path.stat()
    mode = (stat.S_IFDIR | 0o755) if path.is_dir() else (stat.S_IFREG | 0o644)
    seconds = int(found.st_mtime)
    blocks = -(-found.st_size // 512)
    times = (seconds, seconds, seconds, 0, 0, 0)
    return struct.pack(
        "<6Q10I",
        number,
        found.st_size,
        blocks,
        *times,
        mode,
        1,
        os.getuid(),
        os.getgid(),
        0,
        4096,
        0,
    )
