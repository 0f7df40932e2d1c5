"""What an iteration has handed out, and how long each side has waited for the other."""

from copy import copy
from dataclasses import dataclass
from time import perf_counter

from memload.wording import counted, size_text


@dataclass
class Stats:
    """What an iteration has handed out so far, and what the loop has waited for.

    >>> print(Stats(batches=1000, seconds_waited=0.4, seconds_in_loop=51.7, feed="dma"))
    1,000 batches in 52.1 s: waited 0.4 s for data (0.8 %), feed dma

    All seconds are those of the host. See `Loader.stats` for what they mean.

    Attributes:
        epoch: The epoch that is, or was, iterated.
        batches: Batches that were handed out. An epoch that was resumed counts from where it went
            on.
        seconds_waited: Seconds from when a batch was asked for until it was handed out, for all
            batches together. A timer of your own around ``next()`` may show more: it also counts
            freeing the batch before.
        seconds_to_first: How many of these passed before the first batch: also to choose the feed
            and fill it.
        seconds_in_loop: Seconds from when a batch was handed out until the next one was asked for.
        samples: Images that were handed out. A `CudaPrefetcher` does not count them.
        bytes: Bytes of their rows, and of masks and other arrays, as they are stored.
        feed: The name of the feed; empty if there is none.
    """

    epoch: int = 0
    batches: int = 0
    seconds_waited: float = 0.0
    seconds_to_first: float = 0.0
    seconds_in_loop: float = 0.0
    samples: int = 0
    bytes: int = 0
    feed: str = ""

    @property
    def seconds(self) -> float:
        """From when the first batch was asked for, up to the last change of these numbers."""
        return self.seconds_waited + self.seconds_in_loop

    def __str__(self) -> str:
        if not self.batches:
            return "no batches yet"
        notes = [f"{100 * self.seconds_waited / max(self.seconds, 1e-9):.1f} %"]
        is_mostly_for_first = self.seconds_to_first > self.seconds_waited - self.seconds_to_first
        if self.batches > 1 and is_mostly_for_first:
            notes.append(f"{_seconds_text(self.seconds_to_first)} for the first batch")
        parts = [
            f"{counted(self.batches, 'batch', 'batches')} in {_seconds_text(self.seconds)}: "
            f"waited {_seconds_text(self.seconds_waited)} for data ({'; '.join(notes)})"
        ]
        if self.feed:
            parts.append(f"feed {self.feed}")
        if self.bytes:
            parts.append(size_text(self.bytes))
        return ", ".join(parts)


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"


class Stopwatch:
    """Takes the time of one iteration, whose thread calls `hand_over` and `ask` in turn.

    ``stats`` may be read on any thread. ``asked_at`` is when the first batch was asked for, a time
    of ``time.perf_counter``.
    """

    def __init__(self, asked_at: float, epoch: int, feed: str = "") -> None:
        self.asked_at, self._handed_over = asked_at, 0.0
        self._stats = Stats(epoch, feed=feed)

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        return copy(self._stats)

    def hand_over(self, samples: int = 0, size: int = 0) -> None:
        """Count a batch of so many bytes that is handed out now, and the time it was waited for."""
        now, stats = perf_counter(), self._stats
        self._handed_over = now
        stats.seconds_waited += now - self.asked_at
        if not stats.batches:
            stats.seconds_to_first = stats.seconds_waited
        stats.batches += 1
        stats.samples += samples
        stats.bytes += size

    def ask(self) -> None:
        """Count the time since the last batch was handed out: now the next one is asked for."""
        self.asked_at = perf_counter()
        self._stats.seconds_in_loop += self.asked_at - self._handed_over
