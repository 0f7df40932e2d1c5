"""What is asked of CUDA's streams, in which order; whether it is right there, tests/cuda tells."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memload import transforms
from memload.reading import pipeline
from memload.reading.streams import SideStream


class Recorded:
    """Streams and events that write down what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.events = 0

    def stream(self, name: str) -> Any:
        asked = self.asked

        class Stream:
            def wait_event(self, event: Any) -> None:
                asked.append((name, "waits for", event.name))

        return Stream()

    def event(self, **_: Any) -> Any:
        self.events += 1
        asked, name = self.asked, f"event {self.events}"

        class Event:
            def record(self, stream: Any) -> None:
                asked.append((self.name, "recorded"))

            def synchronize(self) -> None:
                asked.append(("host", "waits for", self.name))

        Event.name = name  # type: ignore[attr-defined]
        return Event()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    found = Recorded()

    @contextlib.contextmanager
    def current(stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: found.stream("side"))
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "stream", current)
    consumer = found.stream("consumer")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: consumer)
    return found


def batches(side: SideStream, cuda: Recorded, count: int) -> list[list[tuple[Any, ...]]]:
    """Return what was asked for each batch, made and at once handed over."""
    asked = []
    for _ in range(count):
        cuda.asked.clear()
        assert side.hand_over(side.begin(str, "batch", side.consumer())) == "batch"
        asked.append(list(cuda.asked))
    return asked


def test_what_others_make_waits_for_all_that_the_consumer_has_asked_for(cuda: Recorded) -> None:
    side = SideStream(torch.device("cuda", 0), 1)
    for number, asked in enumerate(batches(side, cuda, 4)):
        assert asked[:2] == [("event 1", "recorded"), ("side", "waits for", "event 1")]
        assert asked[2:4] == [
            (f"event {number + 2}", "recorded"),
            ("consumer", "waits for", f"event {number + 2}"),
        ]


def test_what_memload_makes_waits_for_a_state_that_the_host_has_almost_waited_for(
    cuda: Recorded,
) -> None:
    side = SideStream(torch.device("cuda", 0), 1, waits=False)
    first, *others = batches(side, cuda, 5)
    assert first[:2] == [
        ("event 1", "recorded"),
        ("side", "waits for", "event 1"),
    ]  # of all before the first batch
    reached = [entry[0] for entry in first if entry[1] == "recorded"][
        -1:
    ]  # what the consumer's stream had reached
    for asked in others:
        assert asked[0] == ("side", "waits for", reached[0])
        assert ("event 1", "recorded") not in asked
        reached.append([entry[0] for entry in asked if entry[1] == "recorded"][-1])
        if len(reached) > 2:
            assert asked[-1] == ("host", "waits for", reached.pop(0))


def test_only_what_has_no_code_of_others_in_it_need_not_wait() -> None:
    class Own(transforms.Transform):
        """A user's."""

    ours = transforms.train(8)
    assert pipeline._is_built_in(None)
    assert pipeline._is_built_in(ours)
    assert pipeline._is_built_in(transforms.Normalize("imagenet"))
    for step in (torch.nn.Identity(), lambda images: images, Own()):
        assert not pipeline._is_built_in(step)
        assert not pipeline._is_built_in(transforms.Compose([*ours.transforms, step]))
