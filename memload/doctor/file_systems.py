"""The file system that a folder is on, and whether it is object storage.

Linux lists what is mounted where in ``/proc/self/mountinfo``. Other systems have no such list, and
nothing is known there.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")

#: Programs that mount object storage, by the type or the source of their mounts. They write whole
#: objects. Those that keep a file on a disk of the machine until it is closed can write its rows in
#: any order, slowly; the others, with False here, cannot.
_OBJECT_STORAGE = {
    "blobfuse": ("blobfuse", True),  # type fuse, source blobfuse
    "blobfuse2": ("blobfuse2", True),  # type fuse, source blobfuse2: its libfuse_handler.go
    "gcsfuse": ("gcsfuse", True),  # type fuse.gcsfuse, source BUCKET
    "goofys": ("goofys", False),  # type fuse.goofys; random writes fail: its README.md
    "mountpoint-s3": ("Mountpoint for Amazon S3", False),  # type fuse, this source; SEMANTICS.md
    "rclone": ("rclone mount", True),  # type fuse.rclone, source REMOTE: its cmd/mount/mount.go
    "s3fs": ("s3fs", True),  # type fuse.s3fs, source s3fs
}


class Mount(NamedTuple):
    """Where something is mounted, and what."""

    point: str
    type: str  #: such as ``nfs4`` or ``fuse.s3fs``
    source: str  #: such as ``server:/data``
    options: frozenset[str]  #: those of the mount and of its file system


def object_storage(mount: Mount) -> tuple[str, bool]:
    """Return the name of what mounts object storage, and whether it can write in any order."""
    kind, _, program = mount.type.partition(".")
    if kind != "fuse":
        return "", True
    return _OBJECT_STORAGE.get(program or mount.source, ("", True))


def mount_of(folder: Path) -> Mount | None:
    """Return the mount that a folder is on, or None if that is not known."""
    try:
        text = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # this is not Linux
        return None
    parents = {str(path) for path in (folder.resolve(), *folder.resolve().parents)}
    found = None
    for mount in _mounts(text):
        # A later mount at the same point hides the earlier one.
        if mount.point in parents and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _mounts(text: str) -> Iterator[Mount]:
    """Yield the mounts of ``mountinfo``, which proc_pid_mountinfo(5) explains."""
    for line in text.split("\n"):  # names may have other line breaks
        fields, _, file_system = line.partition(" - ")
        match fields.split(" "), file_system.split(" ", 2):
            case [[_, _, _, _, point, options, *_], [kind, source, own_options]]:
                yield Mount(
                    _unescaped(point),
                    kind,
                    _unescaped(source),
                    frozenset([*options.split(","), *own_options.split(",")]),
                )


def _unescaped(text: str) -> str:
    r"""Return a name of ``mountinfo``, where a space is ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)
