"""What the tests of reading share."""

import multiprocessing
import threading

import pytest


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    """Let this process be the only one, whoever started the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def queues_ended(nothing_left_behind):
    """Wait for the threads that DataLoader tells to end, and does not wait for itself."""
    yield
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(10)


@pytest.fixture
def in_forked_child():
    """A function that calls another one in a forked child, and returns its result."""

    def call(function):
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=lambda: sender.send(function()))
        process.start()
        try:
            assert receiver.poll(30), "the child hangs"
            result = receiver.recv()
            process.join(30)
            assert process.exitcode == 0
        finally:
            process.kill()  # does nothing to a child that has ended
            process.join()
            receiver.close()
            sender.close()
        return result

    return call


@pytest.fixture
def own_threads():
    """A function that lists the threads that memload has started."""
    return lambda: [thread for thread in threading.enumerate() if thread.name.startswith("memload")]
