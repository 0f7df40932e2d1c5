"""Draw docs/speed.svg, the picture in the README, from the newest result of feeds.py.

    python benchmarks/picture.py [--check]

All bars are of one run on one machine. `--check` writes nothing, and fails if the picture is not up to date.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "speed.svg"
#: Label, and where the figure stands in the results; ours are drawn in blue. The last one is the limit.
ROWS = (
    ("JPEGs in a DataLoader, {workers} workers", ("what else", "JPEGs in a DataLoader"), False),
    ("out.bin in a DataLoader, {workers} workers", ("what else", "DataLoader over MemmapDataset, fast_collate"), True),
    ("Loader, pinned: 12 threads gather", ("224×224×3, ", "pinned, 12 threads"), True),
    ("Loader, uva: a kernel fetches", ("224×224×3, ", "uva"), True),
    ("Loader, dma: copy engines fetch", ("224×224×3, ", "dma"), True),
    ("limit: one copy of such a batch", ("224×224×3, ", "copy"), False),
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


def newest() -> dict[str, Any]:
    """Return the newest result on a GPU."""
    lines = [json.loads(line) for line in (HERE / "results" / "feeds.jsonl").read_text().splitlines()]
    return max((line for line in lines if "gpu" in line["machine"]), key=lambda line: line["when"])


def median(results: dict[str, Any], group: str, name: str) -> float:
    """Return the median of one way; of the group whose name starts so."""
    (found,) = [values for key, values in results.items() if key.startswith(group)]
    return found[name]["median"]


def figure(value: float) -> str:
    """Return a rate in four digits."""
    return f"{float(f'{value:.4g}'):,.0f}"


def draw(line: dict[str, Any]) -> str:
    """Return the picture."""
    results, left, wide, row = line["results"], 300, 530, 34
    (workers,) = [values["workers"] for key, values in results.items() if key.startswith("what else")]
    rates = [median(results, *place) for _, place, _ in ROWS]
    height = 66 + row * len(ROWS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" role="img" aria-labelledby="title">',
        f'  <title id="title">Images a second: {figure(rates[0])} from JPEGs, {figure(rates[-2])} with dma</title>',
        f"  <style>{STYLE}</style>",
        f'  <rect class="ground" width="960" height="{height}" rx="8"/>',
        '  <text class="bold" x="20" y="28">Images a second on the GPU: 224×224, batches of 256, random order</text>',
        f'  <text class="small" x="940" y="28" text-anchor="end">{line["machine"]["gpu"]}, files warm, one run</text>',
    ]
    for number, ((label, _, ours), rate) in enumerate(zip(ROWS, rates, strict=True)):
        top = 46 + row * number
        bar = wide * rate / max(rates)
        kind = "ours" if ours else "theirs"
        parts += [
            f'  <text x="{left - 12}" y="{top + 19}" text-anchor="end">{label.format(workers=workers)}</text>',
            f'  <rect class="{kind}" x="{left}" y="{top + 4}" width="{bar:.1f}" height="{row - 12}" rx="2"/>',
            f'  <text class="bold" x="{left + bar + 10:.1f}" y="{top + 19}">{figure(rate)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    drawn = draw(newest())
    if not options.check:
        TARGET.write_text(drawn)
    elif not TARGET.exists() or TARGET.read_text() != drawn:
        print("docs/speed.svg is not up to date: run python benchmarks/picture.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
