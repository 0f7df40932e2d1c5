"""Page-locked buffers. CUDA is replaced by functions that record."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memload import FeedError
from memload.feeds import page_locked
from memload.feeds.page_locked import Staging

CUDA = torch.device("cuda", 0)


class Device:
    """Page-locked memory, address and size, and copies that end when the test says so."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.events: list[Any] = []
        self.synchronized = 0

    def register(self, address: int, size: int, flags: int) -> None:
        self.memory[address] = size

    def unregister(self, address: int) -> None:
        assert f"{address:x}-" in Path("/proc/self/maps").read_text(), "it is unmapped already"
        del self.memory[address]

    def event(self, blocking: bool) -> Any:
        assert blocking
        event = SimpleNamespace(is_over=False, waits=0)

        def synchronize() -> None:
            event.waits += 1

        event.record = lambda stream: None
        event.query = lambda: event.is_over
        event.synchronize = synchronize
        self.events.append(event)
        return event

    def synchronize(self, device: Any) -> None:
        self.synchronized += 1


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr(page_locked, "register", device.register)
    monkeypatch.setattr(page_locked, "unregister", device.unregister)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    yield device
    gc.collect()
    assert not device.memory


def test_a_buffer_is_used_again_once_the_copy_out_of_it_is_over(device: Device) -> None:
    staging = Staging(CUDA, soft_limit=3)
    first = staging.take(100)
    assert (first.dtype, len(first)) == (torch.uint8, 100)
    assert device.memory == {first.data_ptr(): 100}
    staging.give_back(first)
    second = staging.take(100)
    assert second.data_ptr() != first.data_ptr()  # the copy goes on
    device.events[0].is_over = True
    assert staging.take(60).data_ptr() == first.data_ptr()
    assert len(device.memory) == 2


def test_at_the_limit_the_oldest_copy_is_waited_for(device: Device) -> None:
    staging = Staging(CUDA, soft_limit=2)
    buffers = [staging.take(100) for _ in range(2)]
    for buffer in buffers:
        staging.give_back(buffer)
    assert staging.take(100).data_ptr() == buffers[0].data_ptr()
    assert [event.waits for event in device.events] == [1, 0]
    assert staging.take(100).data_ptr() == buffers[1].data_ptr()
    assert staging.take(100).data_ptr() not in {buffer.data_ptr() for buffer in buffers}


def test_dropped_buffers_are_freed_and_do_not_count(device: Device) -> None:
    staging = Staging(CUDA, soft_limit=2)
    for _ in range(10):
        dropped = [staging.take(100) for _ in range(3)]
        assert len(device.memory) == 3
        del dropped
        assert not device.memory
    first = staging.take(100)
    staging.give_back(first)
    assert staging.take(100).data_ptr() != first.data_ptr()  # there may be two: nothing waits
    assert device.events[0].waits == 0


def test_memory_is_freed_when_the_device_has_finished_with_the_last_reference(
    device: Device,
) -> None:
    part = Staging(CUDA, soft_limit=2).take(100)[10:20].view(2, 5).numpy()
    assert len(device.memory) == 1
    assert device.synchronized == 0
    part[:] = 1
    del part
    assert not device.memory
    assert device.synchronized == 1


def test_larger_batches_get_larger_buffers(device: Device) -> None:
    staging = Staging(CUDA, soft_limit=2)
    small = staging.take(800)
    staging.give_back(staging.take(800))
    larger = staging.take(1600)
    assert list(device.memory.values()) == [800, 1600]
    staging.give_back(small)  # not used again
    del small
    assert list(device.memory.values()) == [1600]
    staging.give_back(larger)
    device.events[-1].is_over = True
    assert staging.take(1200).data_ptr() == larger.data_ptr()


def test_new_buffers_have_room_for_somewhat_larger_batches(device: Device) -> None:
    staging = Staging(CUDA, soft_limit=2)
    buffer = staging.take(800, room=100)
    assert device.memory == {buffer.data_ptr(): 900}
    staging.give_back(buffer)
    device.events[0].is_over = True
    assert staging.take(900, room=100).data_ptr() == buffer.data_ptr()
    assert len(staging.take(901, room=100)) == 1001


def test_memory_that_cannot_be_locked_is_a_feed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 2,
        cudaGetErrorString={2: "out of memory"}.__getitem__,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *arguments, **options: None)
    staging = Staging(CUDA, soft_limit=2)
    with pytest.raises(
        FeedError, match="CUDA cannot page-lock 5,000 bytes of memory: out of memory"
    ):
        staging.take(5000)
