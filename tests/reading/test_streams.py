"""Which stream waits for which, by a fake of CUDA. tests/cuda shows that it is right."""

import contextlib

import pytest
import torch

from memload.reading.streams import SideStream


class Stream:
    """A stream whose states, as events record them, are numbered: "side 1", "side 2", …"""

    def __init__(self, name, waits):
        self.name, self.waits, self.recorded = name, waits, 0

    def wait_event(self, event):
        self.waits.append(f"{self.name} waits for {event.state}")


@pytest.fixture
def waits(monkeypatch):
    """All waits that were asked for, as texts."""
    waits = []
    consumer = Stream("consumer", waits)

    class Event:
        def __init__(self, **_):
            pass

        def record(self, stream):
            stream.recorded += 1
            self.state = f"{stream.name} {stream.recorded}"

        def synchronize(self):
            waits.append(f"host waits for {self.state}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream("side", waits))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: consumer)
    return waits


def hand_over(side, waits, count):
    """Return the waits for each batch, which is made and at once handed over."""
    result = []
    for _ in range(count):
        waits.clear()
        assert side.hand_over(side.begin(lambda: "batch")) == "batch"
        waits.append("handed over")
        side.wait_while_ahead()
        result.append(list(waits))
    return result


def test_what_others_make_waits_for_all_that_the_consumer_has_asked_for(waits):
    side = SideStream(torch.device("cuda", 0), 1)
    for number, found in enumerate(hand_over(side, waits, 5), start=1):
        assert found == [
            f"side waits for consumer {number}",
            f"consumer waits for side {number}",
            "handed over",
            # No more than two batches are kept back.
            *([f"host waits for side {number - 2}"] if number > 2 else []),
        ]


def test_what_memload_makes_waits_for_a_state_that_the_host_has_almost_waited_for(waits):
    side = SideStream(torch.device("cuda", 0), 1, waits=False)
    assert hand_over(side, waits, 4) == [
        ["side waits for consumer 1", "consumer waits for side 1", "handed over"],
        # "consumer 2" is what it had reached when it got the first batch
        ["side waits for consumer 2", "consumer waits for side 2", "handed over"],
        # Waiting for data comes before the batch, waiting for the consumer behind it.
        [
            "side waits for consumer 2",
            "consumer waits for side 3",
            "host waits for side 1",
            "handed over",
            "host waits for consumer 2",
        ],
        [
            "side waits for consumer 3",
            "consumer waits for side 4",
            "host waits for side 2",
            "handed over",
            "host waits for consumer 3",
        ],
    ]
