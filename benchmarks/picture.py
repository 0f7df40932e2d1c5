"""Draw docs/speed.svg, the picture in the README, from the newest results on a GPU.

    python benchmarks/picture.py [--check]

All bars are of one table of one run on one machine: of `SOURCES` the first that has a result with all of them.
`--check` writes nothing, and fails if the picture is not up to date.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "speed.svg"


@dataclass(frozen=True)
class Source:
    """A table to draw from."""

    title: str
    benchmark: str
    pattern: str  #: of the names in a line's results that lead to the table, with " › " between
    rows: tuple[
        tuple[str, str, bool], ...
    ]  #: label, pattern of the name, whether it is memload's; the last is the limit


SOURCES = (
    Source(
        "Images a second on the GPU: 224×224, batches of 256, random order",
        "feeds",
        "what else there is, behind the first batch of each worker, .*",
        (
            ("JPEGs in a DataLoader, {workers} workers", "JPEGs in a DataLoader", False),
            (
                "out.bin in a DataLoader, fast_collate",
                "DataLoader over MemmapDataset, fast_collate",
                True,
            ),
            ("Loader, pinned: 12 threads gather", "Loader, pinned, 12 threads", True),
            ("Loader, uva: a kernel fetches", "Loader, uva", True),
            ("Loader, dma: copy engines fetch", "Loader, dma", True),
            ("limit: one copy of such a batch", "one copy", False),
        ),
    ),
    Source(
        "Images a second in the training of one convolution: 224×224, batches of 256",
        "train_step",
        "",
        (
            (
                "JPEGs in a DataLoader, {workers} workers",
                r"JPEGs in a DataLoader, \d+ workers",
                False,
            ),
            ("out.bin in a DataLoader, {workers} workers", r"DataLoader, \d+ workers", True),
            ("Loader, pinned: threads gather", "Loader, pinned", True),
            ("Loader, dma: copy engines fetch", "Loader, dma", True),
            ("Loader, uva: a kernel fetches", "Loader, uva", True),
            ("limit: the same batch again and again", "synthetic", False),
        ),
    ),
)
STYLE = """
    text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px; fill: #1f2328; }
    .ground { fill: #ffffff; }
    .bold { font-weight: 600; }
    .small { font-size: 12px; fill: #59636e; }
    .ours { fill: #2f6fde; }
    .theirs { fill: #afb8c1; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .ground { fill: #0d1117; }
      .small { fill: #9198a1; }
      .ours { fill: #6ea1ff; }
      .theirs { fill: #59636e; }
    }
  """


def table(line: dict[str, Any], source: Source) -> dict[str, float] | None:
    """Return the medians of a source's rows in a line, by label, with the workers; None where it lacks one."""
    found = line["results"]
    if source.pattern:
        found = next(
            (value for name, value in found.items() if re.fullmatch(source.pattern, name)), {}
        )
    rates = {}
    for label, pattern, _ in source.rows:
        value = next((value for name, value in found.items() if re.fullmatch(pattern, name)), None)
        if value is None:
            return None
        workers = found.get("workers") or line["parameters"].get("workers")
        rates[label.format(workers=workers)] = value.get("images/s", value)["median"]
    return rates


def newest() -> tuple[Source, dict[str, Any]]:
    """Return the first source that has a whole result with its rows, and the newest such line; of models the stem's."""
    lines = [
        line
        for line in report.newest(HERE / "results")
        if "gpu" in line["machine"] and "partial" not in line
    ]
    for source in SOURCES:
        fitting = [
            line
            for line in lines
            if line["benchmark"] == source.benchmark
            and line["parameters"].get("model", "stem") == "stem"
            and table(line, source)
        ]
        if fitting:
            return source, max(fitting, key=lambda line: line["when"])
    raise LookupError(
        f"results: expected one on a GPU of {' or '.join(source.benchmark for source in SOURCES)}"
    )


def figure(value: float) -> str:
    """Return a rate in four digits."""
    return f"{float(f'{value:.4g}'):,.0f}"


def draw(source: Source, line: dict[str, Any]) -> str:
    """Return the picture."""
    rates, left, wide, row = table(line, source) or {}, 300, 530, 34
    first, *_, best, _ = rates.values()
    height = 66 + row * len(rates)
    told = f"Images a second: {figure(first)} from JPEGs, {figure(best)} with the Loader"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" role="img" aria-labelledby="title">',
        f'  <title id="title">{told}</title>',
        f"  <style>{STYLE}</style>",
        f'  <rect class="ground" width="960" height="{height}" rx="8"/>',
        f'  <text class="bold" x="20" y="28">{source.title}</text>',
        f'  <text class="small" x="940" y="28" text-anchor="end">{line["machine"]["gpu"]}, files warm, one run</text>',
    ]
    for number, ((label, rate), (_, _, ours)) in enumerate(
        zip(rates.items(), source.rows, strict=True)
    ):
        top = 46 + row * number
        bar = wide * rate / max(rates.values())
        kind = "ours" if ours else "theirs"
        parts += [
            f'  <text x="{left - 12}" y="{top + 19}" text-anchor="end">{label}</text>',
            f'  <rect class="{kind}" x="{left}" y="{top + 4}" width="{bar:.1f}" height="{row - 12}" rx="2"/>',
            f'  <text class="bold" x="{left + bar + 10:.1f}" y="{top + 19}">{figure(rate)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    drawn = draw(*newest())
    if not options.check:
        TARGET.write_text(drawn)
    elif not TARGET.exists() or TARGET.read_text() != drawn:
        print("docs/speed.svg is not up to date: run python benchmarks/picture.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
