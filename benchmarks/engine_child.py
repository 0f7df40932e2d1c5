"""What `engine.py` asks of a version of memload: that of the checkout on PYTHONPATH.

A line of JSON on stdin names a function of `JOBS` and its arguments. A line of JSON on stdout
answers with figures by name, or with an error. Between two jobs the process waits for stdin and
does nothing else; its Loaders stay open. Only public names of memload are used.
"""

import collections
import functools
import gc
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import memload

#: A Loader that registers its files in the background is warm when it has not become faster for so
#: many seconds. All others are warm after an epoch.
SETTLE_SECONDS = {"dma": 3.0}
LEAST_SECONDS = 0.5
#: Batches of a training run whose time does not count; the first of all choose cuDNN's kernels.
UNTIMED_STEPS, UNTIMED_AT_FIRST = 10, 30

Figures = dict[str, float]
LOADERS: dict[str, Any] = {}
TRAINED: set[tuple[str, str, str]] = set()


# Tools


def wait() -> None:
    """Wait for the GPU, if this process has used one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measured(run: Callable[[], int]) -> Figures:
    """Measure a function that returns a number of images: images per second, and CPU cores."""
    wait()
    cpu, start = time.process_time(), time.perf_counter()
    images = run()
    wait()
    seconds = time.perf_counter() - start
    return {"images/s": images / seconds, "cores": (time.process_time() - cpu) / seconds}


def open_loader(path: str, batch: int, options: dict[str, Any]) -> Any:
    """Return a new Loader in random order."""
    opener = functools.partial(memload.Loader, path, batch, shuffle=True, drop_last=True)
    try:
        return opener(**options)
    except (ValueError, memload.MemloadError):
        if options.get("feed") != "disk":
            raise
        return opener(**options | {"feed": "dma"})  # where "disk" is not a feed of its own


def kept_loader(path: str, batch: int, options: dict[str, Any]) -> Any:
    """Return a Loader that stays open. When it is opened, epochs are taken until it is warm."""
    key = json.dumps([path, batch, options], sort_keys=True)
    if key not in LOADERS:
        loader = LOADERS[key] = open_loader(path, batch, options)
        patience = SETTLE_SECONDS.get(options.get("feed", ""), 0.0)
        best, end = 0.0, time.perf_counter() + patience
        while not best or time.perf_counter() < end:
            rate = measured(lambda: take_epochs(loader, 0.0))["images/s"]
            if rate > 1.05 * best:
                best, end = rate, time.perf_counter() + patience
    return LOADERS[key]


def take_epochs(loader: Any, least_seconds: float) -> int:
    """Take whole epochs, at least one, until so many seconds have passed; return the images."""
    images, end = 0, time.perf_counter() + least_seconds
    while not images or time.perf_counter() < end:
        images += sum(len(batch[0]) for batch in loader)
    return images


@functools.cache
def rows_in_ram(path: str) -> np.ndarray:
    """Return the pixels of a file as rows of bytes, all pages of which are in the page tables."""
    pixels = np.asarray(np.load(path, mmap_mode="r"))
    rows = pixels.reshape(len(pixels), -1)
    rows.reshape(-1)[::4096].max()
    return rows


# Limits


def pinned_copies(bytes_per_image: int, batch: int, copies: int = 400) -> Figures:
    """Copy one page-locked buffer of the size of a batch to the GPU, again and again."""
    memory = torch.zeros(batch * bytes_per_image, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(len(memory), dtype=torch.uint8, device="cuda")
    target.copy_(memory)

    def run() -> int:
        for _ in range(copies):
            target.copy_(memory, non_blocking=True)
        return copies * batch

    return measured(run)


def bare_threads(path: str, batch: int, threads: int, send: bool) -> Figures:
    """Take random rows with so many threads, each into a buffer of its own that is used again.

    With ``send``, the buffers are page-locked, and each is copied to the GPU on a stream of its own.
    """
    rows, random, passes = rows_in_ram(path), np.random.default_rng(), 1 + threads // 4
    batches: collections.deque[np.ndarray] = collections.deque()
    for _ in range(passes):
        order = random.permutation(len(rows))
        batches.extend(order[i : i + batch] for i in range(0, len(order) - batch + 1, batch))
    shape, images = (batch, rows.shape[1]), len(batches) * batch
    buffers = [torch.empty(shape, dtype=torch.uint8, pin_memory=send) for _ in range(threads)]
    for buffer in buffers:
        buffer.numpy().fill(0)  # not by torch, whose threads go on spinning for a while
    targets = [torch.empty_like(one, device="cuda") for one in buffers] if send else []
    streams = [torch.cuda.Stream() for _ in targets]

    def work(number: int) -> None:
        buffer = buffers[number].numpy()
        while True:
            try:
                chosen = batches.pop()
            except IndexError:
                return
            np.take(rows, chosen, axis=0, out=buffer, mode="clip")
            if send:
                with torch.cuda.stream(streams[number]):
                    targets[number].copy_(buffers[number], non_blocking=True)
                streams[number].synchronize()

    def run() -> int:
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return images

    return measured(run)


# What is measured


def epochs(path: str, batch: int, options: dict[str, Any]) -> Figures:
    """Take whole epochs of a warm Loader."""
    loader = kept_loader(path, batch, options)
    return measured(lambda: take_epochs(loader, LEAST_SECONDS))


def cold_epochs(path: str, batch: int, first_rows: int, options: dict[str, Any]) -> Figures:
    """Take three epochs of a Loader whose file is not in RAM. The clock starts with the loop."""
    if options["device"] == "cuda":
        torch.zeros(1, device="cuda")  # CUDA starts before the clock
    start = time.perf_counter()
    loader = open_loader(path, batch, options)
    found = {"opening (ms)": 1000 * (time.perf_counter() - start)}

    def first_epoch() -> int:
        images, start = 0, time.perf_counter()
        for batch in loader:
            images += len(batch[0])
            if images >= first_rows and "first rows" not in found:
                wait()
                found["first rows"] = images / (time.perf_counter() - start)
        return images

    runs = [first_epoch, *[lambda: take_epochs(loader, 0.0)] * 2]
    for number, run in enumerate(runs, 1):
        figures = measured(run)
        found |= {
            f"epoch {number}": figures["images/s"],
            f"epoch {number}, cores": figures["cores"],
        }
    return found


def first_batch(path: str, batch: int, options: dict[str, Any]) -> Figures:
    """Open a Loader and wait for its first batch. It is closed when the clock has stopped."""
    wait()
    start = time.perf_counter()
    loader = open_loader(path, batch, options)
    batches = iter(loader)
    next(batches)
    wait()
    milliseconds = 1000 * (time.perf_counter() - start)
    del batches, loader
    gc.collect()
    time.sleep(0.3)  # for its threads to end
    return {"time (ms)": milliseconds}


def open_index(path: str) -> Figures:
    """Open a data set; the process has imported what it needs, and opened nothing before.

    The resident memory that it grows by includes pages of the index that all processes share, the
    private memory does not.
    """

    def memory(kind: str) -> float:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(kind)) * 1024 / 1e6

    opener, kinds = memload.MemmapDataset, {"Rss:": "resident (MB)", "Private_": "private (MB)"}
    before, start = {kind: memory(kind) for kind in kinds}, time.perf_counter()
    dataset = opener(path)
    milliseconds = 1000 * (time.perf_counter() - start)
    grown = {name: memory(kind) - before[kind] for kind, name in kinds.items()}
    del dataset
    return {"time (ms)": milliseconds, **grown}


@functools.cache
def network(model: str, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network of torchvision's, and its optimizer."""
    import torchvision

    torch.backends.cudnn.benchmark = True
    found = getattr(torchvision.models, model)().to(device, memory_format=torch.channels_last)
    return found, torch.optim.SGD(found.parameters(), 0.01, momentum=0.9, fused=True)


def training_batches(path: str, batch: int, options: dict[str, Any]) -> Iterator[Any]:
    """Yield batches without end: those of a Loader with transforms, or one again where no path is."""
    if not path:
        images = torch.randn(batch, 3, 224, 224, device=options["device"]).bfloat16()
        images = images.to(memory_format=torch.channels_last)
        labels = torch.randint(0, 1000, (batch,), device=options["device"])
        yield from itertools.repeat((images, labels))
    key = json.dumps([path, batch, options], sort_keys=True)
    if key not in LOADERS:
        from memload import transforms

        steps = [transforms.RandomHorizontalFlip(), transforms.Normalize("imagenet")]
        transform = transforms.Compose([*steps, transforms.ToDtype(torch.bfloat16)])
        LOADERS[key] = open_loader(path, batch, options | {"transform": transform})
    while True:
        yield from LOADERS[key]


def train(model: str, path: str, batch: int, steps: int, options: dict[str, Any]) -> Figures:
    """Train a network for some steps. Those before them warm up."""
    device, untimed = options["device"], UNTIMED_STEPS
    if (model, path, str(options)) not in TRAINED:
        TRAINED.add((model, path, str(options)))
        untimed = max(untimed, min(steps, UNTIMED_AT_FIRST))
    trained, optimizer = network(model, device)
    batches = training_batches(path, batch, options)

    def run(steps: int) -> int:
        for images, labels, *_ in itertools.islice(batches, steps):
            with torch.autocast(device, torch.bfloat16):
                loss = nn.functional.cross_entropy(trained(images), labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        return steps * batch

    run(untimed)
    figures = measured(lambda: run(steps))
    batches.close()
    return figures


# The protocol

JOBS = {
    job.__name__: job
    for job in (pinned_copies, bare_threads, epochs, cold_epochs, first_batch, open_index, train)
}


def main() -> None:
    """Answer jobs until stdin ends. What else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    answer({"checkout": str(Path(memload.__file__).parents[1]), "version": memload.__version__})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            found = JOBS[job.pop("job")](**job)
        except Exception as error:  # noqa: BLE001  # of any kind: the other jobs are worth having
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        answer(found)


if __name__ == "__main__":
    main()
