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

from memload import bench
from memload.bench import run, setting, stages
from memload.bench.report import line_of
from memload.bench.stages import Stage, measure_in_turn
from memload.cli import main
from memload.feeds.choice import Choice
from memload.storage.index import Index

Make = Callable[..., Index]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("matplotlib_fonts")]


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible, on the CPU."""
    times = {"SECONDS": 0, "SLOW_SECONDS": 0.01, "ROUNDS": 2, "SLOW_ROUNDS": 1}
    for name, value in times.items():
        monkeypatch.setattr(stages, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(setting, "available_cores", lambda: 2)


def run_bench(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def results_of(*arguments: object) -> dict[str, dict[str, Any]]:
    done = run_bench(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return {line["subject"]: line for line in json.loads(done.stdout)["results"]}


def test_every_stage_has_a_rate_or_a_reason(output: Path, folder: Path) -> None:
    results = results_of(output, "--images", folder)
    feeds = [f"feed {feed}" for feed in ("resident", "dma", "uva", "pinned", "cpu")]
    assert list(results) == [
        "disk cold, random order",
        "gather, 1 thread",
        "gather, 2 threads",
        "copy of a batch to the GPU",
        *feeds,
        "transform train(16)",
        "Loader, cpu, train(16)",
        "JPEGs in a DataLoader, 2 workers",
    ]
    for line in results.values():
        if line["images_s"] is None:
            assert line["reason"]
        else:
            assert line["images_s"] > 0
            assert line["gb_s"] == pytest.approx(line["images_s"] * 16 * 16 * 3 / 1e9)
    unmeasured = {subject for subject, line in results.items() if line["images_s"] is None}
    unmeasured.discard("disk cold, random order")  # some file systems cannot be made cold
    assert unmeasured == {"copy of a batch to the GPU", *feeds[:-1]}
    for subject in ("gather, 1 thread", "feed cpu"):
        line = results[subject]
        assert line["limit"] == "np.take into one buffer"
        assert min(line["limit_images_s"], line["share"]) > 0


def test_json_has_all_facts_the_table_a_heading_and_notes_and_the_plot_is_a_picture(
    output: Path, tmp_path: Path
) -> None:
    found = json.loads(run_bench(output, "--json").stdout)
    facts = ("samples", "sampled", "shape", "dtype", "bytes", "batch_size", "rounds", "feed")
    expected = [12, 12, [16, 16, 3], "uint8", 12 * 768, 8, 2, "cpu: the device is cpu"]
    assert [found[name] for name in facts] == expected
    assert found["machine"].keys() >= {"cpu", "cores", "system"}
    assert found["versions"]["torch"] == torch.__version__
    done = run_bench(output, "--plot", tmp_path / "speed.png")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("out.bin: 12 samples of 16×16×3 uint8; batches of 8, medians of")
    assert 'feed="auto" takes cpu: the device is cpu.' in done.stdout
    with Image.open(tmp_path / "speed.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 3  # bars, text and marks


def test_the_share_is_the_median_over_the_rounds_and_the_slowest_limit_counts() -> None:
    limits = [Stage(name, lambda: lambda: 0.0) for name in ("slow", "fast")]
    limits[0].rates, limits[1].rates = [2.0, 10.0, 4.0], [100.0, 5.0, 100.0]
    stage = Stage("stage", lambda: iter([1.0, 9.0, 4.0]).__next__, limits)
    measure_in_turn([stage], 3)
    line = line_of(stage, row_bytes=1_000_000_000)
    assert (line.images_s, line.gb_s, line.rounds) == (4.0, 4.0, 3)
    assert (line.limit, line.limit_images_s, line.share) == ("slow", 4.0, 0.9)
    notes = run._notes([stage], [line], Choice("cpu", "no reason"))
    assert any("differ by more than 40 %: stage." in note for note in notes)


def test_a_part_of_a_large_data_set_is_measured_and_nothing_is_changed(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> Any:
        files = {path: path.read_bytes() for path in tmp_path.iterdir()}
        return files, torch.get_num_threads(), torch.get_rng_state().tolist(), dict(os.environ)

    make_dataset(rows=(30, 30), shape=(8, 8, 3), columns={"label": np.arange(60) % 3})
    monkeypatch.setattr(setting, "_SAMPLE_BYTES", 40 * 8 * 8 * 3)
    before = state()
    done = run_bench(tmp_path / "made.bin")
    assert "60 samples" in done.stdout
    assert "measured on 40 of them" in done.stdout
    assert state() == before


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
    results = results_of(tmp_path / "made.bin")
    assert results["feed cpu"]["images_s"]
    assert [line["reason"] for line in list(results.values())[-2:]] == ["", ""]


def test_what_cannot_be_measured_is_a_line_with_the_reason(
    output: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    for path in folder.rglob("*.jpg"):
        path.write_bytes(b"no picture")
    results = results_of(output, "--images", folder)
    reasons = {subject: line["reason"] for subject, line in results.items()}
    assert "cannot drop pages" in reasons["disk cold, random order"]
    assert "cannot identify image file" in reasons["JPEGs in a DataLoader, 2 workers"]
    done = run_bench(output, "--images", tmp_path)  # where none of the images is
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "Give the folder that out.idx was built from" in done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("speed.txt", "not a picture"),
        ("none/speed.png", "cannot be written"),
        ("speed.png", "pip install 'memload[plot]'"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.setattr(bench, "measure", None)
    if name == "speed.png":
        monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    done = run_bench(output, "--plot", tmp_path / name)
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in done.stderr
