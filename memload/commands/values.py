"""What is given to options and arguments, parsed. Usage errors end with an example."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

FILE = click.Path(dir_okay=False)


def size(text: str) -> tuple[int, int]:
    """Parse a side, or height×width, for ``--size``."""
    match = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", text)
    if not match:
        raise click.BadParameter(
            f"{text!r} is not a size. Give a side such as 256, or height×width such as 224x160."
        )
    return int(match[1]), int(match[2] or match[1])


def part(text: str) -> tuple[int, ...]:
    """Parse I/N for ``--part``."""
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        raise click.BadParameter(f"{text!r} is no part. Give I/N, such as 0/8 for the first of 8.")
    return tuple(map(int, text.split("/")))


def named(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise click.BadParameter(f"{text!r} is not NAME=VALUE. Give both, such as split=train.")
    return name, value


def optionally_named(text: str) -> tuple[str, str]:
    """Parse NAME=PATTERN or NAME for ``--points`` and ``--boxes``."""
    return named(text) if "=" in text or not text else (text, "")


def mask(text: str) -> tuple[str, str]:
    """Parse FOLDER or NAME=FOLDER for ``--mask``. Without a name, it is ``mask``."""
    if text and ("=" not in text or os.path.isdir(text)):  # noqa: PTH112  # pathlib slows --help
        return "mask", text
    return named(text)


def numbers(text: str) -> list[int]:
    """Parse numbers separated by commas for ``--indices``."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers. Give numbers such as 0,5,17."
        ) from None


def extensions(text: str) -> list[str]:
    """Parse extensions separated by commas, with or without a dot, for ``--extensions``."""
    return [f".{each.strip().lstrip('.')}" for each in text.split(",")]


def classes(text: str) -> str | list[str]:
    """Parse names separated by commas, or a file, for ``--classes``."""
    is_file = text.endswith((".bin", ".idx", ".txt"))
    if is_file or os.path.exists(text):  # noqa: PTH110  # pathlib slows --help
        return text
    return [name.strip() for name in text.split(",")]


def by_name(context: object, option: object, pairs: Sequence[tuple[str, str]]) -> Any:
    """Return pairs as a dict, or None if there are none. No name may come twice."""
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise click.BadParameter(f"{twice.pop()!r} is given twice. Give each name once.")
    return dict(pairs) or None


#: An option that is repeated, with a name and a value each time.
PAIRS: Mapping[str, Any] = {"multiple": True, "callback": by_name}
