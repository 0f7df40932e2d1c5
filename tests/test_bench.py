"""What `memload bench` finds out, prints and leaves alone; never how fast anything is."""

import json
import math
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

from memload import Loader, MemmapDataset, bench
from memload.bench import direct, disk, loading, run, setting, stages
from memload.bench.report import line_of
from memload.bench.stages import Stage, measure_in_turn
from memload.cli import main
from memload.feeds import held
from memload.feeds.choice import Choice
from memload.feeds.feed import Counts
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
    feeds = [f"feed {feed}" for feed in ("resident", "dma", "pinned", "cpu")]
    assert list(results) == [
        "disk cold, random order",
        "gathering rows, 1 thread",
        "gathering rows, 2 threads",
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
    for subject in ("gathering rows, 1 thread", "feed cpu"):
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


@pytest.mark.parametrize("has_direct_reads", [True, False])
def test_the_limit_of_the_disk_is_direct_reads_or_else_sequential_ones(
    has_direct_reads: bool, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_direct(descriptor: int) -> int | None:
        return os.dup(descriptor) if has_direct_reads else None

    monkeypatch.setattr(direct, "open_direct", open_direct)
    monkeypatch.setattr(disk, "_check_cold", lambda path, offset: None)  # also where /tmp is in RAM
    line = results_of(output)["disk cold, random order"]
    name = "random rows, past the page cache" if has_direct_reads else "reading from start to end"
    assert line["limit"].startswith(name)
    assert min(line["limit_images_s"], line["share"]) > 0


def test_the_parts_that_are_read_directly_hold_all_rows_in_random_order(make_dataset: Make) -> None:
    sample = MemmapDataset(make_dataset(rows=(30, 30), shape=(40, 40, 3)).path)
    files = dict(enumerate(sample.shards.descriptors))
    parts = direct._parts(sample)
    starts = [(part.file, part.offset) for part in parts]
    offsets = 4096 + 4800 * np.arange(30)
    expected = [(file, offset // 4096 * 4096) for file in (0, 1) for offset in offsets.tolist()]
    assert sorted(starts) == expected != starts
    assert {part.size for part in parts} == {8192, 12288}  # some rows lie in three pages
    assert direct._read_directly(files, parts, 3, math.inf) == 60
    assert direct._read_directly(files, parts, 3, 0) == 3


class FakeDisk:
    """Makes Loaders on the CPU in place of those with feed="disk", and notes their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache_bytes: list[int] = []
        monkeypatch.setattr(loading, "make_loader", self.make)

    def make(self, sample: MemmapDataset, batch_size: int, **options: Any) -> Loader:
        assert (options["device"].type, options["feed"]) == ("cuda", "disk")
        self.cache_bytes.append(options["cache_bytes"])
        return Loader(sample, batch_size, device="cpu")


def test_the_feed_disk_is_measured_with_nothing_held_and_with_the_share_that_auto_holds(
    make_dataset: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeDisk(monkeypatch)
    measured = setting.Setting(MemmapDataset(make_dataset(rows=(100,), shape=(10, 100, 3)).path))
    measured.device = torch.device("cuda")
    size = 4096 + 100 * 3000
    monkeypatch.setattr(held, "available_memory", lambda: size)  # half of which may be held
    found = [*disk.cold_stages(measured)[2:], *disk.larger_than_ram_stages(measured)[1:]]
    assert [stage.subject for stage in found] == [
        "feed disk, nothing held",
        "feed disk, 50% held",
        "Loader, disk, train(10)",
    ]
    measure_in_turn(found, 1)
    assert fake.cache_bytes[0] == 0
    assert fake.cache_bytes[1:] == pytest.approx([size / 2] * 2, abs=4097)
    found[2].counts = Counts(100, rows_held=50, rows_to_hold=50, served=64, hits=40)
    lines = [line_of(stage, 3000) for stage in found]
    assert all(line.images_s for line in lines)
    assert lines[2].counts == found[2].counts._asdict()
    notes = list(run._notes(found, lines, Choice("disk", "why not")))
    assert notes[1] == 'feed="auto" takes disk: why not.'
    assert notes[2].startswith(
        "Loader, disk, train(10): 50 of 100 rows are held; of 64 rows so far, "
    )


@pytest.mark.parametrize(
    ("cache_bytes", "name", "reason"),
    [
        (None, "dma", "all 1.2 MB will be held, as 5 GB of RAM may hold rows"),
        (600_000, "disk", "600 kB of 1.2 MB will be held, as 600 kB of RAM may hold rows"),
    ],
)
def test_the_feed_is_chosen_for_all_samples(
    make_dataset: Make,
    monkeypatch: pytest.MonkeyPatch,
    cache_bytes: int | None,
    name: str,
    reason: str,
) -> None:
    monkeypatch.setattr(setting, "_SAMPLE_BYTES", 40 * 12000)
    measured = setting.Setting(MemmapDataset(make_dataset(rows=(100,), shape=(40, 100, 3)).path))
    measured.device = torch.device("cuda", 0)
    monkeypatch.setattr(run, "free_memory", lambda device: 12000 * 4 * 99)  # 99 of 100 would fit
    monkeypatch.setattr(held, "available_memory", lambda: 10**10)
    assert run.choose_feed(measured, cache_bytes) == (name, reason, None)


def test_the_feed_dma_is_given_room_for_the_beginning_of_each_file(make_dataset: Make) -> None:
    dataset = MemmapDataset(make_dataset(rows=(60, 30), shape=(40, 100, 3)).path)
    measured = setting.Setting(dataset, sample_bytes=45 * 12000)
    array = dataset.shards.array
    assert sorted(array.locate(measured.sample.index.row)[0].tolist()) == [0] * 30 + [1] * 15
    for share, rows in ((1.0, 45), (0.5, 22)):
        budget = measured.cache_bytes(measured.sample, share)
        planned = [budget * shard.bytes / array.data_bytes for shard in array.shards]
        assert array.rows_within(planned) == pytest.approx(rows, abs=1)


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
