"""JSON of a temporary folder, which a crash, a person or another program may have damaged."""

import contextlib
import json
from pathlib import Path
from typing import Any, TypeVar, get_origin

_Record = TypeVar("_Record", bound=tuple[Any, ...])

#: Larger numbers, longer texts of records and deeper lists are in no file of memload's.
_MAX_NUMBER, _MAX_LETTERS, _MAX_DEPTH = 2**53, 255, 50


def parse_json(data: bytes) -> Any:
    """Return what JSON says. Raises ValueError for anything else, and for very deep lists."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not _is_flat(value, _MAX_DEPTH):
        raise ValueError("it is nested too deeply")
    return value


def read_record(kind: type[_Record], path: Path) -> _Record | None:
    """Return the `NamedTuple` that a file has; None if it is missing, or has anything else."""
    with contextlib.suppress(OSError, ValueError):
        return record(kind, parse_json(path.read_bytes()))
    return None


def record(kind: type[_Record], facts: Any) -> _Record:
    """Return a `NamedTuple` of the values that JSON has under the names of its fields.

    Each has to be of the type of its field. Numbers are 0 or more, and texts can be printed on a
    line: names of machines are shown in terminals. Raises ValueError otherwise.
    """
    types: dict[str, Any] = kind.__annotations__
    if not isinstance(facts, dict) or facts.keys() != types.keys():
        raise ValueError(f"it is no {kind.__name__}")
    for name, value in facts.items():
        if not _fits(value, get_origin(types[name]) or types[name]):  # dict for dict[str, int]
            raise ValueError(f"{name} is {value!r:.40}")
    return kind(**facts)


def _fits(value: Any, kind: type) -> bool:
    if kind in (int, float):
        return type(value) in (int, kind) and 0 <= value < _MAX_NUMBER
    if kind is str:
        return type(value) is str and value.isprintable() and len(value) <= _MAX_LETTERS
    return type(value) is kind


def _is_flat(value: Any, depth: int) -> bool:
    """Say whether lists and objects are nested at most ``depth`` times."""
    if not isinstance(value, (list, dict)):
        return True
    values = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_flat(item, depth - 1) for item in values)
