"""Generate RESULTS.md and its plots from the lines in ``results/``, the newest of each benchmark and kind of machine.

    python benchmarks/report.py [--check]

Run it after a benchmark has added a line. `--check` writes nothing, and fails if the text is not up to date.

A kind of machine is its processor, its number of cores and its GPUs; a benchmark that is run in several variants
(`VARIANTS`) has each of them. A run that was recorded as partial is shown only where there is no whole one. Results are
names with values, of any depth: a value is a median with quartiles, a number, a text, or a curve, which is a list of
numbers, one a step. Where several names have the same values below them, these are the columns of one table. What
counts images a second goes into the plot, as do curves.

`results/commits.json` has the commits that lines name and the history does not, as they were landed as fewer ones, and
in which of these each of them is. `results/remarks.json` has what was found out of a line later.
"""

import argparse
import ast
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent
#: Parameters by which two runs of one benchmark are two results, not an old one and a new one.
VARIANTS = ("fast", "ranks", "device", "model", "pages", "first epoch")
#: Names of values that count images a second; and those of benchmarks whose names do not say so, and of no ratios.
RATE = r".*images(/s|_per_second)"
RATES = {
    "build": "memload|bare",
    "cold": r"\d threads.*|read from.*",
    "collate": ".*_collate",
    "feeds": r"(\d+×|what else)[^/]*",
    "loader": "np.take|(memload|ffcv), .*",
    "several_gpus": "together|.* alone",
}
#: What is memload's own, in a plot; and in those of benchmarks whose names do not say so.
OURS = (
    r".*(memload|Memmap|(?<!Data)Loader|(Cuda|Thread)Prefetcher|fast_collate"
    r"|\b(dma|uva|pinned|resident)\b|asking ahead|together).*"
)
OWN = {
    "several_gpus": ".*",
    "train_step": "(?!synthetic|JPEGs).*",
    "transforms": "(?!copy|torchvision|kornia)(?!.*, plain).*",
}
#: A value that tells what others took of a machine's cores; and how much is too much to quote the run.
OTHERS, BUSY = "others, %", 10
#: Columns from which on a table has quartiles in the first two only.
WIDE = 6
COLOURS = ("#2f6fde", "#e07b39", "#3a9d5d", "#8e5bc4", "#b8bfca")


def newest(folder: Path) -> list[dict[str, Any]]:
    """Return the newest line of each benchmark, machine and variant; a partial one where there is no whole one.

    ``remark`` is what was found out of a line later, from ``remarks.json``.
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    lines = [
        json.loads(line)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
        if line
    ]
    for line in sorted(lines, key=lambda line: ("partial" not in line, line["when"])):
        found[line["benchmark"], machine(line), variant(line)] = line
    remarks = folder / "remarks.json"
    for remark in json.loads(remarks.read_text()) if remarks.exists() else []:
        for line in found.values():
            if (line["benchmark"], line["when"]) == (remark["benchmark"], remark["when"]):
                line["remark"] = remark["remark"]
    return [found[key] for key in sorted(found)]


def commits(folder: Path) -> dict[str, str]:
    """Return in which commit of the history others are that lines name."""
    path = folder / "commits.json"
    return json.loads(path.read_text()) if path.exists() else {}


def commit(line: dict[str, Any], landed: dict[str, str]) -> str:
    """Return a line's commit, and where it is not in the history, in which one it is."""
    named, changes, _ = line["commit"].partition("+")
    if named not in landed:
        return line["commit"]
    return (
        f"{line['commit']}, {f'of which {named}' if changes else 'which'} landed in {landed[named]}"
    )


def machine(line: dict[str, Any]) -> str:
    """Return a machine's kind in words."""
    of = line["machine"]
    gpu = f", {of['gpus']} × {of['gpu']}" if "gpu" in of else ""
    return f"{of['cpu']}, {of['cores']} cores{gpu}"


def variant(line: dict[str, Any]) -> str:
    """Return what sets a line apart from others of the same benchmark, in words."""
    return ", ".join(
        f"{name} {line['parameters'][name]}" for name in VARIANTS if name in line["parameters"]
    )


def number(value: Any) -> str:
    """Return a number with three digits or all before the point; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def is_spread(value: Any) -> bool:
    """Tell whether a value is a median with quartiles."""
    return isinstance(value, dict) and "median" in value and "lower_quartile" in value


def is_curve(value: Any) -> bool:
    """Tell whether a value is a list of numbers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(point, int | float) for point in value)
    )


def is_branch(value: Any) -> bool:
    """Tell whether there are further names below."""
    return isinstance(value, dict) and not is_spread(value)


def cell(value: Any, quartiles: bool = True) -> str:
    """Return a value in a few characters."""
    if value is None:
        return ""
    if is_spread(value):
        middle = number(value["median"])
        if value["repeats"] < 2 or not quartiles:
            return middle
        return f"{middle} ({number(value['lower_quartile'])} to {number(value['upper_quartile'])})"
    if is_curve(value):
        return f"{number(value[0])} → {number(value[-1])}, {len(value)} steps"
    return number(value)


@dataclass
class Block:
    """A table, with what goes into a plot."""

    title: str
    rows: list[tuple[str, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bars: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)  #: with the reason
    curves: list[tuple[str, list[float]]] = field(default_factory=list)
    curve: str = "curves"  #: what they are of


def blocks(results: dict[str, Any], rate: str, title: str = "") -> list[Block]:
    """Return results of any depth as tables; `rate` is a pattern of names that count images a second."""
    below = {name: value for name, value in results.items() if is_branch(value)}
    if below and not any(
        is_branch(inner) for value in below.values() for inner in without_versions(value).values()
    ):
        columns = {name for value in below.values() for name in value} - {"error", "versions"}
        if len(columns) <= 16 and (
            len(below) > 1 and any(len(value) > 1 for value in below.values())
        ):
            shared = sum(
                len(value.keys() & columns) for value in below.values() if "error" not in value
            )
            if 2 * shared > len(columns) * sum("error" not in value for value in below.values()):
                rest = {name: value for name, value in results.items() if name not in below}
                return [*blocks(rest, rate, title), matrix(below, rate, title)]
    block = Block(title, [("", "median (quartiles) or value", "repeats")])
    found = []
    for name, value in results.items():
        full = f"{title} › {name}" if title else name
        if is_branch(value):
            found += blocks(value, rate, full)
        elif value is not None:
            block.rows.append(
                (name, cell(value), str(value["repeats"]) if is_spread(value) else "")
            )
            block.bars += [(name, value)] if is_spread(value) and re.fullmatch(rate, full) else []
            block.curves += [(name, value)] if is_curve(value) else []
    return [block, *found] if len(block.rows) > 1 else found


def without_versions(value: dict[str, Any]) -> dict[str, Any]:
    """Return values without those that stand below a table."""
    return {name: inner for name, inner in value.items() if name != "versions"}


def matrix(results: dict[str, Any], rate: str = RATE, title: str = "") -> Block:
    """Return a table with a row for each name, and the values below these as columns; one that failed says why."""
    done = {
        name: without_versions(value) for name, value in results.items() if "error" not in value
    }
    columns = list(dict.fromkeys(name for value in done.values() for name in value)) or [""]
    block = Block(title, [("", *columns)])
    block.failed = [(name, value["error"]) for name, value in results.items() if "error" in value]
    for name, value in results.items():
        if "error" in value:
            block.rows.append((name, f"none: {value['error']}", *[""] * (len(columns) - 1)))
            continue
        cells = (
            cell(value.get(key), len(columns) < WIDE or place < 2)
            for place, key in enumerate(columns)
        )
        block.rows.append((name, *cells))
    for column in columns:
        values = [(name, value.get(column)) for name, value in done.items()]
        if not block.curves and any(is_curve(value) for _, value in values):
            block.curves, block.curve = (
                [(name, value) for name, value in values if is_curve(value)],
                column,
            )
        if not block.bars and re.fullmatch(rate, f"{title} › {column}" if title else column):
            block.bars = [(name, value) for name, value in values if is_spread(value)]
    spreads = [value for one in done.values() for value in one.values() if is_spread(value)]
    repeats = sorted({value["repeats"] for value in spreads})
    if repeats:
        note = f"{' and '.join(map(str, repeats))} repeats; medians, with quartiles in brackets"
        note += " in the first two columns" * (len(columns) >= WIDE)
        of_numbers = [
            column
            for column in columns
            if any(isinstance(value.get(column), int | float) for value in done.values())
        ]
        once = f" Measured once, without repeats: {'; '.join(of_numbers)}." if of_numbers else ""
        block.notes.append(f"{note}.{once}")
    busy = max((value[OTHERS]["median"] for value in done.values() if OTHERS in value), default=0.0)
    if busy > BUSY:
        warning = f"**The machine was not quiet: others took up to {busy:.0f} % of it. Do not quote these figures.**"
        block.notes.insert(0, warning)
    versions: dict[str, set[str]] = {}
    for name, version in (
        pair for value in results.values() for pair in value.get("versions", {}).items()
    ):
        versions.setdefault(name, set()).add(version)
    if versions:
        stated = ", ".join(
            f"{name} {' and '.join(sorted(found))}" for name, found in sorted(versions.items())
        )
        block.notes.append(f"Versions of these: {stated}.")
    return block


def comparison(results: dict[str, Any]) -> str:
    """Return a table for a terminal, with notes."""
    block = matrix(results)
    return "\n\n".join([aligned(block.rows), *(note.strip("*") for note in block.notes)])


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Return rows for a terminal: columns to the right, a reason instead of figures as long as it is."""
    reasons = [row[1].startswith("none: ") for row in rows]
    shown = [row for row, reason in zip(rows, reasons, strict=True) if not reason]
    first = max(len(row[0]) for row in rows)
    rest = [max(len(row[column]) for row in shown) for column in range(1, len(rows[0]))]
    lines = []
    for row, reason in zip(rows, reasons, strict=True):
        cells = (
            row[1:2]
            if reason
            else tuple(text.rjust(size) for text, size in zip(row[1:], rest, strict=True))
        )
        lines.append("  ".join([row[0].ljust(first), *cells]))
    return "\n".join(lines)


def markdown(rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown, the first row as head."""
    head, *body = [tuple(text.replace("|", "\\|") for text in row) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ("---",) * len(head), *body])


def of(line: dict[str, Any]) -> list[Block]:
    """Return a line's tables."""
    return blocks(line["results"], RATES.get(line["benchmark"], RATE))


def plot_name(line: dict[str, Any]) -> str:
    """Return the file name of a line's plot."""
    return (
        re.sub(
            r"[^a-z0-9]+", "-", f"{line['benchmark']} {machine(line)} {variant(line)}".lower()
        ).strip("-")
        + ".png"
    )


def plotted(line: dict[str, Any]) -> list[Block]:
    """Return what of a line is worth a plot: several rates, or curves."""
    return [block for block in of(line) if len(block.bars) > 1 or block.curves]


def is_ours(benchmark: str, name: str) -> bool:
    """Tell whether a bar is memload's own."""
    return re.fullmatch(OWN.get(benchmark, OURS), name) is not None


def ticks(most: float) -> list[float]:
    """Return round numbers from nought to the highest that is no more than this, five steps or fewer."""
    power = 10.0 ** math.floor(math.log10(most))
    step = next(size * power for size in (0.2, 0.5, 1.0, 2.0) if most / (size * power) < 6)
    return [number * step for number in range(int(most / step * (1 + 1e-9)) + 1)]


def draw(line: dict[str, Any], path: Path) -> None:
    """Draw what is worth a plot, one below the other, each with an axis of its own from nought."""
    scale = 2
    small, large = (ImageFont.load_default(size * scale) for size in (13, 16))

    def written(text: str) -> str:
        """Leave out what Pillow's font lacks."""
        return text.translate(str.maketrans({"×": "x", "›": ">", "µ": "u", "→": ">", "⁸": "^8"}))

    panels = plotted(line)
    row, wide, tall = 24 * scale, 420 * scale, 240 * scale
    names = [written(name) for block in panels for name, _ in [*block.bars, *block.failed]] or [""]
    left = max(60 * scale, round(max(small.getlength(name) for name in names)) + 24 * scale)
    heights = [
        ((len(block.bars) + len(block.failed)) * row + 62 * scale if len(block.bars) > 1 else 0)
        + (tall + 60 * scale if block.curves else 0)
        for block in panels
    ]
    heading = f"{line['benchmark']}{', ' * bool(variant(line))}{variant(line)}"
    least = max(large.getlength(heading), small.getlength(machine(line)) + 0.0) + 24 * scale
    size = (round(max(least, left + wide + 110 * scale)), sum(heights) + 84 * scale)
    image = Image.new("RGB", size, "white")
    paint = ImageDraw.Draw(image)
    paint.text((12 * scale, 10 * scale), written(heading), "#222222", large)
    paint.text((12 * scale, 32 * scale), written(machine(line)), "#777777", small)
    across = 12 * scale
    if any(len(block.bars) > 1 for block in panels):
        for colour, what in ((COLOURS[0], "memload"), (COLOURS[-1], "others, and limits")):
            paint.rectangle((across, 55 * scale, across + 12 * scale, 65 * scale), fill=colour)
            paint.text((across + 18 * scale, 60 * scale), what, "#222222", small, anchor="lm")
            across += round(small.getlength(what)) + 40 * scale
    top = 76 * scale
    for block in panels:
        if len(block.bars) > 1:
            what = "images/s, median and quartiles"
            title = f"{block.title}: {what}" if block.title else what
            paint.text((12 * scale, top), written(title), "#222222", small)
            top += 24 * scale
            most = max(value["upper_quartile"] for _, value in block.bars) or 1
            bottom = top + row * (len(block.bars) + len(block.failed))
            for value in ticks(most):
                x = left + wide * value / most
                paint.line((x, top, x, bottom), "#dddddd", scale)
                paint.text(
                    (x, bottom + 11 * scale), f"{value:,.10g}", "#777777", small, anchor="mm"
                )
            for name, value in block.bars:
                low, middle, high = (
                    left + wide * max(0, value[key]) / most
                    for key in ("lower_quartile", "median", "upper_quartile")
                )
                centre = top + row / 2
                colour = COLOURS[0] if is_ours(line["benchmark"], name) else COLOURS[-1]
                paint.text((left - 8 * scale, centre), written(name), "#222222", small, anchor="rm")
                paint.rectangle((left, top + 4 * scale, middle, top + row - 4 * scale), fill=colour)
                paint.line((low, centre, high, centre), "#222222", scale)
                for end in (low, high):
                    paint.line((end, top + 8 * scale, end, top + row - 8 * scale), "#222222", scale)
                figure = (max(middle, high) + 8 * scale, centre)
                paint.text(figure, number(value["median"]), "#222222", small, anchor="lm")
                top += row
            for name, reason in block.failed:
                paint.text(
                    (left - 8 * scale, top + row / 2), written(name), "#777777", small, anchor="rm"
                )
                why = written(f"none: {reason}"[:60])
                paint.text((left + 8 * scale, top + row / 2), why, "#777777", small, anchor="lm")
                top += row
            top += 38 * scale
        if block.curves:
            curves(paint, block, (left, top, left + wide, top + tall), small, scale)
            top += tall + 60 * scale
    image.quantize(256).save(path, optimize=True)


def curves(
    paint: ImageDraw.ImageDraw, block: Block, box: tuple[int, int, int, int], font: Any, scale: int
) -> None:
    """Draw curves over the number of their steps, with their names and the ends of both axes."""
    left, top, right, bottom = box
    most = max(max(curve) for _, curve in block.curves)
    least = min(0.0, *(point for _, curve in block.curves for point in curve))
    longest = max(len(curve) for _, curve in block.curves)
    paint.text(
        (12 * scale, top),
        f"{block.title}: {block.curve}" if block.title else block.curve,
        "#222222",
        font,
    )
    top += 24 * scale
    paint.line((left, top, left, bottom, right, bottom), "#777777", scale)
    paint.text((left - 8 * scale, top), number(most), "#777777", font, anchor="rm")
    paint.text((left - 8 * scale, bottom), number(least), "#777777", font, anchor="rm")
    paint.text((right, bottom + 14 * scale), f"{longest} steps", "#777777", font, anchor="rm")
    for place, (name, curve) in enumerate(block.curves):
        colour = COLOURS[place % len(COLOURS)]
        points = [
            (left + (right - left) * step / max(1, longest - 1),
             bottom - (bottom - top) * (value - least) / ((most - least) or 1))
            for step, value in enumerate(curve)
        ]  # fmt: skip
        # equal curves lie on one another: the later ones are thinner
        paint.line(points, colour, max(1, (3 - place) * scale))
        paint.text(
            (right - 8 * scale, top + (8 + 18 * place) * scale), name, colour, font, anchor="rm"
        )


def section(line: dict[str, Any], landed: dict[str, str] | None = None) -> str:
    """Return one line in Markdown; ``landed`` are commits as `commits` gives them."""
    driver = f", driver {line['machine']['driver']}" if line["machine"].get("driver") else ""
    versions = ", ".join(
        f"{name} {what}" for name, what in line["versions"].items() if what != "not installed"
    )
    facts = [
        f"{line['when'][:10]}, commit {commit(line, landed or {})}",
        *([f"**A partial run**: {', '.join(line['partial'])}"] if "partial" in line else []),
        *([f"**Remark**: {line['remark']}"] if "remark" in line else []),
        f"Machine: {machine(line)}{driver}",
        "Parameters: "
        + ", ".join(f"{name} {number(value)}" for name, value in line["parameters"].items()),
        *([f"Command: `{line['command']}`"] if "command" in line else []),
        f"Versions: {versions}",
    ]
    parts = ["\n".join(f"- {fact}" for fact in facts)]
    title = ""
    for block in of(line):
        parts += [f"**{block.title}**"] if block.title != title else []
        title = block.title
        parts += [markdown(block.rows), *block.notes]
    if plotted(line):
        parts.append(f"![{line['benchmark']}](plots/{plot_name(line)})")
    return "\n\n".join(parts)


def text(lines: list[dict[str, Any]], landed: dict[str, str]) -> str:
    """Return RESULTS.md."""
    parts = [
        "# Results",
        "Generated from the lines in [`results/`](results) by `python benchmarks/report.py`: the newest of each "
        "benchmark and kind of machine, partial runs only where there is no whole one. Do not edit. Medians, with "
        "lower and upper quartile in brackets. Only figures of one table are from one run, and nothing is to be "
        "compared across tables.",
    ]
    last = None
    for line in lines:
        if line["benchmark"] != last:
            last = line["benchmark"]
            source = HERE / f"{last}.py"
            about = ast.get_docstring(ast.parse(source.read_text())) if source.exists() else None
            parts.append(f"## {last}")
            if about:
                summary = about.split("\n\n")[0].replace("``", "`")
                parts.append(f"{summary} [{source.name}]({source.name}) says how it is measured.")
        parts += [
            f"### {machine(line)}{'; ' * bool(variant(line))}{variant(line)}",
            section(line, landed),
        ]
    return "\n\n".join(parts) + "\n"


def unsupported(readme: str, lines: list[dict[str, Any]]) -> list[str]:
    """Return what the tables of a README quote that does not stand in these lines, rounded as it is there.

    A row of figures ends with a comment that names its benchmarks, or parts of them, with semicolons between:
    ``<!-- results: cold; feeds › 224×224×3, batch 256 -->``. Numbers that are in names or parameters of these are
    settings, and may be quoted too; shapes and what is in backquotes are left out.
    """
    wrong = []
    for row in (row for row in readme.splitlines() if row.startswith("|")):
        mark = re.search(r"<!-- results: (.*?) -->", row)
        if mark is None:
            wrong += (
                [f"no comment names the results of: {row}"]
                if re.search(r"\d images/s", row)
                else []
            )
            continue
        values, settings = quotable(mark[1].split("; "), lines)
        plain = re.sub(r"`.*?`|<!--.*?-->", "", row)
        for found in re.finditer(r"(?<![\w.,×-])\d[\d,]*(?:\.\d+)?(?![\w×]|[.,]\d)", plain):
            percent = re.match(r"(?: to [\d.]+)? ?%", plain[found.end() :])
            scale = 0.01 if percent else 1e6 if plain.startswith(" million", found.end()) else 1
            if found[0] not in settings and not any(
                rounds_to(value / scale, found[0]) for value in values
            ):
                wrong.append(f"{found[0]}, not in {mark[1]}: {row}")
    return wrong


def quotable(names: list[str], lines: list[dict[str, Any]]) -> tuple[list[float], set[str]]:
    """Return the values of benchmarks or of parts of them, and the numbers in their names and parameters."""
    values: list[float] = []
    settings: set[str] = set()

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(inner, f"{path} › {name}")
        elif isinstance(value, int | float) and any(
            f"{path} ".startswith(f"{name} ") for name in names
        ):
            values.append(value)
            settings.update(re.findall(r"\d[\d,.]*", path))

    for line in lines:
        walk(line["results"], line["benchmark"])
        if any(name.split(" › ")[0] == line["benchmark"] for name in names):
            of_run = [*line["parameters"].values(), line["machine"]["cores"]]
            values += [value for value in of_run if isinstance(value, int | float)]
    return values, settings


def rounds_to(value: float, figure: str) -> bool:
    """Tell whether a value is this figure when rounded to its digits; 62,500 has three of them, 100 has two."""
    digits = figure.replace(",", "")
    fraction = len(digits.partition(".")[2])
    step = (
        10.0**-fraction
        if fraction
        else 10.0 ** max(0, len(digits) - max(2, len(digits.rstrip("0"))))
    )
    return abs(value - float(digits)) <= step / 2 * (1 + 1e-9)


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if RESULTS.md is not up to date"
    )
    options = parser.parse_args()
    lines, target, plots = newest(HERE / "results"), HERE / "RESULTS.md", HERE / "plots"
    landed = commits(HERE / "results")
    if options.check:
        current = target.exists() and target.read_text() == text(lines, landed)
        print(
            "up to date"
            if current
            else "RESULTS.md is not up to date: run python benchmarks/report.py"
        )
        return 0 if current else 1
    target.write_text(text(lines, landed))
    plots.mkdir(exist_ok=True)
    drawn = {plot_name(line): line for line in lines if plotted(line)}
    for name, line in drawn.items():
        draw(line, plots / name)
    for path in plots.glob("*.png"):
        if path.name not in drawn:
            path.unlink()
    print(f"{target.name}: {len(lines)} results, {len(drawn)} plots")
    return 0


if __name__ == "__main__":
    from record import run_main

    run_main(main)
