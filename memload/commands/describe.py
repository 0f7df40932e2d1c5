"""The commands that describe a data set: info, verify and preview."""

import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import click

from memload.commands import values
from memload.commands.output import echo, print_json
from memload.wording import counted, listed, shape_text

#: Entries that are printed of a long list of names, such as the columns of a table.
_MOST_ENTRIES = 12


@click.command()
@click.argument("path", metavar="OUT.BIN")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(path: str, as_json: bool) -> None:
    """Describe OUT.BIN, or say how far its build is. An index will do, too."""
    from memload import inspection
    from memload.building.status import build_status

    status = build_status(path)
    facts = {} if status is not None and not status.replaces else inspection.info(path)
    if as_json:
        print_json({**facts, **({} if status is None else {"unfinished_build": status.as_dict()})})
        return
    if facts:
        _print_facts(facts)
    if status is not None:
        echo(str(status))


def _print_facts(facts: dict[str, Any]) -> None:
    """Print what is known of a data set, with units, and with what is long summed up."""
    facts["arrays"] = {name: _array_line(array) for name, array in facts["arrays"].items()}
    facts["columns"] = {name: _column_line(column) for name, column in facts["columns"].items()}
    for name, counts in facts.pop("category_counts", {}).items():
        facts["categories"][name] = _with_counts(facts["categories"][name], counts)
    statistics = facts["statistics"]
    for name in {"source_width", "source_height"} & statistics.keys():
        statistics[name] = "{:,} to {:,} pixels".format(*statistics[name])
    if counts := statistics.get("class_counts"):
        statistics["class_counts"] = f"{min(counts):,} to {max(counts):,} samples in each class"
        if len(counts) <= _MOST_ENTRIES:
            statistics["class_counts"] = _with_counts(facts["classes"], counts)
    for line in _lines(facts):
        echo(line)


def _array_line(array: dict[str, Any]) -> str:
    """Describe an array: ``mask, 64×64 uint8, 260 rows, 1,069,056 bytes in out.mask.bin``."""
    shape, files = shape_text(array["shape"]), array["files"]
    return (
        f"{array['kind']}, {shape} {array['dtype']}, {counted(array['rows'], 'row')}, "
        f"{array['bytes']:,} bytes in {listed(files, _MOST_ENTRIES)}"
    )


def _column_line(column: dict[str, Any]) -> str:
    """Describe a column: ``float32 5×2 points``."""
    kind = "points" * column["points"] + "boxes" * column["boxes"]
    return " ".join(filter(None, [column["dtype"], shape_text(column["shape"][1:]), kind]))


def _with_counts(names: Sequence[str], counts: Sequence[int]) -> list[str]:
    return [f"{name} {count:,}" for name, count in zip(names, counts, strict=True)]


def _lines(facts: dict[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from _lines(dict(islice(value.items(), _MOST_ENTRIES)), indent + "  ")
            if len(value) > _MOST_ENTRIES:
                yield f"{indent}  … ({len(value):,})"
        elif isinstance(value, list):
            first = value[:_MOST_ENTRIES]
            shown = [f"{item:.4f}" if isinstance(item, float) else str(item) for item in first]
            if len(value) > _MOST_ENTRIES:
                shown.append(f"… ({len(value):,})")
            yield f"{indent}{name}: {', '.join(shown)}"
        else:
            yield f"{indent}{name}: {value}"


@click.command()
@click.argument("path", metavar="OUT.BIN")
@click.option(
    "--num-threads",
    type=click.IntRange(min=1),
    help="Number of threads. Default: one for each core.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
def verify(path: str, num_threads: int | None, as_json: bool) -> None:
    """Compare all files of OUT.BIN with their checksums. The exit status is 1 if any differs."""
    from memload import inspection

    report = inspection.verify(path, num_threads=num_threads)
    if as_json:
        print_json({"path": path, **report.as_dict()})
        sys.exit(0 if report.ok else 1)
    for problem in report.problems:
        echo(f"memload: {problem}", err=True)
    for damaged in report.damaged:
        file, array = report.path.parent / damaged.file, damaged.array
        rows, keys = listed(damaged.bad_rows, 20), listed(damaged.bad_keys, 5)
        echo(
            f"memload: {file} is damaged: {len(damaged.bad_rows):,} of "
            f"{counted(damaged.rows, 'row')}{'' if array == 'image' else f' of array {array!r}'} "
            f"changed after they were written: rows {rows}{f' ({keys})' if keys else ''}. "
            "Restore the file, or make it again.",
            err=True,
        )
    if not report.ok:
        sys.exit(1)
    echo(f"{path}: {counted(report.rows, 'row')}, {report.bytes:,} bytes, all as they were written")


@click.command()
@click.argument("path", metavar="OUT.BIN")
@click.argument("output", metavar="GRID.PNG", type=values.FILE)
@click.option("--count", type=click.IntRange(min=1), default=64, help="Number of random samples.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random choice.")
@click.option(
    "--indices",
    type=values.numbers,
    metavar="I,J,…",
    help="Show these samples instead of random ones.",
)
@click.option("--class", "class_name", help="Show only samples of this class, or with this label.")
@click.option("--mask", metavar="NAME", help="Show this mask. Default: the first.")
@click.option(
    "--tile",
    type=click.IntRange(min=8, max=2048),
    default=128,
    help="Width of each sample in pixels.",
)
def preview(path: str, output: str, **options: Any) -> None:
    """Draw samples of OUT.BIN with labels, a mask, boxes and points.

    \b
      memload preview out.bin grid.png
    """
    import memload

    shown = memload.preview(path, output, **options)
    echo(f"{output}: {counted(len(shown), 'sample')} of {path}")
