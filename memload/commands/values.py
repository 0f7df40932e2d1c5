"""What is given to options and arguments, parsed. Usage errors end with an example."""

import os
import re
from collections.abc import Sequence

import click

from memload.wording import parse_size

FILE = click.Path(dir_okay=False)
FOLDER = click.Path(file_okay=False)


def size(text: str) -> tuple[int, int]:
    """Parse a side, or height×width, for ``--size``."""
    match = re.fullmatch(r"(\d{1,5})(?:[x×](\d{1,5}))?", text)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (0 < height <= 65535 and 0 < width <= 65535):
        raise click.BadParameter(
            f"{text!r} is not a size. Give a side such as 256, or height×width such as 224x160. "
            "A side has 1 to 65,535 pixels."
        )
    return height, width


def milliseconds(text: str) -> float:
    """Parse a time for ``--step-ms``."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise click.BadParameter(f"{text!r} is no time. Give milliseconds such as 54 or 3.5.")
    return number


def file_size(text: str) -> int:
    """Parse a number of bytes with an optional unit, such as ``--shard-size`` has."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def part(text: str) -> tuple[int, int]:
    """Parse I/N for ``--part``."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if not match:
        raise click.BadParameter(f"{text!r} is no part. Give I/N, such as 0/8 for the first of 8.")
    number, count = int(match[1]), int(match[2])
    if number >= count:
        raise click.BadParameter(
            f"part {number} of {count} does not exist. Parts are counted from 0."
        )
    return number, count


def reject_limit(text: str) -> str:
    """Check the value of ``--max-rejects``."""
    from memload.building.summary import allowed_rejects

    try:
        allowed_rejects(text, 1)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is neither a share such as 50% nor a count such as 20."
        ) from None
    return text


def _pair(text: str, form: str, example: str, *, may_be_empty: bool = False) -> tuple[str, str]:
    """Split ``NAME=VALUE`` at the first sign. Only the value may be empty, if at all."""
    name, sign, value = text.partition("=")
    if not (name and sign and (value or may_be_empty)):
        raise click.BadParameter(f"{text!r} is not {form}. Give {example}.")
    return name, value


def named(text: str) -> tuple[str, str]:
    """Parse NAME=PATTERN for ``--points`` and ``--array``."""
    return _pair(text, "NAME=PATTERN", "a name and a pattern such as 'landmarks=x*,y*'")


def optionally_named(text: str) -> tuple[str, str]:
    """Parse NAME=PATTERN or NAME for ``--points`` and ``--boxes``."""
    return named(text) if "=" in text or not text else (text, "")


def mask(text: str) -> tuple[str, str]:
    """Parse FOLDER or NAME=FOLDER for ``--mask``. Without a name, it is ``mask``."""
    if text and ("=" not in text or os.path.isdir(text)):  # noqa: PTH112  # pathlib slows --help
        return "mask", text
    return _pair(text, "[NAME=]FOLDER", "a folder such as masks/ or parts=parts/")


def array(text: str) -> tuple[str, str]:
    """Parse NAME=FILE for ``memload join``."""
    return _pair(text, "NAME=FILE", "a name and a file such as mask=masks.bin")


def condition(text: str) -> tuple[str, str]:
    """Parse NAME=TEXT for ``--where``. The text may be empty."""
    example = "a column and its text such as split=train"
    return _pair(text, "NAME=TEXT", example, may_be_empty=True)


def numbers(text: str) -> list[int]:
    """Parse numbers separated by commas for ``--indices``."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a list of numbers. Give numbers such as 0,5,17."
        ) from None


def by_name(option: str, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return pairs as a dict. Raises an error of usage if an option has a name twice."""
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise click.UsageError(f"{option} has {twice.pop()!r} twice. Give each name once.")
    return dict(pairs)
