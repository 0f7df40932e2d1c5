"""Names of files for samples. Keys may come from anywhere, and are not trusted."""

import os
from collections.abc import Iterable, Iterator

from memload.sources.matching import stem_of

#: Longer names of files and folders are cut. File systems allow 255 bytes, with the extension.
_MAX_NAME_BYTES = 200


def safe_path(key: str, folder: str | None = None, *, has_dots: bool = True) -> str:
    """Return a relative path for a key, without the extension of an image.

    It lies in ``folder``, if there is one and the key does not begin with it. No name in it leads
    out of the folder, or is hidden. Without ``has_dots``, the name of the file has none.

    >>> safe_path("cat/1.jpg", "cat"), safe_path("../2.jpg", "dog")
    ('cat/1', 'dog/2')
    """
    parts = [part for part in stem_of(key).split("/") if part not in ("", ".", "..")] or ["_"]
    parts[-1] = parts[-1] if has_dots else parts[-1].replace(".", "_")
    names = [safe_name(part) for part in parts]
    is_inside = folder is None or (len(names) > 1 and names[0] == folder)
    return "/".join(names if is_inside else [str(folder), *names])


def safe_name(name: str) -> str:
    """Return a name for a file or a folder, the same one if it can have it."""
    visible = f"_{name[1:]}" if name.startswith(".") else name
    encoded = os.fsencode(visible.replace("\0", "_").replace("/", "_"))
    return encoded[:_MAX_NAME_BYTES].decode("utf-8", "ignore") or "_"


def distinct(paths: Iterable[str]) -> Iterator[str]:
    """Yield paths, with its number behind one that comes again.

    >>> list(distinct(["a", "b", "a"]))
    ['a', 'b', 'a-2']
    """
    taken = set[str]()
    for number, path in enumerate(paths):
        while path in taken:
            path = f"{path}-{number}"
        taken.add(path)
        yield path
