"""File systems on which a data set cannot be built, or not by several machines together.

Linux lists what is mounted where in ``/proc/self/mountinfo``. Other systems have no such list, and
nothing is checked there.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memload.errors import BuildError

logger = logging.getLogger("memload")

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

#: For NFS, see nfs(5): flock() has an option of its own, and is not used here.
_NFS = {
    "nolock": "lock",
    "local_lock=all": "local_lock=none",
    "local_lock=posix": "local_lock=none",
}

#: Options of mounts whose byte-range locks hold only within a machine, and what to mount instead.
_LOCAL_LOCKS = {
    **dict.fromkeys(("nfs", "nfs4"), _NFS),
    **{kind: {"nobrl": "brl"} for kind in ("cifs", "smb3")},  # mount.cifs(8)
    "gfs2": {"localflocks": "nolocalflocks"},  # gfs2(5)
    "lustre": {"localflock": "flock"},  # mount.lustre(8)
}


class Mount(NamedTuple):
    """Where something is mounted, and what."""

    point: str
    type: str  #: such as ``nfs4`` or ``fuse.s3fs``
    source: str  #: such as ``server:/data``
    options: frozenset[str]  #: those of the mount and of its file system


def check_file_system(folder: Path, *, in_parts: bool) -> None:
    """Look at what a folder is mounted from, before a data set is built there.

    Raises BuildError for object storage in which the rows of a file cannot be written in any order,
    and for builds in parts for all object storage. Logs a warning if a build in parts has locks
    there that other machines do not see.
    """
    mount = mount_of(folder)
    if mount is None:
        return
    name, is_writable = object_storage(mount)
    advice = (
        f"{folder} is object storage ({name}, mounted at {mount.point}), which stores whole files. "
        "Build in a folder of a disk or of a shared file system, then copy the files there"
    )
    if name and (in_parts or not is_writable):
        raise BuildError(f"{advice}.", path=folder)
    if name:
        logger.warning(f"{advice}: that is much faster")
    elif in_parts:
        _warn_of_local_locks(folder, mount)


def object_storage(mount: Mount) -> tuple[str, bool]:
    """Return the name of what mounts object storage, and whether it can write in any order."""
    kind, _, program = mount.type.partition(".")
    if kind != "fuse":
        return "", True
    return _OBJECT_STORAGE.get(program or mount.source, ("", True))


def _warn_of_local_locks(folder: Path, mount: Mount) -> None:
    if mount.type == "fuse.sshfs":  # it passes no locks on
        remedy = "Use NFS or another shared file system in place of sshfs"
    else:
        options = _LOCAL_LOCKS.get(mount.type, {})
        found = sorted(mount.options & options.keys())
        if not found:
            return
        remedy = f"Mount it with -o {options[found[0]]} in place of {found[0]}"
    logger.warning(
        f"{folder}: other machines do not see the locks of this file system ({mount.type}, mounted "
        f"at {mount.point}), so two of them may write the same shard. {remedy}, or start the first "
        "part alone until it has begun, and no part twice at a time"
    )


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
