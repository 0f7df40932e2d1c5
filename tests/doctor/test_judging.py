"""What the doctor says of given times; never how fast anything is."""

from typing import Any

import pytest

from memload.doctor.judging import Verdict, judge, recommended
from memload.doctor.times import Times, Trial, outliers

SLOW_TRANSFORM = {"transform": 100.0, "gathering": 3.0}


def loader_times(*trials: Trial, **options: Any) -> Times:
    """Return the times of a Loader with these trials, whose own settings are the first ones."""
    return Times(trials[0].ms, trials=trials, parts=SLOW_TRANSFORM, **options)


@pytest.mark.parametrize(
    ("times", "bound", "sentence", "advice"),
    [
        (
            Times(6, parts=SLOW_TRANSFORM),
            "model",
            "The model: it takes 54 ms a batch, and data is there after 6 ms.",
            "Loading is fast enough.",
        ),
        (
            Times(6, disk=81),
            "disk",
            "Reading the disk: 81 ms a batch, the model waits 27 ms of each step.",
            "in the first epoch only",
        ),
        (
            Times(6, disk=81, disk_later=80),
            "disk",
            "Reading the disk: 81 ms a batch, the model waits 27 ms of each step.",
            "later epochs take 80 ms",
        ),
        (
            Times(6, disk=81, disk_later=5),
            "disk",
            "Reading the disk: 81 ms a batch, the model waits 27 ms of each step.",
            "Later epochs find more rows in RAM: 6 ms a batch.",
        ),
        (
            loader_times(Trial(1, 2, 100), Trial(2, 2, 51), Trial(4, 2, 26), Trial(8, 2, 25)),
            "threads",
            "Too few threads: 100 ms a batch with num_threads=1, the model waits 46 ms of each step.",
            "Use num_threads=4, prefetch_factor=2: 26 ms a batch.",
        ),
        (
            loader_times(Trial(8, 2, 100), Trial(4, 2, 40)),
            "threads",
            "Too many threads: 100 ms a batch with num_threads=8, the model waits 46 ms of each step.",
            "Use num_threads=4, prefetch_factor=2: 40 ms a batch.",
        ),
        (
            loader_times(Trial(0, 2, 100), Trial(1, 2, 99), is_ahead=False),
            "threads",
            "Too few threads: 100 ms a batch with num_threads=0, the model waits 100 ms of each step.",
            "Load while the model is at work, with num_threads=1, prefetch_factor=2: 99 ms a batch.",
        ),
        (
            loader_times(Trial(2, 2, 119), Trial(1, 2, 130), Trial(2, 4, 50)),
            "prefetching",
            "Too little prefetching: 119 ms a batch with prefetch_factor=2, the model waits 65 ms of each step.",
            "Use num_threads=2, prefetch_factor=4: 50 ms a batch.",
        ),
        (
            loader_times(Trial(None, 2, 119), Trial(None, 1, 50)),
            "prefetching",
            "Too much prefetching: 119 ms a batch with prefetch_factor=2, the model waits 65 ms of each step.",
            "Use prefetch_factor=1: 50 ms a batch.",
        ),
        (
            loader_times(Trial(2, 2, 119), Trial(1, 2, 130), Trial(2, 4, 59)),
            "transform",
            "The transform: 119 ms a batch, the model waits 65 ms of each step.",
            "Use num_threads=2, prefetch_factor=4: 59 ms a batch. Do what is the same",
        ),
        (
            loader_times(Trial(2, 2, 100), Trial(1, 2, 100), Trial(4, 2, 95)),
            "transform",
            "The transform: 100 ms a batch, the model waits 46 ms of each step.",
            "Do what is the same in every epoch, such as resizing, before the build. The rest needs a GPU, more cores, "
            "or a cheaper transform.",
        ),
        (
            loader_times(Trial(None, 2, 100), is_on_gpu=True),
            "transform",
            "The transform: 100 ms a batch, the model waits 46 ms of each step.",
            "The rest needs a cheaper transform.",
        ),
        (
            Times(80, parts={"bus": 78, "transform": 5}),
            "bus",
            "Bringing rows to the GPU: 80 ms a batch, the model waits 26 ms of each step.",
            "--size",
        ),
        (
            Times(90, num_workers=8, without_workers=2),
            "workers",
            "The DataLoader's 8 workers: 90 ms a batch (2 ms without them), the model waits 36 ms of each step.",
            "num_workers=0",
        ),
        # Slow workers still save time, since they work while the model does.
        (
            Times(90, parts={"samples": 60}, num_workers=2, without_workers=60),
            "samples",
            "Reading and collating single samples: 90 ms a batch, the model waits 36 ms of each step.",
            "Use a memload.Loader",
        ),
        (
            Times(9, num_workers=8, without_workers=2),
            "model",
            "The model: it takes 54 ms a batch, and data is there after 9 ms.",
            "8 workers are not needed",
        ),
        (
            Times(9, num_workers=8, without_workers=60),
            "model",
            "The model: it takes 54 ms a batch, and data is there after 9 ms.",
            "Loading is fast enough.",
        ),
        (
            Times(20, parts={"samples": 20}, num_workers=0, is_ahead=False),
            "samples",
            "Reading and collating single samples: 20 ms a batch, the model waits 20 ms of each step.",
            "memload.Loader",
        ),
        (
            Times(20, parts={"samples": 2, "transform": 18}, num_workers=0, is_ahead=False),
            "transform",
            "The transform: 20 ms a batch, the model waits 20 ms of each step.",
            "A memload.Loader with memload.transforms does the rest",
        ),
        (
            Times(20, parts={"dataset": 20}, num_workers=0, is_ahead=False),
            "dataset",
            "Decoding, resizing, or what else __getitem__ does: 20 ms a batch, the model waits 20 ms of each step.",
            "Build the images once with 'memload build'",
        ),
        (
            Times(1, parts={"samples": 1}, num_workers=0, is_ahead=False),
            "model",
            "The model: it takes 54 ms a batch, and data is there after 1 ms.",
            "Loading is fast enough.",
        ),
    ],
)
def test_the_sentence_names_what_bounds_a_step_of_54_ms(
    times: Times, bound: str, sentence: str, advice: str
) -> None:
    verdict = judge(times, 54)
    assert (verdict.bound, verdict.sentence) == (bound, sentence)
    assert advice in verdict.remedy
    assert verdict.note == ""  # slow settings are no sign of other processes


def test_the_time_that_the_model_waits_is_what_the_data_takes_longer() -> None:
    assert judge(Times(30, disk=20), 20).wait_ms == 10
    assert judge(Times(30, disk=70), 20).wait_ms == 50
    assert judge(Times(30, disk=70), 100).wait_ms == 0
    assert judge(Times(30, is_ahead=False), 100).wait_ms == 30
    # Without threads or workers, a loader reads, then works.
    assert judge(Times(50, disk=45, is_ahead=False), 54).wait_ms == 95
    later = judge(Times(50, disk=80, disk_later=40, is_ahead=False), 54)
    assert later.remedy == "Later epochs find more rows in RAM: 90 ms a batch."


def test_without_a_step_it_says_what_the_data_allows() -> None:
    verdict = judge(Times(0.354, disk=0.1, parts={"gathering": 0.3}))
    assert isinstance(verdict, Verdict)
    assert (verdict.data_ms, verdict.wait_ms) == (0.354, None)
    assert verdict.sentence == (
        "Data is there after 0.35 ms a batch, and a model that takes longer does not wait. "
        "Gathering rows takes longest."
    )


@pytest.mark.parametrize(
    ("trials", "step_ms", "best"),
    [
        # The fewest threads that are as fast as the fastest.
        ([(1, 2, 50), (2, 2, 26), (4, 2, 14), (8, 2, 13.9)], None, (4, 2)),
        ([(1, 2, 50), (2, 2, 26), (4, 2, 14), (8, 2, 13.9)], 1, (4, 2)),
        # The fewest threads that keep up with the model, with some time to spare.
        ([(1, 2, 50), (2, 2, 26), (4, 2, 14)], 40, (2, 2)),
        ([(1, 2, 50), (2, 2, 26), (4, 2, 14)], 27, (4, 2)),
        ([(4, 2, 14), (4, 1, 14), (2, 2, 26)], 40, (2, 2)),
        # The user's own settings, if others are not clearly faster.
        ([(4, 2, 14), (2, 2, 13.5), (4, 4, 13)], None, (4, 2)),
        ([(4, 2, 14), (2, 2, 27), (4, 4, 12)], None, (4, 2)),
        ([(4, 2, 14), (2, 2, 27), (4, 4, 10)], None, (4, 4)),
        ([(2, 2, 44), (2, 1, 42), (1, 2, 80)], 54, (2, 2)),
        # Settings that were measured together.
        ([(2, 2, 119), (1, 2, 60), (2, 4, 59)], None, (1, 2)),
        ([(2, 2, 119), (1, 2, 90), (2, 4, 59)], None, (2, 4)),
        # Without threads, nothing is loaded ahead.
        ([(0, 2, 14), (1, 2, 15)], None, (1, 2)),
        ([(None, 2, 14), (None, 4, 10)], None, (None, 4)),
    ],
)
def test_the_best_settings_need_the_fewest_threads(
    trials: list[tuple[int | None, int, float]],
    step_ms: float | None,
    best: tuple[int | None, int],
) -> None:
    found = recommended([Trial(*trial) for trial in trials], step_ms)
    assert found is not None
    assert (found.num_threads, found.prefetch_factor) == best


def test_nothing_is_recommended_if_nothing_was_compared() -> None:
    assert recommended([Trial(2, 2, 10)]) is None
    verdict = judge(loader_times(Trial(2, 2, 10)), 54)
    assert (verdict.num_threads, verdict.prefetch_factor) == (None, None)
    verdict = judge(loader_times(Trial(2, 2, 10), Trial(1, 2, 30)), 54)
    assert (verdict.num_threads, verdict.prefetch_factor) == (1, 2)


def test_a_slow_disk_keeps_its_threads() -> None:
    trials = Trial(8, 2, 5), Trial(1, 2, 30)
    assert judge(loader_times(*trials), 54).num_threads == 1
    verdict = judge(loader_times(*trials, disk=81), 54)
    assert (verdict.bound, verdict.num_threads) == ("disk", 8)


def test_without_a_gpu_loading_takes_cores_from_the_model() -> None:
    shared = {"has_gpu": False}
    assert judge(Times(25, **shared), 54).note == (
        "Without a GPU, model and loading share the cores: a step takes 54 to 79 ms."
    )
    assert judge(Times(100, **shared), 54).note.endswith("a step takes 100 to 154 ms.")
    assert judge(Times(25, **shared)).note.endswith("for 25 ms of each step.")
    assert judge(Times(1, **shared), 54).note == ""  # next to nothing
    assert judge(Times(25, is_ahead=False, **shared), 54).note == ""  # one by one
    assert judge(Times(25, disk=81, **shared), 54).note == ""


def test_while_other_processes_are_at_work_only_large_differences_count() -> None:
    trials = Trial(2, 2, 119), Trial(2, 4, 85)
    assert judge(loader_times(*trials), 54).prefetch_factor == 4
    verdict = judge(loader_times(*trials), 54, is_busy=True)
    assert verdict.prefetch_factor == 2
    assert verdict.note == "Other processes were at work: measure again when they have ended."
    assert verdict.remedy.startswith("Do what is the same")
    clear = judge(loader_times(Trial(2, 2, 119), Trial(2, 4, 70)), 54, is_busy=True)
    assert clear.prefetch_factor == 4
    outlier = judge(loader_times(*trials, Trial(1, 2, 1450), has_gpu=False), 54)
    assert outlier.prefetch_factor == 2
    assert "OMP_WAIT_POLICY=PASSIVE" in outlier.note


def test_a_trial_that_takes_much_longer_than_others_allow_contradicts_them() -> None:
    two, one = Trial(2, 2, 100), Trial(1, 2, 250)
    assert outliers([two, one, Trial(4, 2, 60), Trial(2, 4, 90)]) == []
    assert outliers([two, Trial(1, 2, 1450)]) == [Trial(1, 2, 1450)]
    assert outliers([two, one, Trial(4, 2, 900)]) == [Trial(4, 2, 900)]
    assert outliers([Trial(2, 2, 1000), one, Trial(2, 4, 90)]) == [Trial(2, 2, 1000)]
    assert outliers([Trial(0, 2, 1001), one]) == [Trial(0, 2, 1001)]


def test_a_wait_that_is_a_small_share_of_the_step_does_not_count() -> None:
    assert judge(Times(56), 54).bound == "model"
    assert judge(Times(58), 54).bound == "loading"
    assert judge(Times(60), 54).bound == "loading"


def test_what_was_not_measured_is_not_blamed() -> None:
    verdict = judge(Times(83, num_workers=0, is_ahead=False), 54)
    assert verdict.bound == "loading"
    assert verdict.sentence == "Making batches: 83 ms a batch, the model waits 83 ms of each step."
    assert verdict.remedy.startswith("Which part of that takes long was not measured")
