"""What `memload bench` finds out, prints and leaves alone; never how fast anything is."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import memload
from memload import bench
from memload.cli import main
from memload.storage.index import Index

Make = Callable[..., Index]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("matplotlib_fonts")]


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible, on the CPU."""
    for name, value in {
        "_SECONDS": 0,
        "_LONG_SECONDS": 0.01,
        "_ROUNDS": 2,
        "_LONG_ROUNDS": 1,
    }.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "available_cores", lambda: 2)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def lines_of(report: bench.Report) -> dict[str, bench.Line]:
    return {line.subject: line for line in report.lines}


def test_every_stage_has_a_rate_next_to_its_limit_or_a_reason(output: Path, folder: Path) -> None:
    report = bench.measure(output, images=folder)
    lines = lines_of(report)
    assert list(lines) == [
        "disk cold, random order",
        "disk warm, first touch",
        "gather, 1 thread",
        "gather, 2 threads",
        "to the GPU",
        *[f"feed {feed}" for feed in ("resident", "dma", "uva", "pinned", "cpu")],
        "transform train(16)",
        "Loader, cpu, train(16)",
        "JPEGs in a DataLoader, 2 workers",
    ]
    for line in report.lines:
        if line.images_s is None:
            assert line.reason
            continue
        assert line.images_s > 0
        assert line.gb_s == pytest.approx(line.images_s * 16 * 16 * 3 / 1e9)
        assert line.limit
        assert line.limit_images_s
        assert line.share
    unmeasured = {subject for subject, line in lines.items() if line.images_s is None}
    cuda = {"to the GPU", "feed resident", "feed dma", "feed uva", "feed pinned"}
    assert unmeasured - {"disk cold, random order"} == cuda  # some filesystems cannot be made cold


def test_the_share_is_the_median_over_the_rounds() -> None:
    line = bench.Line.of("a", [1.0, 9.0, 4.0], "b", [2.0, 10.0, 4.0], 1_000_000_000)
    assert (line.images_s, line.limit_images_s, line.share) == (4.0, 4.0, 0.9)
    assert (line.gb_s, line.rounds) == (4.0, 3)


def test_the_command_prints_json_with_all_facts(output: Path, folder: Path) -> None:
    done = run(output, "--json", "--images", folder)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    facts = ("samples", "sampled", "shape", "dtype", "batch_size", "rounds", "feed")
    expected = [12, 12, [16, 16, 3], "uint8", 8, 2, "cpu: the device is cpu"]
    assert [found[name] for name in facts] == expected
    assert found["machine"].keys() >= {"cpu", "cores", "system"}
    assert found["versions"]["torch"] == memload.inspection.environment()["torch"]
    assert found["results"][-1].keys() >= {"subject", "images_s", "gb_s", "limit", "share"}
    assert any("times as fast as a DataLoader" in note for note in found["notes"])


def test_a_part_of_a_large_data_set_is_measured(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(rows=(30, 30), shape=(8, 8, 3), columns={"label": np.arange(60) % 3})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(bench, "_SAMPLE_BYTES", 40 * 8 * 8 * 3)
    report = bench.measure(tmp_path / "made.bin")
    assert (report.facts["samples"], report.facts["sampled"]) == (60, 40)
    assert "measured on 40 of them" in report.text()
    assert lines_of(report)["Loader, cpu, train(8)"].images_s
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "facts",
    [
        {"shape": (7, 5, 1)},
        {"shape": (7, 5, 4), "rows": (3, 1, 2), "descr": "<f4"},
        {"rows": (1,), "columns": {}, "classes": None},
        {"row": np.array([4, 1, 1, 0, 2])},
    ],
    ids=["grey", "floats in shards", "one sample without columns", "rows in another order"],
)
def test_all_kinds_of_data_sets_are_measured(
    make_dataset: Make, tmp_path: Path, facts: dict[str, Any]
) -> None:
    make_dataset(**facts)
    lines = lines_of(bench.measure(tmp_path / "made.bin"))
    assert lines["feed cpu"].images_s
    assert [line.reason for line in list(lines.values())[-2:]] == ["", ""]


def test_a_disk_that_cannot_be_made_cold_is_a_line_with_the_reason(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    line = lines_of(bench.measure(output))["disk cold, random order"]
    assert (line.images_s, line.reason) == (None, "this system cannot drop pages from its cache")


def test_pictures_that_cannot_be_decoded_are_a_line_with_the_reason(
    output: Path, folder: Path
) -> None:
    for path in folder.rglob("*.jpg"):
        path.write_bytes(b"no picture")
    line = lines_of(bench.measure(output, images=folder))["JPEGs in a DataLoader, 2 workers"]
    assert line.images_s is None
    assert "cannot identify image file" in line.reason


def test_wrong_arguments_are_refused_in_a_line(output: Path, tmp_path: Path) -> None:
    done = run(output, "--images", tmp_path)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "has none of the 12 files looked for" in done.stderr
    assert "Give the folder that out.idx was built from" in done.stderr
    with pytest.raises(memload.MissingError):
        bench.measure(tmp_path / "none.bin")


@pytest.mark.parametrize(("name", "found"), [("speed.txt", "no picture"), ("no/speed.png", "cannot be written")])  # fmt: skip
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    monkeypatch.setattr(bench, "measure", None)
    before = sorted(tmp_path.iterdir())
    done = run(output, "--plot", tmp_path / name)
    assert (done.exit_code, done.stdout) == (1, "")
    assert found in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_plot_without_matplotlib_says_what_to_install(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    done = run(output, "--plot", tmp_path / "speed.png")
    assert done.exit_code == 1
    assert "pip install 'memload[plot]'" in done.stderr


def test_the_command_prints_a_table_and_writes_a_plot(output: Path, tmp_path: Path) -> None:
    done = run(output, "--plot", tmp_path / "speed.png")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("out.bin: 12 samples of 16×16×3 uint8; batches of 8, medians of")
    assert "of its limit, images/s" in done.stdout
    assert 'feed="auto" takes cpu: the device is cpu.' in done.stdout
    with Image.open(tmp_path / "speed.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 3  # bars, text and marks


def test_nothing_of_the_process_is_changed(output: Path) -> None:
    def state() -> tuple[Any, ...]:
        return torch.get_num_threads(), torch.get_rng_state().tolist(), dict(os.environ), Path.cwd()

    before = state()
    bench.measure(output)
    assert state() == before
