"""How many batches are in flight and read ahead, for each feed. Nothing here needs a CUDA device."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memload import Index, MemmapDataset
from memload.feeds.choice import Choice
from memload.feeds.interface import ReadCounts
from memload.feeds.limits import NO_LIMITS
from memload.reading import pipeline
from memload.reading.pipeline import Pipeline, make_pipeline, samples_of

ROW_BYTES = 4 * 6 * 3


@pytest.fixture
def make(
    make_dataset: Callable[..., Index], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Pipeline, int]]:
    """A function that makes a pipeline of a feed that does nothing. It returns ``buffers``, too."""
    path = make_dataset(shape=(4, 6, 3)).path

    def make(feed_name: str, *, held: float | None = None, **options: Any) -> tuple[Pipeline, int]:
        counts = None if held is None else ReadCounts(1000, 0, rows_to_hold=int(1000 * held))
        buffers: list[int] = []

        def choose_feed(name: Any, *_: Any, **given: Any) -> tuple[Any, Choice]:
            buffers.append(given["buffers"])
            return SimpleNamespace(name=name, counts=lambda: counts), Choice(name, "")

        monkeypatch.setattr(pipeline, "choose_feed", choose_feed)
        monkeypatch.setattr(pipeline, "SideStream", lambda *given, **named: "side")
        dataset = MemmapDataset(path)
        arguments = {"num_threads": 3, "prefetch_factor": 2, "batch_size": 100, "transform": None}
        made = make_pipeline(
            samples_of(dataset, dataset.sample_names),
            torch.device("cpu" if feed_name == "cpu" else "cuda"),
            feed_name,  # type: ignore[arg-type]  # the name of a feed
            limits=NO_LIMITS,
            **{**arguments, **options},
        )
        return made, buffers[0]

    return make


@pytest.mark.parametrize(
    ("feed", "options", "expected"),
    [
        ("cpu", {}, (None, 3, 6, 1)),
        ("cpu", {"num_threads": 0}, (None, 0, 1, 1)),
        ("resident", {}, (None, 0, 1, 1)),
        ("resident", {"transform": str}, ("side", 0, 3, 1)),
        ("pinned", {}, ("side", 3, 4, 1)),
        ("pinned", {"num_threads": 0}, ("side", 0, 1, 1)),
        ("dma", {"held": 1}, ("side", 0, 3, 32)),
        ("uva", {"held": 1}, ("side", 0, 3, 32)),
        ("disk", {"held": 0}, ("side", 0, 3, 32)),
        ("disk", {"held": 0, "num_threads": 0, "prefetch_factor": 5}, ("side", 0, 6, 32)),
    ],
)
def test_what_is_in_flight_depends_on_the_feed(
    feed: str,
    options: dict[str, Any],
    expected: tuple[Any, ...],
    make: Callable[..., tuple[Pipeline, int]],
) -> None:
    assert make(feed, **options)[0][3:] == expected


@pytest.mark.parametrize(
    ("batch_size", "held", "expected"),
    [
        (1, 0.0, 32),
        (1, 0.99, 32),  # at most
        (10, 0.0, 10),
        (10, 0.5, 20),
        (10, 0.9, 32),
        (25, 0.5, 8),
        (25, 0.9, 16),  # not 40: 16 of these batches are all that may be page-locked
        (25, 1.0, 4),  # as if all had to be read, until all are held
        (1000, 0.0, 2),  # at least
        (1000, 0.9, 2),
        (None, 0.9, 2),
    ],
)
def test_more_batches_are_read_ahead_if_fewer_of_their_rows_have_to_be_read(
    batch_size: int | None,
    held: float,
    expected: int,
    make: Callable[..., tuple[Pipeline, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "_READ_AHEAD_BYTES", 100 * ROW_BYTES)
    monkeypatch.setattr(pipeline, "_PAGE_LOCKED_BYTES", 400 * ROW_BYTES)
    made, buffers = make("disk", held=held, batch_size=batch_size)
    assert made.reads_ahead == expected
    assert buffers >= made.reads_ahead + made.in_flight


def test_rows_of_all_arrays_count_as_read_ahead(
    make_dataset: Callable[..., Index],
    add_array: Callable[..., Index],
    make: Callable[..., tuple[Pipeline, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = make_dataset(shape=(4, 6, 3))
    add_array(index, "mask", np.zeros((5, 4, 18), np.uint8), "mask")
    monkeypatch.setattr(pipeline, "_READ_AHEAD_BYTES", 100 * ROW_BYTES)
    assert make("disk", held=0, batch_size=10)[0].reads_ahead == 5
