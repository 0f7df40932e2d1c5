"""What the doctor says of given times; never how fast anything is."""

import pytest

from memload.measure.verdict import BatchTimes, judge

SLOW_TRANSFORM = {"without_transform": 2.0}


@pytest.mark.parametrize(
    ("times", "bound", "sentence", "remedy"),
    [
        (
            BatchTimes(6, **SLOW_TRANSFORM),
            "model",
            "The model bounds training: it takes 54 ms per batch, and data is there after 6 ms.",
            "Loading is fast enough. A model on the CPU shares the cores with it: a step takes up to "
            "60 ms.",
        ),
        (
            BatchTimes(6, **SLOW_TRANSFORM, is_on_gpu=True),
            "model",
            "The model bounds training: it takes 54 ms per batch, and data is there after 6 ms.",
            "Loading is fast enough.",
        ),
        (
            BatchTimes(6, disk=81),
            "disk",
            "Reading the disk bounds training: 81 ms per batch, so the model waits 27 ms of each step.",
            "That is so in the first epoch only: then all rows are in RAM, and data is there after "
            "6 ms. A local NVMe disk shortens the first one.",
        ),
        (
            BatchTimes(6, disk=81, disk_later=70),
            "disk",
            "Reading the disk bounds training: 81 ms per batch, so the model waits 27 ms of each step.",
            "Not all rows fit in RAM, so later epochs take 70 ms per batch. Use a faster disk or more "
            "RAM, or build smaller images (--size).",
        ),
        (
            BatchTimes(6, disk=50, num_threads=0),
            "disk",
            "Reading the disk bounds training: 56 ms per batch, so the model waits 56 ms of each step.",
            "That is so in the first epoch only: then all rows are in RAM, and data is there after "
            "6 ms. A local NVMe disk shortens the first one.",
        ),
        (
            BatchTimes(100, **SLOW_TRANSFORM, num_threads=1, with_threads={2: 51, 4: 26, 8: 25}),
            "threads",
            "The number of threads bounds training: 100 ms per batch, so the model waits 46 ms of "
            "each step.",
            "Use num_threads=4: 26 ms per batch.",
        ),
        (
            BatchTimes(100, **SLOW_TRANSFORM, num_threads=0, with_threads={1: 99}),
            "threads",
            "The number of threads bounds training: 100 ms per batch, so the model waits 100 ms of "
            "each step.",
            "Use num_threads=1: 99 ms per batch.",
        ),
        (
            BatchTimes(100, **SLOW_TRANSFORM, num_threads=2, with_threads={4: 95}),
            "transform",
            "The transform bounds training: 100 ms per batch, so the model waits 46 ms of each step.",
            "Do before the build what is the same in every epoch. The rest needs a GPU, or more "
            "cores.",
        ),
        (
            BatchTimes(80, without_transform=78, is_on_gpu=True),
            "rows",
            "Copying rows bounds training: 80 ms per batch, so the model waits 26 ms of each step.",
            "Build smaller images (--size): fewer bytes are copied.",
        ),
    ],
)
def test_what_bounds_a_model_is_said_with_by_how_much_and_what_to_do(
    times, bound, sentence, remedy
):
    found = judge(times, 54)
    assert (found.bound, found.sentence, found.remedy) == (bound, sentence, remedy)


def test_a_transform_bounds_where_it_takes_longer_than_the_rows():
    # On the CPU one comes after the other, and on a GPU they go side by side.
    assert judge(BatchTimes(80, without_transform=45), 54).bound == "rows"
    assert judge(BatchTimes(100, without_transform=45), 54).bound == "transform"
    assert judge(BatchTimes(52, without_transform=50, is_on_gpu=True), 40).bound == "rows"
    assert judge(BatchTimes(80, without_transform=50, is_on_gpu=True), 54).bound == "transform"


def test_a_model_that_hardly_waits_is_what_bounds():
    assert judge(BatchTimes(56), 54).bound == "model"
    assert judge(BatchTimes(58), 54).bound == "rows"


def test_without_a_model_the_data_is_described():
    found = judge(BatchTimes(6, **SLOW_TRANSFORM))
    assert found.sentence == (
        "A batch is there after 6 ms, and a model that takes longer does not wait: The transform "
        "takes longest."
    )
    assert (found.data_ms, found.wait_ms) == (6, None)


def test_a_disk_that_could_not_be_measured_is_told():
    times = BatchTimes(6, disk=None)
    assert "The disk was not measured" in judge(times, 54).remedy
    assert "The disk was not measured" not in judge(BatchTimes(6), 54).remedy


def test_threads_that_gain_little_are_not_the_bound_of_a_loop_that_makes_its_own_batches():
    times = BatchTimes(188, without_transform=1, num_threads=0, with_threads={1: 190, 2: 184})
    assert judge(times, 10).bound == "transform"
    assert judge(times, 180).bound == "threads"


def test_without_threads_a_model_waits_for_each_batch():
    assert "and the model waits for it" in judge(BatchTimes(6, num_threads=0)).sentence
    assert "a model that takes longer does not wait" in judge(BatchTimes(6)).sentence
