"""What the doctor says of given times; never how fast anything is."""

import pytest

from memload.doctor.judging import Times, Verdict, best_workers, judge

SLOW_TRANSFORM = {"transform": 100.0, "gathering": 3.0}


@pytest.mark.parametrize(
    ("times", "bound", "sentence", "advice"),
    [
        (
            Times(6, parts=SLOW_TRANSFORM),
            "model",
            "The model: it takes 54 ms a batch, and data is there after 6 ms.",
            "",
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
            Times(100, parts=SLOW_TRANSFORM, workers=1, by_workers={1: 100, 2: 51, 4: 26, 8: 25}),
            "threads",
            "Too few threads: 100 ms a batch with num_threads=1, the model waits 46 ms of each step.",
            "num_threads=4: 26 ms",
        ),
        (
            Times(500, parts=SLOW_TRANSFORM, workers=1, by_workers={1: 500, 2: 260, 4: 130}),
            "transform",
            "The transform: 500 ms a batch, the model waits 446 ms of each step.",
            "num_threads=4: 130 ms",
        ),
        (
            Times(100, parts=SLOW_TRANSFORM, workers=2, by_workers={1: 100, 2: 100, 4: 100}),
            "transform",
            "The transform: 100 ms a batch, the model waits 46 ms of each step.",
            "before the build",
        ),
        (
            Times(80, parts={"bus": 78, "transform": 5}),
            "bus",
            "Bringing rows to the GPU: 80 ms a batch, the model waits 26 ms of each step.",
            "--size",
        ),
        (
            Times(90, workers=8, by_workers={8: 90, 0: 2}, are_processes=True),
            "workers",
            "The DataLoader's 8 workers: 90 ms a batch (2 ms without them), the model waits 36 ms of each step.",
            "num_workers=0",
        ),
        (
            Times(9, workers=8, by_workers={8: 9, 0: 2}, are_processes=True),
            "model",
            "The model: it takes 54 ms a batch, and data is there after 9 ms.",
            "8 workers are not needed",
        ),
        (
            Times(20, parts={"samples": 20}, workers=0, are_processes=True, is_ahead=False),
            "samples",
            "Reading and collating single samples: 20 ms a batch, the model waits 20 ms of each step.",
            "memload.Loader",
        ),
        (
            Times(1, parts={"samples": 1}, workers=0, are_processes=True, is_ahead=False),
            "model",
            "The model: it takes 54 ms a batch, and data is there after 1 ms.",
            "",
        ),
    ],
)
def test_the_sentence_names_what_bounds_a_step_of_54_ms(
    times: Times, bound: str, sentence: str, advice: str
) -> None:
    verdict = judge(times, 54)
    assert (verdict.bound, verdict.sentence) == (bound, sentence)
    assert advice in verdict.remedy
    assert bool(advice) == bool(verdict.remedy)


def test_the_time_that_the_model_waits_is_what_the_data_takes_longer() -> None:
    assert judge(Times(30, disk=20), 20).wait_ms == 10
    assert judge(Times(30, disk=70), 20).wait_ms == 50
    assert judge(Times(30, disk=70), 100).wait_ms == 0
    assert judge(Times(30, is_ahead=False), 100).wait_ms == 30


def test_without_a_step_it_says_what_the_data_allows() -> None:
    verdict = judge(Times(0.354, disk=0.1, parts={"gathering": 0.3}))
    assert isinstance(verdict, Verdict)
    assert (verdict.data_ms, verdict.wait_ms) == (0.354, None)
    assert verdict.sentence == (
        "Data is there after 0.35 ms a batch, and a model that takes longer does not wait. "
        "Gathering rows takes longest."
    )


def test_the_best_number_of_threads_is_the_smallest_that_is_fast_enough() -> None:
    by_threads = {1: 50.0, 2: 26.0, 4: 14.0, 8: 13.9}
    assert best_workers(by_threads) == 4
    assert best_workers(by_threads, step_ms=40) == 2
    assert best_workers(by_threads, step_ms=1) == 4
    assert best_workers({}) is None


def test_a_wait_that_is_a_small_share_of_the_step_does_not_count() -> None:
    assert judge(Times(54.1), 54).bound == "model"
    assert judge(Times(60), 54).bound == "gathering"
