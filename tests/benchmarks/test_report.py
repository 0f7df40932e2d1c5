import importlib.util
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
HERE = ROOT / "benchmarks"
spec = importlib.util.spec_from_file_location("report", HERE / "report.py")
report = importlib.util.module_from_spec(spec)
sys.modules["report"] = report  # where dataclasses look for their module
spec.loader.exec_module(report)

RATE = {"median": 1234.4, "lower_quartile": 1000.0, "upper_quartile": 1500.0, "repeats": 3}


def line(when, cores=2, **more):
    machine = {"cpu": "A|B", "cores": cores, "system": "Linux"}
    start = {
        "benchmark": "made",
        "when": when,
        "commit": "abc",
        "machine": machine,
        "versions": {"torch": "1"},
    }
    return {
        **start,
        "parameters": {"images": 8192},
        "results": {"images/s": RATE, "ratio": RATE},
        **more,
    }


def test_results_are_up_to_date():
    written = (HERE / "RESULTS.md").read_text()
    wanted = report.text(report.newest(HERE / "results"), report.commits(HERE / "results"))
    assert written == wanted, "run python benchmarks/report.py"


def git(*arguments):
    return subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    )


def test_every_commit_of_a_line_is_in_the_history_or_landed_in_one_that_is():
    landed = report.commits(HERE / "results")
    lines = [
        json.loads(text)
        for path in (HERE / "results").glob("*.jsonl")
        for text in path.read_text().splitlines()
    ]
    named = {one["commit"].partition("+")[0] for one in lines}
    assert all(
        re.fullmatch("[0-9a-f]{7,40}", commit) for commit in named | {*landed, *landed.values()}
    )
    assert not {*landed} & {*landed.values()}
    if (ROOT / ".git").exists() and git(
        "rev-parse", "--is-shallow-repository"
    ).stdout.strip() == "false":
        unknown = [
            commit
            for commit in (named - {*landed}) | {*landed.values()}
            if git("merge-base", "--is-ancestor", commit, "HEAD").returncode
        ]
        assert unknown == [], "say in benchmarks/results/commits.json where they landed"


def test_a_commit_that_is_not_in_the_history_is_told_with_the_one_that_has_it():
    landed = {"abc": "def"}
    assert report.commit(line("1"), landed) == "abc, which landed in def"
    assert (
        report.commit(line("1", commit="abc+changes"), landed)
        == "abc+changes, of which abc landed in def"
    )
    assert report.commit(line("1", commit="123+changes"), landed) == "123+changes"
    assert "commit abc, which landed in def" in report.text([line("2026-01-02T00:00:00Z")], landed)


def test_what_was_found_out_of_a_line_later_is_told_with_it(tmp_path):
    lines = [line("2026-01-01T00:00:00Z"), line("2026-01-02T00:00:00Z")]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    remark = {"benchmark": "made", "when": "2026-01-02T00:00:00Z", "remark": "too high"}
    (tmp_path / "remarks.json").write_text(json.dumps([remark | {"when": "2026-01-01T00:00:00Z"}]))
    assert "too high" not in report.text(report.newest(tmp_path), {})
    (tmp_path / "remarks.json").write_text(json.dumps([remark]))
    assert "- **Remark**: too high\n" in report.text(report.newest(tmp_path), {})


def test_every_remark_is_of_a_line():
    lines = [
        json.loads(text)
        for path in (HERE / "results").glob("*.jsonl")
        for text in path.read_text().splitlines()
    ]
    known = {(one["benchmark"], one["when"]) for one in lines}
    remarks = json.loads((HERE / "results" / "remarks.json").read_text())
    assert {(one["benchmark"], one["when"]) for one in remarks} <= known


def test_plots_are_those_of_the_results():
    named = set(re.findall(r"\(plots/(.*?)\)", (HERE / "RESULTS.md").read_text()))
    assert named == {path.name for path in (HERE / "plots").glob("*.png")}, (
        "run python benchmarks/report.py"
    )


def test_readme_quotes_only_figures_that_stand_in_the_results():
    readme = (ROOT / "README.md").read_text()
    assert "<!-- results: " in readme
    assert report.unsupported(readme, report.newest(HERE / "results")) == []


def test_newest_of_each_machine_and_variant(tmp_path):
    lines = [
        line("2"),
        line("1"),
        line("1", cores=4),
        line("1", parameters={"fast": True}),
        line("3", benchmark="x"),
    ]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = report.newest(tmp_path)
    assert [(one["benchmark"], one["machine"]["cores"], one["when"]) for one in found] == [
        ("made", 2, "2"), ("made", 2, "1"), ("made", 4, "1"), ("x", 2, "3"),
    ]  # fmt: skip


def test_a_partial_run_takes_no_whole_ones_place_and_says_that_it_is_one(tmp_path):
    part = {"partial": ["--only FFCV"]}
    lines = [line("1"), line("2", **part), line("3", cores=4, **part)]
    (tmp_path / "made.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = report.newest(tmp_path)
    assert [one["when"] for one in found] == ["1", "3"]
    assert ["**A partial run**: --only FFCV" in report.section(one) for one in found] == [
        False,
        True,
    ]


def test_a_section_has_figures_parameters_and_command():
    found = report.section(line("2026-01-02T00:00:00Z", command="python x.py --fast"))
    assert "| images/s | 1,234 (1,000 to 1,500) | 3 |" in found
    assert "2026-01-02, commit abc" in found
    assert "images 8,192" in found
    assert "`python x.py --fast`" in found


def test_names_with_the_same_values_below_are_one_table():
    ways = {
        "dma": {"images/s": RATE, "cores": 0.5},
        "uva": {"images/s": RATE, "cores": 0.25, "bytes": 3},
    }
    (block,) = report.of(line("1", results={"ResNet-18": ways}))
    assert (block.title, block.rows[0]) == ("ResNet-18", ("", "images/s", "cores", "bytes"))
    assert [row[2:] for row in block.rows[1:]] == [("0.500", ""), ("0.250", "3")]
    assert block.bars == [("dma", RATE), ("uva", RATE)]


def test_names_with_other_values_below_are_tables_of_their_own():
    found = report.of(
        line("1", results={"copy": RATE, "first": {"s": 1.0}, "memory": {"MB": 2.0, "GB": 3}})
    )
    assert [(block.title, len(block.rows)) for block in found] == [
        ("", 2),
        ("first", 2),
        ("memory", 3),
    ]


@pytest.mark.parametrize("others", [0.0, 11.0])
def test_a_way_that_failed_is_a_row_and_a_busy_machine_is_told(others):
    way = {"images/s": RATE, "others, %": RATE | {"median": others}, "versions": {"numpy": "2"}}
    block = report.matrix({"one": way, "other": {"error": "no module"}})
    assert block.rows[2] == ("other", "none: no module", "")
    assert any("not quiet" in note for note in block.notes) == (others > 1)
    assert "Versions of these: numpy 2." in block.notes
    assert report.aligned(block.rows).splitlines()[2] == "other  none: no module"


def test_a_table_of_ways_that_all_failed_has_their_reasons():
    failed = {"one": {"error": "no module"}, "other": {"error": "no device"}}
    assert report.comparison(failed).splitlines()[1:] == [
        "one    none: no module",
        "other  none: no device",
    ]
    assert report.markdown(report.matrix(failed).rows).splitlines()[2:] == [
        "| one | none: no module |", "| other | none: no device |",
    ]  # fmt: skip


def test_values_without_repeats_are_told():
    block = report.matrix({"one": {"images/s": RATE, "memory, MB": 3.0, "pixels": "equal"}})
    assert block.notes[0].endswith("Measured once, without repeats: memory, MB.")
    assert "once" not in report.matrix({"one": {"images/s": RATE}}).notes[0]


@pytest.mark.parametrize(
    ("benchmark", "name", "ours"),
    [
        ("transforms", "resized crop, flip, normalise, images/s", True),
        ("transforms", "flip, normalise, 32, plain, images/s", False),
        ("transforms", "copy, on the device, images/s", False),
        ("transforms", "kornia, images/s", False),
        ("train_step", "the same in CudaPrefetcher", True),
        ("train_step", "DataLoader, 16 workers", True),
        ("train_step", "synthetic, again", False),
        ("feeds", "the same in CudaPrefetcher", True),
        ("feeds", "the same in Apex's prefetcher", False),
        ("feeds", "copy", False),
        ("compare", "NumPy memmap, default collate, 2 workers", False),
        ("compare", "JPEG, DataLoader, Pillow, 2 workers", False),
        ("loader", "ffcv, 1 workers", False),
        ("build", "bare", False),
    ],
)
def test_what_is_memloads_own_is_told_from_others_in_plots(benchmark, name, ours):
    assert report.is_ours(benchmark, name) == ours


@pytest.mark.parametrize(
    ("most", "last"), [(8.4e6, 8e6), (378777.0, 3e5), (1.0, 1.0), (0.11, 0.1), (59.0, 50.0)]
)
def test_axes_have_round_numbers_that_lie_within(most, last):
    found = report.ticks(most)
    assert found[0] == 0
    assert found[-1] == pytest.approx(last)
    assert 3 <= len(found) <= 6


def test_ways_that_failed_are_named_in_a_plot(tmp_path):
    way = {"images/s": RATE, "cores": 1.0}
    pictures = []
    for more in ({}, {"three": {"error": "no module"}}):
        report.draw(line("1", results={"one": way, "two": way, **more}), tmp_path / "plot.png")
        pictures.append(np.asarray(Image.open(tmp_path / "plot.png").convert("L")))
    without, named = pictures
    height = 48  # of a row, at twice the size
    assert len(named) == len(without) + height
    row = named[(76 + 24) * 2 + 2 * height :][
        :height
    ]  # behind the heading and the two that have bars
    assert ((row[:, :120] < 150).any(), (row[:, 150:] < 150).any()) == (True, True)


def test_bars_are_as_long_as_their_rates_and_curves_are_drawn(tmp_path):
    slow = RATE | {"median": 500.0, "lower_quartile": 500.0, "upper_quartile": 500.0}
    fast = slow | {"median": 1000.0, "lower_quartile": 1000.0, "upper_quartile": 1000.0}
    rates = line("1", results={"slow, images/s": slow, "fast, images/s": fast})
    report.draw(rates, tmp_path / "rates.png")
    pixels = np.asarray(Image.open(tmp_path / "rates.png").convert("RGB"))
    widths = (pixels == (184, 191, 202)).all(2).sum(1)
    longest = [
        max(group) for some, group in itertools.groupby(widths, lambda width: width > 50) if some
    ]
    assert longest == [longest[0], pytest.approx(2 * longest[0], abs=2)]
    report.draw(
        line("1", results={"loss": {"files": [2.0, 1.0], "memload": [2.0, 0.5]}}),
        tmp_path / "curves.png",
    )
    assert (0x2F, 0x6F, 0xDE) in {
        colour for _, colour in Image.open(tmp_path / "curves.png").convert("RGB").getcolors()
    }


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0.012345, "0.0123"),
        (12345.6, "12,346"),
        (7, "7"),
        (True, "True"),
        (1.0, "1.00"),
        (99.99, "100"),
        (0.0, "0"),
    ],
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
