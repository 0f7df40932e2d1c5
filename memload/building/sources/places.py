"""Says where the images of a table are, if they are not where it says."""

import os
from collections.abc import Sequence
from pathlib import Path

from memload.building.sources.record import EXTENSIONS
from memload.errors import SourceError

#: How many images are looked for when a table is opened, and in how many folders below.
_IMAGES, _FOLDERS = 3, 20

_ENDINGS = (*EXTENSIONS, *(extension.upper() for extension in EXTENSIONS))


def check_places(table: Path, root: Path, names: Sequence[str]) -> None:
    """Raise SourceError if the first images of a table are missing, but are in another place.

    That is another folder, or the same path with an extension. Only the first images are looked
    for. If they are nowhere, the build says of each image that it is missing.
    """
    first = list(names[:_IMAGES])
    if any(_exists(root / name) for name in first):
        return
    has_extension = first[0].lower().endswith(EXTENSIONS)
    for folders in ([root], _other_folders(root)):
        for ending in ("",) if has_extension else ("", *_ENDINGS):
            found = [
                folder
                for folder in folders
                if all(_exists(folder / f"{name}{ending}") for name in first)
            ]
            if found:
                options = [f"--extension {ending}"] if ending else []
                options += [f"--root {found[0]}"] if found[0] != root else []
                others = f", or with {found[1]}" if len(found) > 1 else ""
                raise SourceError(
                    f"{table}: there is no {root / first[0]}, but there is "
                    f"{found[0] / first[0]}{ending}. Say {' '.join(options)}{others}.",
                    path=table,
                )


def _other_folders(root: Path) -> list[Path]:
    """Return the folders below ``root`` and above it, and the current one."""
    try:
        with os.scandir(root) as entries:
            below = [root / entry.name for entry in entries if entry.is_dir()]
    except OSError:
        below = []
    folders = [*sorted(below)[:_FOLDERS], root / ".." if root.name == "" else root.parent, Path()]
    return list({folder.resolve(): folder for folder in reversed(folders)}.values())[::-1]


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # such as a name that is too long
        return False
