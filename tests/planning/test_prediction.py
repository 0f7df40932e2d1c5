"""From what was measured to the plan. Nothing is converted, and the times are given."""

import inspect
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import memload
from memload.building.sources.opening import FilesToOpen
from memload.planning import Machine, Plan, predict, prediction, serving
from memload.planning.disk import DiskRates
from memload.planning.measuring import Conversion

#: Those of the command, with the defaults of `memload.build`.
OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(memload.build).parameters.items()
    if name not in ("source", "output", "executor", "part", "progress", "lock_timeout")
    and name not in ("masks", "arrays", "points", "boxes")
}
THIS = Machine()

Predict = Callable[..., Plan]


@pytest.fixture
def plan(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """A function that plans twelve pictures of 1000 s each, on a machine with two cores."""
    monkeypatch.setattr(prediction, "available_cores", lambda: 2)

    def call(
        machine: Machine = THIS,
        *,
        cores: float = 2,
        busy: int | None = None,
        rejected: int = 0,
        seconds_so_far: float = 0,
        masks: str | None = None,
        write: float | None = 1e9,
        load: float = 0,
        **options: Any,
    ) -> Plan:
        source = FilesToOpen((str(folder),), options={"masks": masks}) if masks else folder
        disk = DiskRates(write, None, False)

        def measure(listing: Any, sample: Any) -> prediction._Measured:
            workers = busy or min(max(1, listing.request.num_workers), 12)
            conversion = Conversion(1000, workers, 0, 0, 0, 12, rejected=rejected, reasons="bad")
            return prediction._Measured(conversion, disk, gathering=2e9, load=load)

        monkeypatch.setattr(prediction, "_measure", measure)
        monkeypatch.setattr(prediction, "usable_cores", lambda: cores)
        return predict(
            source,
            str(tmp_path / "out.bin"),
            machine=machine,
            seconds_so_far=seconds_so_far,
            announce=lambda text: None,
            **{**OPTIONS, "size": 16, **options},
        )

    return call


@pytest.mark.parametrize(
    ("machine", "given", "cores", "workers", "seconds"),
    [
        (None, None, 2, 2, 12_000),
        (None, 0, 2, 0, 12_000),
        (4, None, 2, 4, 6_000),
        (1, None, 2, 1, 24_000),
        (64, None, 2, 12, 2_000),  # no more workers than records
        (64, 2, 2, 2, 12_000),
        (64, 1, 2, 1, 12_000),
        (64, 0, 2, 0, 12_000),
        (4, 4, 2, 4, 6_000),  # four workers share two cores here
        # A control group gives this process the time of half a core, and all of its workers.
        (None, None, 0.5, 2, 12_000),
        (4, None, 0.5, 4, 1_500),
    ],
)
def test_more_cores_take_less_time_if_there_are_workers_for_them(
    plan: Predict, machine: int | None, given: int | None, cores: float, workers: int, seconds: int
) -> None:
    found = plan(Machine(cores=machine), cores=cores, num_workers=given)
    assert found.num_workers == workers
    assert found.seconds == pytest.approx(seconds, abs=10)  # the folder is listed, too
    assert found.scaled_from_cores == (None if machine is None else cores)


@pytest.mark.parametrize(("cores", "seconds"), [(8, 3_000), (2, 12_000), (3, 8_000)])
def test_workers_that_had_nothing_to_do_help_if_there_are_cores_for_them(
    plan: Predict, cores: int, seconds: int
) -> None:
    assert plan(cores=cores, busy=2, num_workers=8).seconds == pytest.approx(seconds, abs=10)


def test_what_went_before_and_listing_count(plan: Predict, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=70)  # it goes on by 70 s each time that somebody looks
    monkeypatch.setattr(prediction, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert plan(seconds_so_far=500).seconds == pytest.approx(12_570)


def test_what_is_not_on_the_disk_yet_is_a_tenth_of_the_ram(
    plan: Predict, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, float] = {}

    def duration(*measured: Any, **numbers: float) -> Any:
        given.update(numbers)
        return SimpleNamespace(seconds=1, low=1, high=1)

    monkeypatch.setattr(prediction, "duration", duration)
    found = plan(Machine(ram=1000))
    assert (given["unwritten_bytes"], given["records"]) == (100, 12)
    assert given["data_bytes"] == found.bytes == 4096 + 12 * 16 * 16 * 3
    monkeypatch.setattr(prediction, "available_memory", lambda: 5000)
    plan()
    assert given["unwritten_bytes"] == 500


def test_rejected_records_of_the_sample_stand_for_those_of_all(plan: Predict) -> None:
    found = plan(rejected=3, max_rejects="25%")
    assert (found.records, found.usable, found.tried, found.tried_rejected) == (12, 9, 12, 3)
    assert found.warnings == []


@pytest.mark.parametrize(
    ("rejected", "options", "text"),
    [
        (1, {}, ""),
        (2, {}, "about 17% cannot be used, and at most 10% may be: bad"),
        (2, {"max_rejects": 2}, ""),
        (0, {"on_error": "raise"}, ""),
        (1, {"on_error": "raise"}, "will stop at a record that cannot be used: bad"),
    ],
)
def test_what_a_build_would_end_with_is_a_warning(
    plan: Predict, rejected: int, options: dict[str, Any], text: str
) -> None:
    warnings = list(plan(rejected=rejected, **options).warnings)
    assert len(warnings) == bool(text)
    assert text in "".join(warnings)


def test_a_disk_that_is_too_small_is_a_warning(
    plan: Predict, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = plan().bytes
    for free, count in ((needed, 0), (needed - 1, 1)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        found = plan()
        assert (found.free_bytes, len(found.warnings)) == (free, count)
    assert found.warnings[0].startswith("the build will not begin, since it needs 13.3 kB, and ")


def test_the_range_has_room_for_other_cores_and_for_other_processes(plan: Predict) -> None:
    assert plan().seconds_range == pytest.approx((12_000 / 1.1, 12_000 * 1.1), abs=10)
    elsewhere = plan(Machine(cores=2), load=1)
    assert elsewhere.seconds_range == pytest.approx((12_000 / 3.3, 12_000 * 3.3), abs=10)


@pytest.mark.parametrize(
    ("measured", "part"),
    [
        ({}, ""),
        ({"load": 0.49}, ""),
        ({"load": 0.5}, "0.5 for each core"),
        ({"write": None}, "the disk is nearly full"),
    ],
)
def test_what_makes_a_plan_less_certain_is_noted(
    plan: Predict, measured: dict[str, Any], part: str
) -> None:
    notes = plan(**measured).notes
    assert len(notes) == bool(part)
    assert part in "".join(notes)


def test_the_feed_is_that_for_the_images_and_reads_their_masks(
    plan: Predict, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def serve(data_bytes: int, **facts: Any) -> serving.Serving:
        given.update(facts, data_bytes=data_bytes)
        epoch = serving.Epoch("bus", None)
        return serving.Serving("dma", "", epoch, epoch, 1)

    monkeypatch.setattr(serving, "serve", serve)
    masks = folder.with_name("masks")
    shutil.copytree(folder, masks)
    for path in masks.rglob("*.jpg"):
        with Image.open(path) as image:
            Image.new("L", image.size).save(path.with_suffix(".png"))
        path.unlink()
    found = plan(Machine(ram=10, gpu_memory=20), masks=str(masks))
    assert (given["image_bytes"], given["sample_bytes"]) == (16 * 16 * 3, 16 * 16 * 4)
    assert (given["data_bytes"], given["memory"]) == (found.bytes, (10, 20))
    assert given["gathering"] == 2e9
