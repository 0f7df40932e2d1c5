"""What the doctor makes of measured times. Tables give these times, and nothing depends on clocks."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

import memload
from memload.bench import stages
from memload.bench.setting import Setting
from memload.bench.stages import Stage
from memload.doctor import (
    data_checks,
    dataloader_measurer,
    disk,
    loader_measurer,
    measurements,
)
from memload.doctor.dataloader_measurer import DataLoaderMeasurer
from memload.doctor.measurements import StageRunner

#: Milliseconds of a stage, or of each time that it is measured.
Table = dict[str, float | Sequence[float]]
OWN = "Loader, feed cpu, 2 threads"


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The subjects of the stages that were measured, in their order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loader_measurer, "available_cores", lambda: 4)
    return []


@pytest.fixture
def use_table(subjects: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[Table, int], None]:
    """A function that gives stages these times; 0: not measured. All others take 10 ms."""

    def use(table: Table, batch_size: int) -> None:
        def measure_in_turn(group: Sequence[Stage], rounds: int) -> None:
            for stage in group:
                ms = table.get(stage.subject, 10.0)
                if not ms:
                    continue
                if isinstance(ms, Sequence):
                    ms = ms[subjects.count(stage.subject)]
                subjects.append(stage.subject)
                stage.rates.append(1000 * batch_size / ms)

        monkeypatch.setattr(measurements, "measure_in_turn", measure_in_turn)

    return use


Use = Callable[[Table, int], None]


def same(images: torch.Tensor) -> torch.Tensor:
    return images


def loader_of(path: Path, **options: Any) -> memload.Loader:
    return memload.Loader(path, 4, num_threads=2, transform=same, **options)


def test_threads_and_prefetch_factor_that_were_measured_together_are_recommended(
    output: Path, use_table: Use
) -> None:
    table = {
        OWN: 119,
        "Loader, feed cpu, 1 thread": 200,
        "Loader, feed cpu, 4 threads": 80,
        "Loader, feed cpu, 4 threads, prefetch_factor=1": 82,
        "Loader, feed cpu, 4 threads, prefetch_factor=4": 30,
    }
    use_table(table, 4)
    found = memload.diagnose(loader_of(output), step_ms=54)
    assert (found.num_threads, found.prefetch_factor) == (4, 4)
    assert "Best here: num_threads=4, prefetch_factor=4." in str(found)
    assert found.verdict.remedy.startswith("Use num_threads=4, prefetch_factor=4: 30 ms a batch.")
    tried = {(trial.num_threads, trial.prefetch_factor): trial.ms for trial in found.times.trials}
    assert tried == pytest.approx({(2, 2): 119, (4, 2): 80, (4, 1): 82, (4, 4): 30, (1, 2): 200})


def test_prefetch_factors_are_tried_with_threads_that_load_ahead(
    output: Path, use_table: Use
) -> None:
    use_table({"Loader, feed cpu, 0 threads": 1, "Loader, feed cpu, 2 threads": 5}, 4)
    times = memload.diagnose(memload.Loader(output, 4, num_threads=0)).times
    tried = [(trial.num_threads, trial.prefetch_factor) for trial in times.trials]
    assert tried == [(0, 2), (1, 2), (2, 2), (4, 2), (2, 1), (2, 4)]


def test_settings_that_are_hardly_faster_are_not_recommended(output: Path, use_table: Use) -> None:
    use_table({OWN: 10.9}, 4)
    found = memload.diagnose(loader_of(output), step_ms=1)
    assert (found.num_threads, found.prefetch_factor) == (2, 2)


def test_what_contradicts_the_rest_is_measured_once_more(
    output: Path, use_table: Use, subjects: list[str]
) -> None:
    one = "Loader, feed cpu, 1 thread"
    use_table({OWN: [3000, 100], one: [5000, 6000], f"{one}, no transform": 8}, 4)
    found = memload.diagnose(loader_of(output), step_ms=54)
    assert sorted(subject for subject in subjects if subjects.count(subject) > 1) == [
        *([one] * 2),
        *([OWN] * 2),
    ]
    lines = {line.subject: line.ms for line in found.measured}
    assert (lines[OWN], lines[one]) == pytest.approx((100, 5000))  # the faster one counts
    assert found.times.batch == pytest.approx(100)
    # The work of one thread follows from the others: 10 ms with 4 threads.
    assert found.times.parts == pytest.approx({"gathering": 8, "transform": 32})


def test_parts_of_the_work_are_never_negative(output: Path, use_table: Use) -> None:
    use_table({"Loader, feed cpu, 1 thread, no transform": 900}, 4)
    parts = memload.diagnose(loader_of(output)).times.parts
    assert parts == pytest.approx({"gathering": 10, "transform": 0})


def test_work_that_could_not_be_divided_is_told_as_a_whole(output: Path, use_table: Use) -> None:
    use_table({"Loader, feed cpu, 1 thread, no transform": 0}, 4)
    found = memload.diagnose(loader_of(output), step_ms=1)
    assert (found.times.parts, found.verdict.bound) == ({}, "loading")


def test_what_all_settings_are_compared_with_is_measured_twice(
    output: Path, use_table: Use, subjects: list[str]
) -> None:
    use_table({OWN: [14, 10.5]}, 4)
    found = memload.diagnose(loader_of(output), step_ms=1)
    assert subjects.count(OWN) == 2
    assert (found.num_threads, found.prefetch_factor) == (2, 2)
    assert found.times.batch == pytest.approx(10.5)


def test_a_dataloader_is_measured_twice(output: Path, use_table: Use) -> None:
    use_table({"DataLoader, num_workers=2": [90, 40], "DataLoader, num_workers=0": [60, 12]}, 4)
    loader = DataLoader(memload.MemmapDataset(output), 4, num_workers=2)
    found = memload.diagnose(loader, step_ms=20)
    assert (found.times.batch, found.times.without_workers) == pytest.approx((40, 12))
    assert found.verdict.sentence.startswith(
        "The DataLoader's 2 workers: 40 ms a batch (12 ms without them), the model waits 20 ms"
    )


def test_the_sample_is_in_ram_before_a_loader_is_measured(
    output: Path, use_table: Use, subjects: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_table({}, 4)
    gather, gathered = memload.MemmapDataset.gather, []

    def recorded(dataset: Any, samples: Any, *arguments: Any) -> Any:
        assert not any("Loader" in subject for subject in subjects)
        gathered.extend(dataset.index.row[samples])
        return gather(dataset, samples, *arguments)

    monkeypatch.setattr(memload.MemmapDataset, "gather", recorded)
    memload.diagnose(loader_of(output))
    assert sorted(gathered) == list(range(12))


def test_of_a_slow_disk_few_rows_are_read(
    make_dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = memload.MemmapDataset(make_dataset(rows=(20,)).path)
    now, gather = 0.0, memload.MemmapDataset.gather

    def gather_slowly(self: Any, samples: Any, *arguments: Any) -> Any:
        nonlocal now
        now += len(samples)  # a second a row
        return gather(self, samples, *arguments)

    monkeypatch.setattr(memload.MemmapDataset, "gather", gather_slowly)
    monkeypatch.setattr(disk, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(disk, "_WARMING_BYTES", 2 * dataset.shards.array.row_bytes)
    setting = Setting(dataset)
    disk.bring_sample_to_ram(setting)
    assert (now, len(setting.sample)) == (4, 4)


@pytest.mark.parametrize(("rows_a_second", "threads"), [(3000.0, 32), (6.0, 12), (0.2, 1)])
def test_of_a_slow_disk_few_threads_read_at_once(
    output: Path, monkeypatch: pytest.MonkeyPatch, rows_a_second: float, threads: int
) -> None:
    calls = []

    def random_reads(dataset: Any, threads: int, seconds: float) -> float:
        calls.append(threads)
        return rows_a_second

    monkeypatch.setattr(disk, "random_reads", random_reads)
    monkeypatch.setattr(disk, "is_direct", lambda dataset: True)
    assert disk.disk_stage(memload.MemmapDataset(output)).prepare()() == rows_a_second
    assert calls == [1, threads]


def test_no_stage_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def measure_in_turn(group: Sequence[Stage], rounds: int) -> None:
        nonlocal now
        now += 4
        group[0].rates.append(100.0)

    monkeypatch.setattr(measurements, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(measurements, "measure_in_turn", measure_in_turn)
    runner = StageRunner(batch_size=1, seconds=10)
    group = [Stage(f"stage {number}", lambda: lambda: 0.0) for number in range(4)]
    assert [runner.measure(stage, kind="loader") for stage in group] == [10, 10, None, None]
    assert [bool(line.reason) for line in runner.lines] == [False, False, True, True]
    assert runner.measure(Stage("of another kind", group[0].prepare), kind="disk") == 10
    assert runner.measure_anyway(Stage("anyway", group[0].prepare), kind="loader") == 10
    assert runner.measure(Stage("stage 0", group[0].prepare), kind="loader") == 10  # as before


def test_the_longest_stage_of_a_kind_tells_how_long_the_next_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, seconds = 0.0, iter([8, 1, 1, 1])

    def measure_in_turn(group: Sequence[Stage], rounds: int) -> None:
        nonlocal now
        now += next(seconds)
        group[0].rates.append(100.0)

    monkeypatch.setattr(measurements, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(measurements, "measure_in_turn", measure_in_turn)
    runner = StageRunner(batch_size=1, seconds=17)
    found = [runner.measure(Stage(name, lambda: lambda: 0.0), kind="loader") for name in "abcd"]
    assert found == [10, 10, 10, None]


def test_a_copy_of_a_dataloader_has_its_settings() -> None:
    settings: dict[str, Any] = {
        "collate_fn": list,
        "prefetch_factor": 3,
        "timeout": 7,
        "worker_init_fn": print,
        "multiprocessing_context": multiprocessing.get_context("spawn"),
    }
    loader = DataLoader(range(9), 3, num_workers=2, **settings)
    copy = dataloader_measurer._like(loader, 1, [[8], [0]])
    assert {name: getattr(copy, name) for name in settings} == settings
    assert list(dataloader_measurer._like(loader, 0, [[8], [0]])) == [[8], [0]]


@pytest.mark.parametrize(("in_ram", "bound"), [(0.0, "disk"), (1.0, "model")])
def test_what_a_dataloader_waits_for_a_cold_disk_is_told(
    output: Path, use_table: Use, monkeypatch: pytest.MonkeyPatch, in_ram: float, bound: str
) -> None:
    use_table({"DataLoader, num_workers=1": 2, "reading the disk, random rows": 70}, 4)
    monkeypatch.setattr(data_checks, "share_in_ram", lambda address, size: in_ram)
    loader = DataLoader(memload.MemmapDataset(output), 4, num_workers=1)
    found = memload.diagnose(loader, step_ms=20)
    assert found.verdict.bound == bound
    assert found.verdict.data_ms == pytest.approx(70 if bound == "disk" else 2)
    assert found.times.batch == pytest.approx(2)


class Recording(Dataset[Any]):
    """A data set over another one that notes which samples it was asked for, in their order."""

    def __init__(self, dataset: memload.MemmapDataset) -> None:
        self.dataset, self.asked = dataset, list[int]()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return self.dataset[index]


@pytest.mark.parametrize("limit", ["bytes", "seconds"])
def test_a_dataloader_is_measured_on_the_first_samples_of_its_sampler_once_they_are_in_ram(
    output: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    if limit == "bytes":
        monkeypatch.setattr(dataloader_measurer, "_SAMPLE_BYTES", 3 * 16 * 16 * 3)
    else:
        monkeypatch.setattr(dataloader_measurer, "_WARMING_SECONDS", -1)
    monkeypatch.setattr(stages, "SECONDS", 0)
    monkeypatch.setattr(disk, "_SECONDS", 0)
    dataset = Recording(memload.MemmapDataset(output))
    found = memload.diagnose(DataLoader(dataset, 4, sampler=range(11, -1, -1)))
    assert found.batch_size == 4
    first = [11, 10, 9] if limit == "bytes" else [11]
    assert dataset.asked[: len(first)] == first
    assert set(dataset.asked) == set(first)


def test_of_a_subset_the_same_rows_are_read_without_the_transform(
    output: Path, use_table: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_table({}, 2)
    asked = []

    def fetching(measurer: Any, subject: str, dataset: Any) -> float:
        asked.append(torch.stack([dataset[index][0] for index in measurer._batches[0]]))
        return 10.0 / len(asked)

    monkeypatch.setattr(DataLoaderMeasurer, "_fetching", fetching)
    dataset = memload.MemmapDataset(output, transform=same)
    loader = DataLoader(Subset(Subset(dataset, [11, 10, 9, 8]), [1, 3]), 2)
    assert memload.diagnose(loader).times.parts == {"samples": 5, "transform": 5}
    expected = torch.stack([dataset[10][0], dataset[8][0]])
    assert all(torch.equal(images, expected) for images in asked)
    assert not torch.equal(*expected)


def whole(samples: list[Any]) -> Any:
    assert len(samples) == 4
    return default_collate(samples)


def test_a_collate_function_is_given_whole_batches_only(output: Path, use_table: Use) -> None:
    use_table({}, 4)
    loader = DataLoader(memload.MemmapDataset(output), 4, collate_fn=whole)
    assert memload.diagnose(loader).batch_size == 4


def test_samplers_that_can_be_used_once_or_have_no_length_will_do(
    output: Path, use_table: Use
) -> None:
    use_table({}, 4)
    dataset = memload.MemmapDataset(output)
    for loader in (
        DataLoader(dataset, 4, sampler=iter(range(12))),
        DataLoader(dataset, batch_sampler=iter([[0, 1, 2, 3], [4]])),
    ):
        found = memload.diagnose(loader, step_ms=54)
        assert (found.batch_size, found.verdict.wait_ms) == (4, pytest.approx(10))


@pytest.mark.parametrize(
    ("load", "one_thread_ms", "is_told"), [(0.0, 15, False), (1000.0, 15, True), (0.0, 900, True)]
)
def test_other_processes_are_told_beside_the_verdict(
    output: Path,
    use_table: Use,
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    one_thread_ms: float,
    is_told: bool,
) -> None:
    use_table({"Loader, feed cpu, 1 thread": one_thread_ms}, 4)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    report = str(memload.diagnose(loader_of(output), step_ms=54))
    assert ("Other processes were at work" in report.splitlines()[-1]) == is_told


def test_without_a_gpu_a_note_says_that_cores_are_shared(output: Path, use_table: Use) -> None:
    use_table({OWN: 20, "DataLoader, num_workers=1": 20}, 4)
    dataset = memload.MemmapDataset(output)
    for loader in (loader_of(output), DataLoader(dataset, 4, num_workers=1)):
        found = memload.diagnose(loader, step_ms=54)
        assert found.verdict.note.endswith("share the cores: a step takes 54 to 74 ms.")


class Arrivals:
    """Stands in for a DataLoader whose batches arrive at given seconds of a clock of its own."""

    def __init__(self, seconds: Sequence[float], num_workers: int) -> None:
        self.seconds, self.num_workers, self.prefetch_factor = seconds, num_workers, 2
        self.now, self.ending = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def __len__(self) -> int:
        return len(self.seconds)

    def __iter__(self) -> Iterator[None]:
        try:
            for second in self.seconds:
                self.now = second
                yield None
        finally:  # workers end
            self.now += self.ending


@pytest.mark.parametrize(
    ("seconds", "num_workers", "persist", "ms"),
    [
        ([0.01, 0.02, 0.03], 0, False, 10),
        ([0.3, 0.3, 0.36], 2, False, 120),  # a third of the start is that of each batch
        ([0.3, 0.3, 0.36], 2, True, 30),
        # Left early. The four batches behind the first one were made while that was waited for.
        ([2.0, *[2.1] * 4, *np.arange(3.1, 1000)], 2, True, 1000),
        ([2.0, *[2.1] * 4, *np.arange(3.1, 999)], 2, False, 1001),  # a second for 1,001 batches
        ([6.0, 12.0, 18.0], 2, True, 6000),
        # Two workers take 6 or 2 seconds for a batch.
        ([6.0, 6.0, 12.0, 12.0, 18.0], 2, False, 3000),
        ([2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 8.0, 8.0, 10.0], 2, False, 1000),
    ],
)
def test_a_batch_of_a_dataloader_takes_what_an_epoch_takes_divided_by_its_batches(
    monkeypatch: pytest.MonkeyPatch,
    seconds: Sequence[float],
    num_workers: int,
    persist: bool,
    ms: float,
) -> None:
    loader: Any = Arrivals(seconds, num_workers)
    monkeypatch.setattr(dataloader_measurer, "time", loader)
    found = dataloader_measurer._batch_ms(loader, epoch=len(seconds), workers_persist=persist)
    assert found == pytest.approx(ms, abs=0.01)


def test_the_end_of_workers_does_not_count_if_an_epoch_is_left_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader: Any = Arrivals([4.0, 4.0, 8.0, 8.0, 12.0, 12.0], num_workers=2)
    loader.ending = 5.0
    monkeypatch.setattr(dataloader_measurer, "time", loader)
    found = dataloader_measurer._batch_ms(loader, epoch=6, workers_persist=False)
    assert found == pytest.approx(2000)


def test_a_loader_for_comparison_finds_its_rows_in_ram(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[Setting] = []
    monkeypatch.setattr(dataloader_measurer, "bring_sample_to_ram", settings.append)
    monkeypatch.setattr(stages, "SECONDS", 0)
    monkeypatch.setattr(disk, "_SECONDS", 0)
    memload.diagnose(DataLoader(memload.MemmapDataset(output), 4))
    assert [len(setting.sample) for setting in settings] == [12]


def test_decoding_in_a_data_set_of_another_kind_is_named(use_table: Use) -> None:
    use_table({"DataLoader, num_workers=0": 55, "reading and collating samples": 55}, 1)
    found = memload.diagnose(DataLoader([np.zeros(3)]), step_ms=30)
    assert found.verdict.sentence.startswith("Decoding, resizing, or what else __getitem__ does: ")
    assert "'memload build'" in found.verdict.remedy
