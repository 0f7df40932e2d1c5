"""What `memload bench` finds out, says and leaves alone; never how fast anything is."""

import json
import multiprocessing
import os
import re
import shutil
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
from memload.bench_report import Line, Report
from memload.cli import main
from memload.errors import MissingError
from memload.feeds.choice import FEEDS
from memload.storage.index import Index

Make = Callable[..., Index]


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure as little as possible, on the CPU."""
    for name, value in {
        "_SLOT": 1e-4,
        "_LONG_SLOT": 0.01,
        "_ROUNDS": 2,
        "_LONG_ROUNDS": 1,
        "_MOST": 64,
    }.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(bench, "available_cores", lambda: 2)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def by_subject(report: Report) -> dict[str, Line]:
    return {line.subject: line for line in report.lines}


def test_every_stage_has_a_rate_next_to_its_limit_or_a_reason(output: Path, folder: Path) -> None:
    report = bench.measure(output, images=folder)
    lines = by_subject(report)
    assert list(lines) == [
        "disk cold, random order",
        "disk warm, first touch",
        "gather, 1 thread",
        "gather, 2 threads",
        "to the GPU",
        *[f"feed {feed}" for feed in FEEDS if feed != "auto"],
        "transform train(16)",
        "Loader, cpu, train(16)",
        "JPEGs in a DataLoader, 2 workers",
    ]
    for line in report.lines:
        if line.images_s is None:
            assert line.reason
        else:
            assert line.images_s > 0
            assert line.gb_s == pytest.approx(line.images_s * 16 * 16 * 3 / 1e9)
            assert line.limit
            assert line.limit_images_s is not None
            assert line.limit_images_s > 0
            assert line.share is not None
            assert line.share > 0
    unmeasured = {subject for subject, line in lines.items() if line.images_s is None}
    cuda = {"to the GPU", "feed resident", "feed dma", "feed uva", "feed pinned"}
    assert unmeasured - {"disk cold, random order"} == cuda  # some filesystems cannot be made cold
    assert lines["feed dma"].reason == "for a CUDA device, and there is none"


def test_rounds_that_differ_much_are_told(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady, uneven = ([100.0, 101.0, 102.0], [50.0, 100.0, 150.0])
    lines = [Line.of("steady", steady, "", [], 1), Line.of("uneven", uneven, "", [], 1)]
    assert [line.spread for line in lines] == [pytest.approx(2 / 101), 1.0]
    assert Line("none", reason="not here").spread == 0
    monkeypatch.setattr(bench, "_cold", lambda shards, rows, threads: (lines[1], 0.0))
    monkeypatch.setattr(bench, "_warm", lambda *_: (lines[:1], {"rounds": 3}, []))
    (note,) = bench.measure(output).facts["notes"]
    assert note.startswith("Rounds differ much: uneven.")


def test_the_report_says_on_what_and_where(output: Path) -> None:
    found = json.loads(json.dumps(bench.measure(output).as_dict()))
    assert (found["samples"], found["sampled"], found["shape"], found["dtype"]) == (
        12,
        12,
        [16, 16, 3],
        "uint8",
    )
    assert (found["batch_size"], found["rounds"]) == (8, 2)
    assert found["feed"] == "cpu: the device is cpu"
    assert found["machine"].keys() >= {"cpu", "cores", "system"}
    assert found["versions"]["torch"] == memload.inspection.environment()["torch"]
    assert {"subject", "images_s", "gb_s", "limit", "limit_images_s", "share"} <= found["results"][
        0
    ].keys()


def test_a_part_of_a_large_data_set_is_measured_and_its_copy_removed(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(
        rows=(30, 30),
        shape=(8, 8, 3),
        columns={"label": np.arange(60) % 3, "size": np.zeros((60, 2))},
    )
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(bench, "_PART_BYTES", 40 * 8 * 8 * 3)
    monkeypatch.setattr(
        bench, "_cold", lambda shards, rows, threads: (Line("cold", reason="left out"), 0.0)
    )
    report = bench.measure(tmp_path / "made.bin")
    assert report.facts["samples"] == 60
    assert report.facts["sampled"] == 40
    assert "measured on 40 of them" in report.text()
    assert by_subject(report)["Loader, cpu, train(8)"].images_s
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_copy_goes_to_the_temporary_folder_where_there_is_no_room_beside_the_data(
    make_dataset: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_dataset(rows=(20,))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(bench.tempfile, "gettempdir", lambda: str(elsewhere))
    room = {tmp_path: 0, elsewhere: 1 << 30}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: type("Usage", (), {"free": room[Path(folder)]})
    )
    with bench._sample(memload.MemmapDataset(tmp_path / "made.bin"), 7) as sample:
        assert sample.path.is_relative_to(elsewhere)
        assert len(sample) == 7
        assert sample.keys[6] == "ant/6.jpg"
    assert not list(elsewhere.iterdir())
    room[elsewhere] = 0
    with (
        pytest.raises(
            OSError, match=r"elsewhere: expected 1,008 bytes of free disk .*, found 0\. Make room"
        ),
        bench._sample(memload.MemmapDataset(tmp_path / "made.bin"), 7),
    ):
        pass


@pytest.mark.parametrize(
    "facts",
    [
        {"shape": (7, 5, 1)},
        {"shape": (7, 5, 4), "rows": (3, 1, 2)},
        {"descr": "<f4"},
        {"rows": (1,)},
        {"columns": {}, "classes": None},
        {"row": np.array([4, 1, 1, 0, 2])},
    ],
    ids=["grey", "shards", "floats", "one sample", "no columns", "rows in another order"],
)
def test_other_kinds_of_data_sets_are_measured_too(
    make_dataset: Make, tmp_path: Path, facts: dict[str, Any]
) -> None:
    make_dataset(**facts)
    report = bench.measure(tmp_path / "made.bin")
    assert by_subject(report)["feed cpu"].images_s
    assert [line.reason for line in report.lines[-2:]] == ["", ""]


def test_a_disk_that_cannot_be_made_cold_is_told(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = memload.MemmapDataset(output).shards
    monkeypatch.setattr(bench, "_drop", lambda blocks, shards: None)
    list(map(np.sum, shards.maps))
    line, rate = bench._cold(shards, len(shards), 2)
    assert line.images_s is None
    assert "stay in RAM" in line.reason
    assert rate == 0
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert "no posix_fadvise" in bench._cold(shards, len(shards), 2)[0].reason


def test_a_way_that_fails_is_a_line_with_its_reason() -> None:
    def fail(count: int) -> Callable[[], int]:
        raise RuntimeError("no room\nfor details")

    rounds = bench._Rounds(4, 4, lambda: None)
    rounds.add("bad", fail)
    rounds.add_batches("good", lambda number: None)
    assert rounds.go(end=0) == 1  # one round at least, however late it is
    assert rounds.reasons == {"bad": "no room"}
    assert len(rounds.rates["good"]) == 1


def test_pictures_that_cannot_be_decoded_are_a_line_with_its_reason(
    output: Path, folder: Path
) -> None:
    for path in folder.rglob("*.jpg"):
        path.write_bytes(b"no picture")
    line = by_subject(bench.measure(output, images=folder))["JPEGs in a DataLoader, 2 workers"]
    assert line.images_s is None
    assert "cannot identify image file" in line.reason


def test_a_folder_without_the_pictures_is_refused(output: Path, tmp_path: Path) -> None:
    done = run(output, "--images", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "memload: images: expected the folder that out.idx was built from, with files such as"
    )
    assert "found none of 12 in" in done.stderr


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("speed.txt", "Pillow writes no such files"),
        ("speed.xbm", "Pillow writes no such files"),  # but those of one bit
        ("speed.psd", "Pillow writes no such files"),  # reads them only
        ("no/speed.png", "Make the folder"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, found: str
) -> None:
    monkeypatch.setattr(bench, "_cold", None)
    before = sorted(tmp_path.iterdir())
    done = run(output, "--plot", tmp_path / name)
    assert (done.exit_code, done.stdout) == (1, "")
    assert re.match(f"memload: plot: expected .*{name}.*{found}", done.stderr)
    assert sorted(tmp_path.iterdir()) == before


def test_a_missing_data_set_is_told(tmp_path: Path) -> None:
    with pytest.raises(MissingError):
        bench.measure(tmp_path / "none.bin")
    done = run(tmp_path / "none.bin")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("memload: ")


def test_the_command_prints_a_table_and_writes_a_plot(output: Path, tmp_path: Path) -> None:
    done = run(output, "--plot", tmp_path / "speed.png")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(
        "out.bin: 12 samples of 16×16×3 uint8; batches of 8, medians of 2 rounds"
    )
    assert "of its limit, images/s" in done.stdout
    assert 'feed="auto" takes cpu: the device is cpu.' in done.stdout
    with Image.open(tmp_path / "speed.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 3  # bars, text and marks


def test_the_table_is_printed_before_the_plot_is_written(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Image.Image.save

    def fail(image: Image.Image, file: Any, *rest: Any, **options: Any) -> None:
        if str(file).endswith("speed.png"):
            raise OSError(28, "No space left on device")
        save(image, file, *rest, **options)

    monkeypatch.setattr(Image.Image, "save", fail)
    done = run(output, "--plot", tmp_path / "speed.png")
    assert done.exit_code == 1
    assert "of its limit, images/s" in done.stdout
    assert "No space left on device" in done.stderr


def test_the_command_prints_json(output: Path, folder: Path) -> None:
    done = run(output, "--json", "--images", folder)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["results"][-1]["subject"] == "JPEGs in a DataLoader, 2 workers"
    assert any("times the images of the JPEGs" in note for note in found["notes"])


def test_nothing_of_the_process_is_changed(output: Path, folder: Path) -> None:
    def state() -> tuple[Any, ...]:
        method = multiprocessing.get_start_method(allow_none=True)
        return (
            torch.get_num_threads(),
            torch.get_rng_state().tolist(),
            dict(os.environ),
            Path.cwd(),
            method,
        )

    bench.measure(output)
    before = state()
    bench.measure(output)
    assert state() == before
