"""What is asked of CUDA, in which order, and how a Loader uses it. tests/cuda shows that it is right."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memload import transforms
from memload.feeds.limits import NO_LIMITS
from memload.reading import pipeline
from memload.reading.pipeline import Pipeline
from memload.reading.streams import SideStream


class Recorded:
    """Streams and events that write down what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.events = 0

    def stream(self, name: str) -> Any:
        def wait_event(event: Any) -> None:
            self.asked.append((name, "waits for", event.name))

        return SimpleNamespace(wait_event=wait_event)

    def event(self, **_: Any) -> Any:
        self.events += 1
        name = f"event {self.events}"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.asked.append((name, "recorded")),
            synchronize=lambda: self.asked.append(("host", "waits for", name)),
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    consumer = recorded.stream("consumer")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: recorded.stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", recorded.event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: consumer)
    return recorded


def batches(side: Any, cuda: Recorded, count: int) -> list[list[tuple[Any, ...]]]:
    """Return what was asked for each batch, made and at once handed over."""
    asked = []
    for _ in range(count):
        cuda.asked.clear()
        consumer = torch.cuda.current_stream(0)
        assert side.hand_over(side.begin(lambda: "batch", consumer)) == "batch"
        side.keep_back()
        asked.append(list(cuda.asked))
    return asked


def make_pipeline(monkeypatch: pytest.MonkeyPatch, transform: Any) -> Pipeline:
    """Return the pipeline with a feed that cannot be made here."""
    feed: Any = SimpleNamespace(name="dma", counts=lambda: None)
    monkeypatch.setattr(pipeline, "choose_feed", lambda *_, **__: (feed, None))
    device, samples = torch.device("cuda", 0), SimpleNamespace(arrays=())
    options: Any = {"num_threads": 2, "prefetch_factor": 2}
    options |= {"batch_size": None, "limits": NO_LIMITS}
    return pipeline.make_pipeline(samples, device, "auto", transform, **options)  # type: ignore[arg-type]


def test_what_others_make_waits_for_all_that_the_consumer_has_asked_for(cuda: Recorded) -> None:
    side = SideStream(torch.device("cuda", 0), 1)
    for number, asked in enumerate(batches(side, cuda, 4)):
        assert asked[:4] == [
            ("event 1", "recorded"),
            ("side", "waits for", "event 1"),
            (f"event {number + 2}", "recorded"),
            ("consumer", "waits for", f"event {number + 2}"),
        ]


def test_what_memload_makes_waits_for_a_state_that_the_host_has_almost_waited_for(
    cuda: Recorded,
) -> None:
    side = SideStream(torch.device("cuda", 0), 1, waits=False)
    first, *others = batches(side, cuda, 5)
    assert first[:2] == [("event 1", "recorded"), ("side", "waits for", "event 1")]
    # what the consumer's stream had reached when it got each of the last batches
    reached = [[entry[0] for entry in first if entry[1] == "recorded"][-1]]
    for asked in others:
        assert asked[0] == ("side", "waits for", reached[0])
        assert ("event 1", "recorded") not in asked
        reached.append([entry[0] for entry in asked if entry[1] == "recorded"][-1])
        if len(reached) > 2:
            assert asked[-1] == ("host", "waits for", reached.pop(0))


def test_waiting_for_data_comes_before_waiting_for_the_consumer(cuda: Recorded) -> None:
    side = SideStream(torch.device("cuda", 0), 1, waits=False)
    batch, ready = side.begin(lambda: "batch")
    first: Any = ready
    side.hand_over((batch, ready))
    side.keep_back()
    for _ in range(2):
        begun = side.begin(lambda: "batch")
        cuda.asked.clear()
        side.hand_over(begun)
        in_hand_over = cuda.asked.copy()
        cuda.asked.clear()
        side.keep_back()
    assert in_hand_over[-1] == ("host", "waits for", first.name)
    ((who, _, what),) = cuda.asked
    assert (who, what) != ("host", first.name)  # but what the consumer had reached then


class OwnTransform(transforms.Transform):
    """A user's."""


@pytest.mark.parametrize(
    ("transform", "waits"),
    [
        (None, False),
        (transforms.train(8), False),
        (torch.nn.Identity(), True),
        (transforms.Compose([transforms.Normalize("imagenet"), OwnTransform()]), True),
    ],
    ids=["none", "train", "module", "own in a list"],
)
def test_only_transforms_of_memload_need_not_wait_for_the_consumer(
    transform: Any, waits: bool, cuda: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_pipeline(monkeypatch, transform)
    second = batches(made.side_stream, cuda, 2)[1]
    assert (("event 1", "recorded") in second) == waits
