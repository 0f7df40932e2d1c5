import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
HERE = ROOT / "benchmarks"
spec = importlib.util.spec_from_file_location("report", HERE / "report.py")
report = importlib.util.module_from_spec(spec)
sys.modules["report"] = report  # where dataclasses look for their module
spec.loader.exec_module(report)

RATE = {"median": 1234.4, "lower_quartile": 1000.0, "upper_quartile": 1500.0, "repeats": 3}


def line(when, cores=2, **more):
    machine = {"cpu": "A|B", "cores": cores, "system": "Linux"}
    start = {"benchmark": "made", "when": when, "commit": "abc", "machine": machine, "versions": {"torch": "1"}}
    return {**start, "parameters": {"images": 8192}, "results": {"images/s": RATE, "ratio": RATE}, **more}


def test_results_are_up_to_date():
    written = (HERE / "RESULTS.md").read_text()
    assert written == report.text(report.newest(HERE / "results")), "run python benchmarks/report.py"


def test_plots_are_those_of_the_results():
    named = set(re.findall(r"\(plots/(.*?)\)", (HERE / "RESULTS.md").read_text()))
    assert named == {path.name for path in (HERE / "plots").glob("*.png")}, "run python benchmarks/report.py"


def test_readme_quotes_only_figures_that_stand_in_the_results():
    readme = (ROOT / "README.md").read_text()
    assert "<!-- results: " in readme
    assert report.unsupported(readme, report.newest(HERE / "results")) == []


def test_newest_of_each_machine_and_variant(tmp_path):
    lines = [line("2"), line("1"), line("1", cores=4), line("1", parameters={"fast": True}), line("3", benchmark="x")]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = report.newest(tmp_path)
    assert [(one["benchmark"], one["machine"]["cores"], one["when"]) for one in found] == [
        ("made", 2, "2"), ("made", 2, "1"), ("made", 4, "1"), ("x", 2, "3"),
    ]  # fmt: skip


def test_a_section_has_figures_parameters_and_command():
    found = report.section(line("2026-01-02T00:00:00Z", command="python x.py --fast"))
    assert "| images/s | 1,234 (1,000 to 1,500) | 3 |" in found
    assert "2026-01-02, commit abc" in found
    assert "images 8,192" in found
    assert "`python x.py --fast`" in found


def test_names_with_the_same_values_below_are_one_table():
    ways = {"dma": {"images/s": RATE, "cores": 0.5}, "uva": {"images/s": RATE, "cores": 0.25, "bytes": 3}}
    (block,) = report.of(line("1", results={"ResNet-18": ways}))
    assert (block.title, block.rows[0]) == ("ResNet-18", ("", "images/s", "cores", "bytes"))
    assert [row[2:] for row in block.rows[1:]] == [("0.500", ""), ("0.250", "3")]
    assert block.bars == [("dma", RATE), ("uva", RATE)]


def test_names_with_other_values_below_are_tables_of_their_own():
    found = report.of(line("1", results={"copy": RATE, "first": {"s": 1.0}, "memory": {"MB": 2.0, "GB": 3}}))
    assert [(block.title, len(block.rows)) for block in found] == [("", 2), ("first", 2), ("memory", 3)]


@pytest.mark.parametrize("others", [0.0, 11.0])
def test_a_way_that_failed_is_a_row_and_a_busy_machine_is_told(others):
    way = {"images/s": RATE, "others, %": RATE | {"median": others}, "versions": {"numpy": "2"}}
    block = report.matrix({"one": way, "other": {"error": "no module"}})
    assert block.rows[2] == ("other", "none: no module", "")
    assert any("not quiet" in note for note in block.notes) == (others > 1)
    assert "Versions of these: numpy 2." in block.notes
    assert report.aligned(block.rows).splitlines()[2] == "other  none: no module"


def test_bars_are_as_long_as_their_rates_and_curves_are_drawn(tmp_path):
    slow = RATE | {"median": 500.0, "lower_quartile": 500.0, "upper_quartile": 500.0}
    fast = slow | {"median": 1000.0, "lower_quartile": 1000.0, "upper_quartile": 1000.0}
    rates = line("1", results={"slow, images/s": slow, "fast, images/s": fast})
    report.draw(rates, tmp_path / "rates.png")
    pixels = np.asarray(Image.open(tmp_path / "rates.png").convert("RGB"))
    widths = (pixels == (184, 191, 202)).all(2).sum(1)
    longest = [max(group) for some, group in itertools.groupby(widths, lambda width: width > 50) if some]
    assert longest == [longest[0], pytest.approx(2 * longest[0], abs=2)]
    report.draw(line("1", results={"loss": {"files": [2.0, 1.0], "memload": [2.0, 0.5]}}), tmp_path / "curves.png")
    assert (0x2F, 0x6F, 0xDE) in {
        colour for _, colour in Image.open(tmp_path / "curves.png").convert("RGB").getcolors()
    }


@pytest.mark.parametrize(
    ("value", "written"),
    [(0.012345, "0.0123"), (12345.6, "12,346"), (7, "7"), (True, "True"), (1.0, "1.00"), (99.99, "100"), (0.0, "0")],
)
def test_numbers_have_three_digits(value, written):
    assert report.number(value) == written


@pytest.mark.parametrize(
    ("row", "right"),
    [
        ("1,230 images/s <!-- results: made -->", True),
        ("**1,240 images/s** <!-- results: made -->", False),
        ("1,230 images/s <!-- results: loader -->", False),
        ("1,230 images/s <!-- results: made › images/s -->", True),
        ("1,230 images/s <!-- results: made › ratio of -->", False),
        ("8,192 of 32×32, 2 cores, `train(99)`, ResNet-50 <!-- results: made -->", True),
        ("123,440 % <!-- results: made -->", True),
        ("1,230 images/s", False),
        ("7 lines that are no figures", True),
    ],
)
def test_a_figure_has_to_stand_in_the_results_that_its_row_names(row, right):
    assert (report.unsupported(f"| {row} |", [line("1")]) == []) == right
