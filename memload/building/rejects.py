"""How many samples may be left out of a data set, and what most often kept them out."""

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

#: Parts of a reason that differ from sample to sample: numbers, and what is in quotes.
_VARYING = re.compile(r"\d[\d,.]*|'[^']*'|\"[^\"]*\"")


class RejectLimit:
    """How many samples may be rejected: a share such as ``"10%"`` or ``0.1``, or a count.

    Raises ValueError for anything else. An integer is a count.
    """

    def __init__(self, limit: int | float | str) -> None:
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(%?)", str(limit).strip())
        number, is_share = Fraction(0), False
        if match and not isinstance(limit, bool):
            number, is_share = Fraction(match[1]), isinstance(limit, float) or bool(match[2])
            number /= 100 if match[2] else 1
        is_possible = number <= 1 if is_share else number.denominator == 1
        if not match or isinstance(limit, bool) or not is_possible:
            raise ValueError(
                f"max_rejects: {limit!r} is neither a share such as '10%', up to '100%', nor a "
                "count such as 20."
            )
        self._number, self._is_share = number, is_share

    def __str__(self) -> str:
        return f"{float(100 * self._number):g}%" if self._is_share else f"{self._number}"

    def allows(self, rejected: int, total: int) -> bool:
        """Say whether so many of ``total`` samples may be rejected."""
        return rejected <= self._number * (total if self._is_share else 1)


def frequent_reasons(reasons: Mapping[int, str], keys: Sequence[str]) -> str:
    """Return the three most frequent reasons, each with its count and the name of a sample.

    ``reasons`` say why rows were rejected. Those that differ only in numbers and in quoted texts
    count as one. Of these, the one with the largest numbers is shown.
    """
    rows_of: dict[str, list[int]] = {}
    for row, reason in reasons.items():
        rows_of.setdefault(_VARYING.sub("…", reason), []).append(row)
    texts = []
    for rows in sorted(rows_of.values(), key=len, reverse=True)[:3]:
        numbers = {row: _numbers(reasons[row]) for row in rows}
        row = max(rows, key=numbers.__getitem__)
        example = f"such as {keys[row]}"
        if len(set(numbers.values())) > 1:
            example += ", where the numbers are the largest"
        texts.append(f"{len(rows):,} × {reasons[row].removesuffix('.'):.200} ({example})")
    return "; ".join(texts)


def _numbers(reason: str) -> tuple[int, ...]:
    """Return the whole numbers in a reason, apart from those in quoted texts."""
    found = _VARYING.findall(reason)
    texts = [text.replace(",", "") for text in found if text[0].isdigit()]
    return tuple(int(digits) for text in texts for digits in re.findall(r"[0-9]{1,18}", text))


def sufficient_limit(rejected: int, total: int) -> str:
    """Return the share, in whole percent, with which so many rejected samples are allowed."""
    return f"{math.ceil(Fraction(100 * rejected, total))}%"
