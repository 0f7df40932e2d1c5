"""Write what the results say into README.md and docs/, with docs/speed.svg, and RESULTS.md.

    python benchmarks/figures.py    # after a benchmark has added a line to results/

Pages are written by hand, with marks that are comments. What stands between a mark and the next
``<!---->`` is filled in; nothing else of a page is touched:

    <!-- from train_step, gpu, ResNet-50 -->
    The Loader trains <!-- Loader, dma › images/s -->4,714<!----> images/s on <!-- source -->…<!---->.

``from`` chooses the line that the marks behind it read: the newest of a benchmark, on a machine with
``gpu`` or with ``cpu`` alone, whose parameters contain these words. A figure is the path of a value
in the results, or in the line itself, such as ``machine › gpu``. Of values with quartiles it is the
median. Figures and numbers may be multiplied (``×``) and divided (``÷``), in their order. Numbers have
three or four digits, unless a format of Python's follows: ``a ÷ b as .1f``. No line of a paragraph
begins with a mark, as Markdown would end the paragraph there.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARK = re.compile(r"<!-- from (.+?) -->|(<!-- ([^>]+?) -->)[^<>]*<!---->")
#: The benchmarks with their titles in RESULTS.md, in the order of what a reader looks for.
TITLES = {
    "train_step": "Training a model",
    "inference": "Predicting with a model",
    "feeds": "Loading onto a GPU",
    "several_gpus": "Loading onto several GPUs",
    "compare": "Beside other libraries",
    "cifar10": "CIFAR-10, from files to an accuracy",
    "transforms": "Transforms",
    "cold": "Files that are not in RAM",
    "build": "Building",
    "accuracy": "What a network learns from stored squares",
    "copying": "Copying a data set",
}
#: Parameters that make two runs of a benchmark two results, not an old one and a new one.
VARIANTS = ("fast", "ranks", "model", "epochs")
#: Bars of docs/speed.svg: rows of `feeds` with their labels.
BARS = {
    "JPEGs in a DataLoader": "JPEGs in a DataLoader, {} workers",
    "DataLoader over MemmapDataset, fast_collate": "out.bin in a DataLoader",
    "Loader, pinned, 12 threads": "Loader, 12 threads copy (pinned)",
    "Loader, dma": "Loader, the GPU copies (dma)",
    "one copy": "limit: one copy of such a batch",
}
#: Of a table in RESULTS.md; figures of more kinds are one below the other.
MOST_COLUMNS = 8
BLUE, GREY = "#2f6fde", "#afb8c1"

Line = dict[str, Any]


# Lines


def newest(folder: Path = HERE / "results") -> list[Line]:
    """Return the newest line of each benchmark, number of GPUs and variant.

    A partial run counts only where there is no complete one.
    """
    files = [file.read_text().splitlines() for file in folder.glob("*.jsonl")]
    lines = [json.loads(line) for file in files for line in file]
    lines.sort(key=lambda line: ("partial" not in line, line["when"]))
    found = {
        (line["benchmark"], variant(line), line["machine"].get("gpus", 0)): line for line in lines
    }
    order = list(TITLES)
    return [found[key] for key in sorted(found, key=lambda key: (order.index(key[0]), *key))]


def variant(line: Line) -> str:
    """Return what distinguishes a line from others of the same benchmark, in words."""
    parameters = line["parameters"]
    return ", ".join(f"{name} {parameters[name]}" for name in VARIANTS if name in parameters)


def source(line: Line) -> str:
    """Return the machine and the day of a line."""
    facts = line["machine"]
    gpus = f"{facts['gpus']} × {facts['gpu']}, " if "gpu" in facts else ""
    remark = "; a remark is in RESULTS.md" if "remarks" in line else ""
    return f"{gpus}{facts['cores']} cores ({facts['cpu']}), {line['when'][:10]}{remark}"


def choose(lines: list[Line], words: str) -> Line:
    """Return the newest line that is meant by the words of a mark. Raises LookupError."""
    benchmark, kind, *others = words.split(", ")
    found = [
        line
        for line in lines
        if line["benchmark"] == benchmark
        and ("gpu" in line["machine"]) == (kind == "gpu")
        and set(others) <= {*map(str, line["parameters"].values()), *variant(line).split(", ")}
    ]
    if not found:
        raise LookupError(
            f"There is no result of {words}. Run that benchmark, or correct the mark."
        )
    return max(found, key=lambda line: line["when"])


# Marks


def fill(text: str, lines: list[Line]) -> str:
    """Return a page whose marks are filled in. Raises LookupError for one that says nothing."""
    chosen: Line = {"results": {}}

    def filled(mark: re.Match[str]) -> str:
        nonlocal chosen
        if mark[1]:
            chosen = choose(lines, mark[1])
            return mark[0]
        return f"{mark[2]}{figure(mark[3], chosen)}<!---->"

    return MARK.sub(filled, text)


def figure(mark: str, line: Line) -> str:
    """Return what a mark shows of a line."""
    formula, _, style = mark.partition(" as ")
    first, *others = re.split(r" ([×÷]) ", formula)
    value = operand(first, line)
    for sign, name in zip(others[::2], others[1::2], strict=True):
        value = value * operand(name, line) if sign == "×" else value / operand(name, line)
    return format(value, style) if style else number(value)


def operand(name: str, line: Line) -> Any:
    """Return a number, or the value at a path. Raises LookupError."""
    if re.fullmatch(r"[\d.e]+", name):
        return float(name)
    if name == "source":
        return source(line)
    for value in (line["results"], line):
        for key in name.split(" › "):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            return median(value)
    raise LookupError(f"{line.get('benchmark', 'No line')} has no '{name}'. Correct the mark.")


def median(value: Any) -> Any:
    """Return the median of a value with quartiles, or a value as it is."""
    return value["median"] if isinstance(value, dict) else value


def number(value: Any) -> str:
    """Return a number with three digits, from 1,000 on with four; texts as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if abs(value) >= 100 or isinstance(value, int):
        return f"{float(f'{value:.4g}'):,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


# docs/speed.svg


def picture(lines: list[Line]) -> str:
    """Return the picture of the README: images a second onto the GPU, a bar for each way."""
    line = choose(lines, "feeds, gpu")
    (rates,) = (rows for name, rows in line["results"].items() if name.startswith("what else"))
    widest = max(median(rates[row]) for row in BARS)
    title = f"Images a second on the GPU: 224×224, batches of 256, random order ({line['machine']['gpu']})"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 200" font-family="sans-serif" font-size="14">',
        '<rect width="800" height="200" fill="white"/>',
        f'<text x="10" y="24" font-size="15">{escape(title)}</text>',
    ]
    for place, (row, label) in enumerate(BARS.items()):
        rate, top = median(rates[row]), 40 + 31 * place
        width = round(400 * rate / widest, 1)
        color = GREY if label.startswith(("JPEGs", "limit")) else BLUE
        text = escape(label.format(line["parameters"]["workers"]))
        parts += [
            f'<text x="290" y="{top + 17}" text-anchor="end">{text}</text>',
            f'<rect x="300" y="{top}" width="{width}" height="24" fill="{color}"/>',
            f'<text x="{306 + width}" y="{top + 17}">{number(rate)}</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])


# RESULTS.md


def results_page(lines: list[Line]) -> str:
    """Return RESULTS.md: all figures of the newest lines."""
    parts = [
        "# All measurements",
        "The newest run of each benchmark. Figures are medians, with the quartiles in parentheses. Compare figures only "
        "within a table: other tables are from other runs. [Performance](../docs/performance.md) shows the most important "
        "ones, and `python benchmarks/figures.py` writes both pages from [`results/`](results).",
    ]
    for line in lines:
        parts.append(
            f"## {'; '.join(filter(None, [TITLES[line['benchmark']], variant(line), source(line)]))}"
        )
        if "partial" in line:
            parts.append(f"A shorter run than usual: {', '.join(line['partial'])}.")
        parts += line.get("remarks", [])
        parts.append(table(*rows_of(dict(leaves(line["results"])))))
        facts = {"commit": line["commit"], **line["parameters"], **line["versions"]}
        facts |= {"GPU driver": line["machine"]["driver"]} if "driver" in line["machine"] else {}
        parts.append(
            f"<small>{', '.join(f'{name} {value}' for name, value in facts.items())}</small>"
        )
    return "\n\n".join(parts) + "\n"


def leaves(results: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each figure, as marks have it, and the figure."""
    for name, value in results.items():
        if isinstance(value, dict) and "median" not in value:
            yield from leaves(value, f"{path}{name} › ")
        else:
            yield f"{path}{name}", cell(value)


def rows_of(found: dict[str, str]) -> tuple[list[str], Iterable[Sequence[str]]]:
    """Return columns and rows: one column for each last part of a path, if these are few."""
    ends = list(dict.fromkeys(path.rpartition(" › ")[2] for path in found))
    if len(ends) > MOST_COLUMNS or not all(" › " in path for path in found):
        return ["", "median (quartiles)"], found.items()
    rows = dict.fromkeys(path.rpartition(" › ")[0] for path in found)
    return ["", *ends], ([row, *(found.get(f"{row} › {end}", "") for end in ends)] for row in rows)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Return a figure in a few characters."""
    if not isinstance(value, dict) or value["repeats"] == 1:
        return number(median(value))
    low, high = (number(value[f"{side}_quartile"]) for side in ("lower", "upper"))
    return f"{number(value['median'])} ({low} to {high})"


def files(lines: list[Line]) -> dict[Path, str]:
    """Return all files that are written, with their contents."""
    return {page: fill(page.read_text(), lines) for page in PAGES} | {
        ROOT / "docs" / "speed.svg": picture(lines),
        HERE / "RESULTS.md": results_page(lines),
    }


if __name__ == "__main__":
    for path, text in files(newest()).items():
        path.write_text(text)
