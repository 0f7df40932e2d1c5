"""Figures of the pages come from the newest lines in benchmarks/results, through marks."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks import figures


def line(when, results, benchmark="feeds", gpus=1, **more):
    machine = {"cpu": "a CPU", "cores": 2} | ({"gpu": "a GPU", "gpus": gpus} if gpus else {})
    facts = {"commit": "abc", "versions": {"numpy": "2.0"}, "parameters": {"model": "stem"}}
    return {
        "benchmark": benchmark,
        "when": when,
        "machine": machine,
        "results": results,
        **facts,
        **more,
    }


RATES = {"median": 367_052.1, "lower_quartile": 1.0, "upper_quartile": 2.0, "repeats": 3}
LINES = [line("2026-11-23T01:02:03Z", {"a": {"b, c": RATES, "share": 0.9956}, "seconds": 15.139})]


def test_all_pages_are_up_to_date():
    pages = figures.files(figures.newest())
    old = [path.name for path, text in pages.items() if path.read_text() != text]
    assert old == [], "run python benchmarks/figures.py"
    assert "<!-- from " in (figures.ROOT / "docs" / "performance.md").read_text()


@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("a › b, c", "367,100"),
        ("a › b, c ÷ 1000 as .1f", "367.1"),
        ("2 × seconds ÷ seconds", "2.00"),
        ("a › share as .1%", "99.6%"),
        ("seconds", "15.1"),
        ("machine › gpu", "a GPU"),
        ("when as .10", "2026-11-23"),
        ("source", "1 × a GPU, 2 cores (a CPU), 2026-11-23"),
    ],
)
def test_marks_are_filled_in_and_nothing_else(mark, shown):
    text = "| 1 <!-- from feeds, gpu, stem --> | <!-- {} -->{}<!----> images/s, 3 |\n"
    assert figures.fill(text.format(mark, "old"), LINES) == text.format(mark, shown)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- from feeds, gpu, stem --><!-- a › d -->1<!---->",  # no such row
        "<!-- from feeds, gpu, stem --><!-- a › b, c ÷ a › d -->1<!---->",
        "<!-- from feeds, cpu --><!-- seconds -->1<!---->",  # was not measured without a GPU
        "<!-- from feeds, gpu, ResNet-50 --><!-- seconds -->1<!---->",
        "<!-- seconds -->1<!---->",  # of what?
    ],
)
def test_a_mark_that_means_nothing_fails(text):
    with pytest.raises(LookupError, match="mark"):
        figures.fill(text, LINES)


def test_a_comment_that_is_no_mark_stays():
    text = "<!-- compared -->\n| a | b |\n<!-- end -->\n"
    assert figures.fill(text, LINES) == text


def test_only_the_newest_line_of_a_kind_counts_and_a_complete_one_first(tmp_path):
    lines = [
        line("1", {"a": 1}),
        line("2", {"a": 2}),
        line("3", {"a": 3}, partial=["--images 5"]),
        line("4", {"a": 4}, gpus=0, partial=["--images 5"]),
        line("5", {"a": 5}, gpus=4),
        line("6", {"a": 6}, parameters={"model": "ResNet-18"}),
    ]
    (tmp_path / "feeds.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    found = figures.newest(tmp_path)
    assert sorted(one["when"] for one in found) == ["2", "4", "5", "6"]
    assert figures.choose(found, "feeds, gpu, stem")["when"] == "5"


def test_all_figures_of_a_line_are_rows_by_the_paths_of_marks():
    results = {
        "memload": {"images/s": RATES, "cores": 2},
        "missing": {"error": "it is not installed"},
    }
    assert list(figures.leaves(results)) == [
        ("memload › images/s", "367,100 (1.00 to 2.00)"),
        ("memload › cores", "2"),
        ("missing › error", "it is not installed"),
    ]


def test_a_table_has_a_column_for_each_kind_of_figure_if_these_are_few():
    found = {"a › images/s": "1", "a › cores": "2", "b › images/s": "3"}
    columns, rows = figures.rows_of(found)
    assert columns == ["", "images/s", "cores"]
    assert list(rows) == [["a", "1", "2"], ["b", "3", ""]]
    many = {f"way {number}": "1" for number in range(9)}
    assert list(figures.rows_of(many)[1]) == list(many.items())


def test_the_page_of_all_results_has_a_section_for_each_line():
    page = figures.results_page(LINES).splitlines()
    heading = page.index(
        "## Loading onto a GPU; model stem; 1 × a GPU, 2 cores (a CPU), 2026-11-23"
    )
    assert page.index("| a › b, c | 367,100 (1.00 to 2.00) |") > heading


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (0.01234, "0.0123"), (12.3456, "12.3"), (123_456, "123,500"), (40, "40"), (True, "True")],
)  # fmt: skip
def test_numbers_have_three_or_four_digits(value, written):
    assert figures.number(value) == written
