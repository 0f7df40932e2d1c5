"""What bounds the training, from milliseconds a batch. Numbers in, sentences out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memload.doctor.times import Part, Times, Trial, milliseconds, outliers

Bound = Literal["model", "disk", "threads", "prefetching", "workers", "loading", Part]

#: Times within this factor of each other count as equal; and while other processes are at work.
_NOISE, _NOISE_IF_DISTURBED = 1.25, 1.5
#: A model that waits for less than this share of its step is what bounds the training.
_NEGLIGIBLE = 0.05

_NAMES: dict[Bound, str] = {
    "disk": "Reading the disk",
    "loading": "Making batches",
    "transform": "The transform",
    "gathering": "Gathering rows",
    "bus": "Bringing rows to the GPU",
    "samples": "Reading and collating single samples",
    "dataset": "Decoding, resizing, or what else __getitem__ does",
}
_REMEDIES: dict[Bound, str] = {
    "loading": "Which part of that takes long was not measured: see docs/profiling.md.",
    "gathering": "Build smaller images (--size), or use a machine with more memory bandwidth.",
    "bus": "Build smaller images (--size): fewer bytes cross the bus.",
    "samples": "Use a memload.Loader, which reads whole batches while the model is at work.",
    "dataset": "Build the images once with 'memload build', and use a memload.Loader over the "
    "result.",
}


@dataclass(frozen=True)
class Verdict:
    """What bounds the training, by how much, and what to do."""

    bound: Bound
    sentence: str
    remedy: str = ""
    #: What else to know of it: that the CPU is shared with the model, or with other processes.
    note: str = ""
    #: After how many milliseconds a batch is there, and for how many the model waits for it.
    data_ms: float = 0.0
    wait_ms: float | None = None
    #: The best settings of a Loader that were measured together. None: they make no difference, or
    #: nothing was compared.
    num_threads: int | None = None
    prefetch_factor: int | None = None


def judge(times: Times, step_ms: float | None = None, *, is_busy: bool = False) -> Verdict:
    """Say what bounds a model that takes ``step_ms`` a batch; None: what the data allows.

    ``is_busy``: other processes were at work, so only large differences count.

    >>> judge(Times(batch=6), step_ms=54).sentence
    'The model: it takes 54 ms a batch, and data is there after 6 ms.'
    >>> judge(Times(batch=6, disk=81), step_ms=54).sentence
    'Reading the disk: 81 ms a batch, the model waits 27 ms of each step.'
    """
    is_disturbed = is_busy or bool(outliers(times.trials))
    noise = _NOISE_IF_DISTURBED if is_disturbed else _NOISE
    # Threads read the disk, too. It was measured with many of them: do not advise fewer.
    best = recommended(times.trials, None if times.is_disk_slower else step_ms, noise)
    better = best if best and _is_better(best, times, noise) else None
    data_ms, wait_ms = _data_ms(times, times.disk), None
    bound = _slowest(times, step_ms, better, noise)
    if step_ms is not None:
        wait_ms = max(0.0, data_ms - step_ms) if times.is_ahead else data_ms
        bound = "model" if wait_ms <= _NEGLIGIBLE * step_ms else bound
    return Verdict(
        bound,
        _sentence(bound, times, step_ms, better, data_ms, wait_ms),
        _remedy(bound, times, step_ms, better),
        _note(times, bound, step_ms, is_disturbed),
        data_ms,
        wait_ms,
        num_threads=best.num_threads if best else None,
        prefetch_factor=best.prefetch_factor if best else None,
    )


def _data_ms(times: Times, disk_ms: float) -> float:
    """Return after how long a batch is there, if reading its rows takes ``disk_ms``.

    Without threads or workers, a loader reads, then works.
    """
    return max(times.batch, disk_ms) if times.is_ahead else times.batch + disk_ms


def recommended(
    trials: Sequence[Trial], step_ms: float | None = None, noise: float = _NOISE
) -> Trial | None:
    """Return the best settings for a model that takes ``step_ms`` a batch; None without a choice.

    Times within the factor ``noise`` of each other count as equal. If some settings keep up with
    the model, the best ones are those with the fewest threads. If none do, the best ones are those
    with the fewest threads that are as fast as the fastest. The user's own, which come first, stay
    if they are as fast as the best ones, unless these keep up with fewer threads.

    >>> trials = [Trial(2, 2, ms=26), Trial(1, 2, ms=50), Trial(4, 2, ms=14), Trial(8, 2, ms=13.9)]
    >>> recommended(trials), recommended(trials, step_ms=40)
    (Trial(num_threads=4, prefetch_factor=2, ms=14), Trial(num_threads=2, prefetch_factor=2, ms=26))
    """
    usable = [trial for trial in trials if trial.num_threads != 0]  # which loads nothing ahead
    if len(trials) < 2 or not usable:
        return None
    own = trials[0]
    keeping_up = [trial for trial in usable if noise * trial.ms <= (step_ms or 0)]
    fastest_ms = min(trial.ms for trial in usable)
    enough = keeping_up or [trial for trial in usable if trial.ms <= noise * fastest_ms]

    def cost(trial: Trial) -> tuple[int, bool, float]:
        is_other_factor = trial.prefetch_factor != own.prefetch_factor
        return trial.threads_at_work, is_other_factor, trial.ms

    best = min(enough, key=cost)
    saves_threads = bool(keeping_up) and best.threads_at_work < own.threads_at_work
    is_as_fast = own.ms <= noise * (best.ms if keeping_up else fastest_ms)
    return own if own in usable and is_as_fast and not saves_threads else best


def _is_better(best: Trial, times: Times, noise: float) -> bool:
    """Return whether other settings are much better than those of the Loader."""
    loads_nothing_ahead = times.trials[0].num_threads == 0
    return loads_nothing_ahead or noise * best.ms < times.batch


def _sentence(
    bound: Bound,
    times: Times,
    step_ms: float | None,
    better: Trial | None,
    data_ms: float,
    wait_ms: float | None,
) -> str:
    """Return what bounds the training, and by how much."""
    if step_ms is None or wait_ms is None:
        return (
            f"Data is there after {_ms(data_ms)} a batch, and a model that takes longer does not "
            f"wait. {_longest(bound, times, better)}."
        )
    if bound == "model":
        return (
            f"The model: it takes {_ms(step_ms)} a batch, and data is there after {_ms(data_ms)}."
        )
    described = _described(bound, times, better)
    return f"{described}, the model waits {_ms(wait_ms)} of each step."


def _slowest(times: Times, step_ms: float | None, better: Trial | None, noise: float) -> Bound:
    """Return what the data waits for."""
    if times.is_disk_slower:
        return "disk"
    if _is_better_without_workers(times, step_ms, noise):
        return "workers"
    if better and (step_ms is None or better.ms <= step_ms or times.trials[0].num_threads == 0):
        is_same_number = better.num_threads == times.trials[0].num_threads
        return "prefetching" if is_same_number else "threads"
    if not times.parts:
        return "loading"
    return max(times.parts, key=lambda part: times.parts[part])


def _is_better_without_workers(times: Times, step_ms: float | None, noise: float) -> bool:
    """Return whether training is faster if the training loop makes batches, and then trains."""
    alone = times.without_workers
    if not times.num_workers or alone is None:
        return False
    return noise * alone < times.batch and alone + (step_ms or 0) < times.batch


def _longest(bound: Bound, times: Times, better: Trial | None) -> str:
    """Name what takes longest, without its time, which is not known of single parts."""
    return f"{_NAMES[bound]} takes longest" if bound in _NAMES else _described(bound, times, better)


def _described(bound: Bound, times: Times, better: Trial | None) -> str:
    """Return what takes how long."""
    batch = f"{_ms(times.batch)} a batch"
    if bound == "disk":
        return f"{_NAMES[bound]}: {_ms(times.disk)} a batch"
    if bound == "workers":
        without = _ms(times.without_workers or 0.0)
        return f"The DataLoader's {times.num_workers} workers: {batch} ({without} without them)"
    if better and bound in ("threads", "prefetching"):
        own = times.trials[0]
        if bound == "threads":
            amount = "few" if better.threads_at_work > (own.num_threads or 0) else "many"
            return f"Too {amount} threads: {batch} with num_threads={own.num_threads}"
        amount = "little" if better.prefetch_factor > own.prefetch_factor else "much"
        return f"Too {amount} prefetching: {batch} with prefetch_factor={own.prefetch_factor}"
    return f"{_NAMES[bound]}: {batch}"


def _note(times: Times, bound: Bound, step_ms: float | None, is_disturbed: bool) -> str:
    sentences = [_on_shared_cores(times, bound, step_ms)]
    if is_disturbed:
        sentences.append("Other processes were at work: measure again when they have ended.")
    if is_disturbed and not times.has_gpu:
        sentences.append("Setting OMP_WAIT_POLICY=PASSIVE helps until then: see docs/faq.md.")
    return " ".join(filter(None, sentences))


def _on_shared_cores(times: Times, bound: Bound, step_ms: float | None) -> str:
    """Return what making batches beside the model costs where there is no GPU."""
    if times.has_gpu or not times.is_ahead or bound == "disk":
        return ""
    if step_ms is None:
        taken = _ms(times.batch)
        return f"Without a GPU, loading takes the cores from the model for {taken} of each step."
    if times.batch <= _NEGLIGIBLE * step_ms:
        return ""
    least, most = max(step_ms, times.batch), step_ms + times.batch
    return (
        "Without a GPU, model and loading share the cores: a step takes "
        f"{milliseconds(least)} to {_ms(most)}."
    )


def _remedy(bound: Bound, times: Times, step_ms: float | None, better: Trial | None) -> str:
    if bound == "model":
        return _spare_workers(times, step_ms) or "Loading is fast enough."
    if bound == "disk":
        return _remedy_for_disk(times)
    if bound == "workers":
        return (
            "Workers cost more here than they bring. Use num_workers=0 or, to load while the model "
            "is at work, a memload.Loader."
        )
    settings = ""
    if better:
        verb = "Use" if times.is_ahead else "Load while the model is at work, with"
        settings = f"{verb} {better}: {_ms(better.ms)} a batch."
    remedy = _remedy_for_transform(times) if bound == "transform" else _REMEDIES.get(bound, "")
    return f"{settings} {remedy}".strip()


def _remedy_for_disk(times: Times) -> str:
    later = _ms(_data_ms(times, times.disk_later))
    if times.disk_later == 0:
        return (
            "That is so in the first epoch only: then all rows are in RAM, and data is there after "
            f"{later}. A local NVMe disk shortens the first one."
        )
    if times.disk_later <= times.batch:
        return f"Later epochs find more rows in RAM: {later} a batch."
    return (
        f"Not all rows fit in RAM, so later epochs take {later} a batch. Use a faster disk, more "
        "RAM, or build smaller images (--size)."
    )


def _remedy_for_transform(times: Times) -> str:
    remedy = "Do what is the same in every epoch, such as resizing, before the build."
    if times.num_workers is not None:
        return (
            f"{remedy} A memload.Loader with memload.transforms does the rest to whole batches, "
            "while the model is at work."
        )
    better = (
        "a cheaper transform" if times.is_on_gpu else "a GPU, more cores, or a cheaper transform"
    )
    return f"{remedy} The rest needs {better}."


def _spare_workers(times: Times, step_ms: float | None) -> str:
    """Return what can be saved although the model is what bounds the training."""
    alone = times.without_workers
    if not times.num_workers or alone is None or alone >= (step_ms or 0):
        return ""
    return (
        f"The DataLoader's {times.num_workers} workers are not needed: without them, a batch takes "
        f"{_ms(alone)}. Use a memload.Loader, which loads it while the model is at work. With "
        "num_workers=0, the model waits for it."
    )


def _ms(number: float) -> str:
    return f"{milliseconds(number)} ms"
