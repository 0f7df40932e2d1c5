"""What was measured, as a table, as JSON and as a picture."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from memload.bench.stages import Stage
from memload.errors import DependencyError
from memload.wording import shape_text


@dataclass(frozen=True)
class Line:
    """The rate of a stage and the rate that limits it, or the reason why there is none."""

    subject: str
    images_s: float | None = None  #: images a second, the median of all rounds
    lower_quartile: float = 0.0
    upper_quartile: float = 0.0
    gb_s: float | None = None  #: the same in gigabytes of stored pixels a second
    rounds: int = 0
    limit: str = ""  #: the name of the limit
    limit_images_s: float | None = None
    share: float | None = None  #: the median, over the rounds, of rate divided by limit
    reason: str = ""
    #: Where a Loader's rows were found: the fields of `memload.feeds.feed.Counts`.
    counts: dict[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """What `measure` found. ``facts`` describe the data and the machine, ready for JSON."""

    facts: dict[str, Any]
    lines: Sequence[Line]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**self.facts, "results": [asdict(line) for line in self.lines]}

    def heading(self) -> str:
        """Return two lines: the data, and the machine."""
        facts, machine = self.facts, self.facts["machine"]
        shape = shape_text(facts["shape"])
        part = ""
        if facts["sampled"] < facts["samples"]:
            part = f", measured on {facts['sampled']:,} of them"
        if facts["sampled_on_disk"] > facts["sampled"]:
            part += f" and on the disk on {facts['sampled_on_disk']:,}"
        return (
            f"{Path(facts['path']).name}: {facts['samples']:,} samples of {shape} {facts['dtype']}"
            f"{part}; batches of {facts['batch_size']:,}, medians of {facts['rounds']} rounds, "
            f"{facts['seconds']:.0f} s in all\n"
            f"{machine['cpu']}, {machine['cores']} cores; {machine.get('gpu', 'no GPU')}; "
            f"torch {facts['versions']['torch']}"
        )

    def text(self) -> str:
        """Return a table, with the heading above and notes below."""
        width = max(len(line.subject) for line in self.lines)
        rows = [f"{'':{width}}    images/s    GB/s  share  of the limit, images/s"]
        for line in self.lines:
            start = f"{line.subject:{width}}  "
            if line.images_s is None:
                rows.append(f"{start}         –       –         {line.reason}")
                continue
            start += f"{_number(line.images_s):>10}  {line.gb_s:>6.3g}"
            if line.limit_images_s is not None:
                limit = f"{_number(line.limit_images_s):>10}  {line.limit}"
                start += f"  {line.share:>5.2f}  {limit}"
            rows.append(start)
        return "\n".join([self.heading(), "", *rows, "", *self.facts["notes"]])

    def plot(self, path: Path) -> None:
        """Write a picture with a bar for each rate and a mark at its limit. See `check_plot`."""
        from matplotlib.figure import Figure

        lines = [line for line in self.lines if line.images_s][::-1]
        rates = [line.images_s or 0.0 for line in lines]
        figure = Figure(figsize=(10, 1.8 + 0.35 * len(lines)), layout="constrained")
        axes = figure.add_subplot()
        bars = axes.barh([line.subject for line in lines], rates)
        axes.bar_label(bars, [*map(_number, rates)], label_type="center", color="white")
        for row, line in enumerate(lines):
            if line.limit_images_s:
                axes.plot(line.limit_images_s, row, "k|", markersize=20)
        axes.set_xscale("log")
        axes.set_xlim(left=min(rates) / 10)  # a bar for the slowest, too
        axes.set_xlabel("images a second; black marks are limits")
        figure.suptitle(self.heading(), fontsize="small")
        figure.savefig(path)


def check_plot(path: Path) -> None:
    """Check that `Report.plot` can write a file, before all the measuring.

    Raises DependencyError if matplotlib is not installed, and ValueError for a bad path.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise DependencyError(
            f"--plot needs matplotlib, which cannot be imported: {error}. Run "
            "pip install 'memload[plot]'",
            name="matplotlib",
        ) from error
    endings = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        known = ", ".join(sorted(endings))
        raise ValueError(f"plot: {path} is not a picture. Use a name that ends in one of {known}.")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"plot: {path} cannot be written. Give a file in a folder that exists.")


def line_of(stage: Stage, row_bytes: int) -> Line:
    """Return the line of a stage that was measured, or of one that could not be."""
    if not stage.rates:
        return Line(stage.subject, reason=stage.reason)
    low, median, high = np.quantile(stage.rates, [0.25, 0.5, 0.75]).tolist()
    line = Line(
        stage.subject,
        median,
        low,
        high,
        gb_s=median * row_bytes / 1e9,
        rounds=len(stage.rates),
        counts=stage.counts and stage.counts._asdict(),
    )
    limits = [(float(np.median(limit.rates)), limit) for limit in stage.limits if limit.rates]
    if not limits:
        return line
    slowest, limit = min(limits, key=itemgetter(0))
    share = float(np.median(np.divide(stage.rates, limit.rates)))
    return replace(line, limit=limit.subject, limit_images_s=slowest, share=share)


def _number(value: float) -> str:
    """Return a number with at most four significant digits."""
    return f"{float(f'{value:.4g}'):,.10g}"
