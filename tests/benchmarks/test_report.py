"""RESULTS.md is what report.py makes of the recorded lines."""

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import harness  # noqa: E402
import report  # noqa: E402


def line(when: str, results: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "benchmark": "loader",
        "when": when,
        "commit": "abc",
        "machine": {"cpu": "a CPU", "cores": 2},
        "versions": {"numpy": "2.0", "jpeg4py": "not installed"},
        "parameters": {"images": 8000},
        "results": results,
        **more,
    }


def test_the_page_and_its_plots_are_up_to_date() -> None:
    lines = report.newest(BENCHMARKS / "results")
    page = (BENCHMARKS / "RESULTS.md").read_text()
    assert page == report.text(lines), "run python benchmarks/report.py"
    plots = {report.plot_name(line) for line in lines if report.plotted(line)}
    assert {path.name for path in (BENCHMARKS / "plots").iterdir()} == plots


def test_a_partial_run_does_not_replace_a_complete_one(tmp_path: Path) -> None:
    complete, partial = line("1", {"a": 1}), line("2", {"a": 2}, partial=["--images 5"])
    for lines, expected in (([complete, partial], "1"), ([partial], "2")):
        text = "".join(f"{harness.json.dumps(one)}\n" for one in lines)
        (tmp_path / "loader.jsonl").write_text(text)
        assert [one["when"] for one in report.newest(tmp_path)] == [expected]


def test_names_with_the_same_values_become_one_table_that_names_failures() -> None:
    rates = harness.spread([10.0, 20.0, 30.0])
    results = {
        "memload": {"images/s": rates, "cores": 2},
        "other": {"images/s": rates, "cores": 1, "versions": {"numpy": "2.0"}},
        "missing": {"error": "it is not installed"},
    }
    (table,) = report.tables(results)
    assert table.markdown().splitlines() == [
        "|  | images/s | cores |",
        "| --- | --- | --- |",
        "| memload | 20.0 (10.0 to 30.0) | 2 |",
        "| other | 20.0 (10.0 to 30.0) | 1 |",
        "| missing | not measured: it is not installed |  |",
        "",
        "Medians of 3 rounds.",
        "",
        "Versions: numpy 2.0.",
    ]


@pytest.mark.usefixtures("matplotlib_fonts")
def test_rates_are_plotted(tmp_path: Path) -> None:
    rates = {"np.take": harness.spread([1.0, 2.0]), "memload, 1 threads": harness.spread([3.0])}
    shown = line("1", {**rates, "one / other": harness.spread([1.0]), "loss": {"loss": [2.0, 1.0]}})
    assert report.plotted(shown) == {"": rates}
    report.draw(shown, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.usefixtures("matplotlib_fonts")
def test_curves_are_plotted_instead_of_rates(tmp_path: Path) -> None:
    curves = {"memload": [5.0, 6.0, 7.0], "ImageFolder": [6.0, 9.0, 12.0]}
    results = {
        "rates": {"a": {"images/s": harness.spread([1.0])}},
        "seconds after each epoch": curves,
    }
    shown = {**line("1", results), "benchmark": "cifar10"}
    assert report.plotted(shown) == {"seconds after each epoch": curves}
    report.draw(shown, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("value", "written"),
    [(0, "0"), (0.01234, "0.0123"), (12.3456, "12.3"), (1234.5, "1,234"), (40, "40"), (True, "True")],
)  # fmt: skip
def test_numbers_have_three_digits(value: Any, written: str) -> None:
    assert report.number(value) == written
