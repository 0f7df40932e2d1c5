"""The table and the plot of what `memload bench` found."""

import io
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

#: of subjects by how they begin; all others have one
_COLOURS = {"JPEG": "#e45756", "Load": "#54a24b"}


#: What the share is, for which the median of the rates over that of the limits could be taken.
_SHARE = "Share: the median of each round's rate over that round's limit."


@dataclass(frozen=True)
class Line:
    """A subject with its rate and the rate that limits it, images a second; or the reason why there is none."""

    subject: str
    images_s: float | None = None
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0
    gb_s: float | None = None  #: of stored pixels
    rounds: int = 0
    limit: str = ""  #: what it is compared with
    limit_images_s: float | None = None
    share: float | None = None  #: the median of each round's
    reason: str = ""

    @property
    def spread(self) -> float:
        """How far apart the quartiles are, as a part of the median."""
        return (self.upper_quartile - self.lower_quartile) / self.images_s if self.images_s else 0.0

    @classmethod
    def of(
        cls,
        subject: str,
        rates: Sequence[float],
        limit: str,
        limits: Sequence[float],
        row_bytes: int,
    ) -> "Line":
        """Return the line of a subject's rounds and those of its limit; of neither there need be any."""
        if not rates:
            return cls(subject, reason="not measured")
        low, middle, high = statistics.quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
        gb_s = middle * row_bytes / 1e9
        if not limits:
            return cls(subject, middle, low, high, gb_s, len(rates))
        share = statistics.median(rate / most for rate, most in zip(rates, limits, strict=True))
        return cls(
            subject, middle, low, high, gb_s, len(rates), limit, statistics.median(limits), share
        )


@dataclass(frozen=True)
class Report:
    """What `measure` found: ``facts`` say on what and where, ready for JSON."""

    facts: dict[str, Any]
    lines: Sequence[Line]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**self.facts, "results": [asdict(line) for line in self.lines]}

    def heading(self) -> list[str]:
        """Return on what and where it was measured, in two lines."""
        facts, machine = self.facts, self.facts["machine"]
        part = (
            ""
            if facts["sampled"] == facts["samples"]
            else f", measured on {facts['sampled']:,} of them"
        )
        shape = "×".join(map(str, facts["shape"]))
        return [
            f"{Path(facts['path']).name}: {facts['samples']:,} samples of {shape} {facts['dtype']}{part}; batches of "
            f"{facts['batch_size']:,}, medians of {facts['rounds']} rounds, {facts['seconds']:.0f} s in all",
            f"{machine['cpu']}, {machine['cores']} cores; {machine.get('gpu', 'no GPU')}; "
            f"torch {facts['versions']['torch']}",
        ]

    def text(self) -> str:
        """Return the table, with what it was measured on above and what follows from it below."""
        rows = [("", "images/s", "GB/s", "share", "of its limit, images/s")]
        for line in self.lines:
            if line.images_s is None:
                rows.append((line.subject, "–", "–", "", line.reason))
                continue
            limit = (
                ""
                if line.limit_images_s is None
                else f"{_number(line.limit_images_s)}  {line.limit}"
            )
            share = "" if line.share is None else f"{line.share:.2f}"
            rows.append((line.subject, _number(line.images_s), f"{line.gb_s:.3g}", share, limit))
        first, *rest = (max(len(row[column]) for row in rows) for column in range(4))
        table = [
            "  ".join(
                [
                    row[0].ljust(first),
                    *(row[n + 1].rjust(width) for n, width in enumerate(rest)),
                    row[4],
                ]
            )
            for row in rows
        ]
        notes = [_SHARE] * any(line.share is not None for line in self.lines) + self.facts["notes"]
        return "\n".join([*self.heading(), "", *(line.rstrip() for line in table), "", *notes])

    def plot(self) -> Image.Image:
        """Return a bar for each rate, on a logarithmic axis, with a mark at its limit."""
        shown = [line for line in self.lines if line.images_s]
        values = [
            value for line in shown for value in (line.images_s, line.limit_images_s) if value
        ]
        low = math.floor(math.log10(min(values, default=1)))
        high = max(low + 1, math.ceil(math.log10(max(values, default=10))))
        left, wide, tall, top = 300, 620, 34, 84
        picture = Image.new("RGB", (left + wide + 230, top + tall * len(shown) + 82), "white")
        draw = ImageDraw.Draw(picture)
        font, small = ImageFont.load_default(15), ImageFont.load_default(12)

        def across(value: float) -> float:
            return left + wide * (math.log10(value) - low) / (high - low)

        bottom = top + tall * len(shown)
        for place, text in enumerate(self.heading()):
            draw.text((16, 12 + 22 * place), _plain(text), fill="black", font=small)
        for power in range(low, high + 1):
            x = across(10.0**power)
            draw.line((x, top - 6, x, bottom), fill="#d8d8d8")
            draw.text(
                (x, bottom + 6), f"{10.0**power:,.10g}", fill="#555555", font=small, anchor="ma"
            )
        for number, line in enumerate(shown):
            rate, y = line.images_s or 1.0, top + tall * number
            draw.text(
                (left - 10, y + tall / 2),
                _plain(line.subject),
                fill="black",
                font=font,
                anchor="rm",
            )
            draw.rectangle(
                (left, y + 7, across(rate), y + tall - 7),
                fill=_COLOURS.get(line.subject[:4], "#4c78a8"),
            )
            end = across(rate)
            if line.limit_images_s:
                x = across(line.limit_images_s)
                draw.line((x, y + 3, x, y + tall - 3), fill="black", width=3)
                end = max(end, x)
            share = "" if line.share is None else f"   share {line.share:.2f}"
            draw.text(
                (end + 8, y + tall / 2),
                _number(rate) + share,
                fill="black",
                font=small,
                anchor="lm",
            )
        told = "images a second, logarithmic; bars and black marks, which are limits of the same run, are medians"
        draw.text((left, bottom + 30), told, fill="#555555", font=small)
        draw.text((left, bottom + 48), _SHARE, fill="#555555", font=small)
        return picture


def _number(value: float) -> str:
    """Return a number with no more than four digits that count."""
    return f"{float(f'{value:.4g}'):,.10g}"


def _plain(text: str) -> str:
    """Return what Pillow's own font has."""
    return text.replace("×", "x").encode("latin-1", "replace").decode("latin-1")


def check_plot(plot: Path) -> None:
    """Raise ValueError where a plot could not be written after a minute of measuring. Leaves no file behind."""

    def refused(expected: str, found: str) -> ValueError:
        return ValueError(f"plot: expected {expected}, found {str(plot)!r}: {found}")

    Image.init()
    try:
        written = Image.registered_extensions().get(plot.suffix.lower(), "")
        Image.new("RGB", (1, 1)).save(io.BytesIO(), written)
    except (
        KeyError,
        ValueError,
        OSError,
    ) as error:  # no such format, one for reading only, or one without colours
        what = "Pillow writes no such files in colour. Choose another ending"
        raise refused("the name of an image such as speed.png", what) from error
    target = plot.resolve()  # where links lead, as what is made by trying has to go again
    if not target.parent.is_dir():
        raise refused("a file in a folder that is there", "there is none. Make the folder")
    there = target.exists()
    if there and not target.is_file():
        raise refused("a file", "something else has that name. Choose another")
    try:
        with target.open("ab"):
            pass
    except OSError as error:
        raise refused(
            "a file that can be written", f"{error.strerror}. Choose another place"
        ) from error
    if not there:
        target.unlink()
