"""Numbers, sizes, shapes and lists of names, as messages and reports show them."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice

#: Longer names, such as those of a hostile file, are cut.
_MAX_LETTERS = 200


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number of things. ``many`` is the plural of ``one`` if it does not just add an s.

    >>> counted(1, "class", "classes"), counted(2000, "row")
    ('1 class', '2,000 rows')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def listed(names: Iterable[object], limit: int = 20) -> str:
    """Return the first names, separated by commas, and … if there are more than ``limit``.

    No more than ``limit + 1`` names are taken. Characters that cannot be printed are escaped.

    >>> listed(["cat", "dog", "eel"], 2)
    'cat, dog, …'
    """
    first = list(islice(names, limit + 1))
    shown = [printable(str(name)[:_MAX_LETTERS]) for name in first[:limit]]
    return ", ".join(shown + ["…"] * (len(first) > limit))


def printable(text: str) -> str:
    r"""Return a text in one line, in which characters that cannot be printed are escaped.

    >>> printable("node\x1b[2J\n")
    'node\\x1b[2J\\n'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape or a size.

    >>> shape_text((224, 224, 3))
    '224×224×3'
    """
    return "×".join(map(str, shape))


def size_text(size: int) -> str:
    """Return a number of bytes.

    >>> size_text(51_123_456)
    '51.1 MB'
    """
    value, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:  # three digits are shown: 999.5 would be 1e+03
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}" if unit != "bytes" else counted(size, "byte")


def parse_size(size: int | str) -> int:
    """Return a number of bytes that may be a text with a unit. Raises ValueError.

    >>> parse_size("4GB"), parse_size("512 MiB"), parse_size(4096)
    (4000000000, 536870912, 4096)
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    pattern = r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([KMGT])(i?))?B?"
    match = (
        re.fullmatch(pattern, size.strip(), re.IGNORECASE | re.ASCII)
        if isinstance(size, str)
        else None
    )
    if not match:
        raise ValueError(
            f"{size!r} is not a size. Give a number of bytes, with a unit if you like: 4GB, 512MiB."
        )
    number, unit, binary = match.groups()
    power = "KMGT".index(unit.upper()) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)
