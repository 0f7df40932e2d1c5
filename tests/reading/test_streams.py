"""What is asked of CUDA, in which order, and how a Loader uses it. tests/cuda shows that it is right."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from memload import transforms
from memload.reading import pipeline
from memload.reading.streams import SideStream


class Recorded:
    """Streams and events that write down what is asked of them."""

    def __init__(self):
        self.asked = []
        self.events = 0

    def stream(self, name):
        def wait_event(event):
            self.asked.append((name, "waits for", event.name))

        return SimpleNamespace(wait_event=wait_event)

    def event(self, **_):
        self.events += 1
        name = f"event {self.events}"
        return SimpleNamespace(
            name=name,
            record=lambda stream: self.asked.append((name, "recorded")),
            synchronize=lambda: self.asked.append(("host", "waits for", name)),
        )


@pytest.fixture
def cuda(monkeypatch):
    recorded = Recorded()
    consumer = recorded.stream("consumer")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: recorded.stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", recorded.event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: consumer)
    return recorded


def batches(side, cuda, count):
    """Return what was asked for each batch, made and at once handed over."""
    asked = []
    for _ in range(count):
        cuda.asked.clear()
        consumer = torch.cuda.current_stream(0)
        assert side.hand_over(side.begin(lambda: "batch", consumer)) == "batch"
        side.keep_back()
        asked.append(list(cuda.asked))
    return asked


def make_pipeline(monkeypatch, transform):
    """Return the pipeline with a feed that cannot be made here."""
    feed = SimpleNamespace(name="dma")
    monkeypatch.setattr(pipeline, "choose_feed", lambda *_, **__: (feed, None))
    options = {"num_threads": 2, "prefetch_factor": 2, "batch_size": None, "cache_bytes": None}
    return pipeline.make_pipeline([], torch.device("cuda", 0), "auto", transform, **options)


def test_what_others_make_waits_for_all_that_the_consumer_has_asked_for(cuda):
    side = SideStream(torch.device("cuda", 0), 1)
    for number, asked in enumerate(batches(side, cuda, 4)):
        assert asked[:4] == [
            ("event 1", "recorded"),
            ("side", "waits for", "event 1"),
            (f"event {number + 2}", "recorded"),
            ("consumer", "waits for", f"event {number + 2}"),
        ]


def test_what_memload_makes_waits_for_a_state_that_the_host_has_almost_waited_for(cuda):
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


def test_waiting_for_data_comes_before_waiting_for_the_consumer(cuda):
    side = SideStream(torch.device("cuda", 0), 1, waits=False)
    batch, ready = side.begin(lambda: "batch")
    ready_at_first = ready.name
    side.hand_over((batch, ready))
    side.keep_back()
    for _ in range(2):
        begun = side.begin(lambda: "batch")
        cuda.asked.clear()
        side.hand_over(begun)
        in_hand_over = cuda.asked.copy()
        cuda.asked.clear()
        side.keep_back()
    assert in_hand_over[-1] == ("host", "waits for", ready_at_first)
    ((who, _, what),) = cuda.asked
    assert (who, what) != ("host", ready_at_first)  # but what the consumer had reached then


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
    transform, waits, cuda, monkeypatch
):
    made = make_pipeline(monkeypatch, transform)
    second = batches(made.side, cuda, 2)[1]
    assert (("event 1", "recorded") in second) == waits
