"""Everything that is in RAM, on its way to the model."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle

import numpy as np
import torch

from memload.bench.loading import warm_loader
from memload.bench.setting import Setting
from memload.bench.stages import Measurement, Stage, on_threads, steady
from memload.errors import MemloadError
from memload.wording import counted


def memory_stages(setting: Setting, auto: str) -> list[Stage]:
    """Return the stages for data in RAM. ``auto`` is the feed that a Loader chooses."""
    # 256 MB, so that the cost of starting a copy does not show.
    block = max(1, (256 << 20) // setting.row_bytes)

    take = Stage("np.take into one buffer", partial(_take, setting), reported=False)
    in_ram = partial(_copy, setting, from_ram=True)
    copy = Stage("one copy of 256 MB to the GPU", partial(in_ram, block), reported=False)
    on_gpu = partial(_copy, setting, block, from_ram=False)
    inside = Stage("one copy of 256 MB within the GPU", on_gpu, reported=False)
    limits = {"resident": inside, "dma": copy, "pinned": copy, "cpu": take}
    gathers = [gather_stage(setting, number, [take]) for number in sorted({1, setting.threads})]
    copies = copy_stage(setting, [copy])
    feeds = {
        feed: warm_loader(f"feed {feed}", setting, feed, [limit]) for feed, limit in limits.items()
    }
    name = setting.transform_name
    transform = Stage(f"transform {name}", partial(_transform, setting))
    found = [take, *gathers, copy, copies, inside, *feeds.values(), transform]
    if auto in feeds:  # "disk" is measured with the disk
        limits_of_loader = [feeds[auto], transform]
        loader = f"Loader, {auto}, {name}"
        found.append(warm_loader(loader, setting, auto, limits_of_loader, setting.transform()))
    return found


def gather_stage(setting: Setting, threads: int, limits: Sequence[Stage] = ()) -> Stage:
    """Return the stage in which so many threads gather random rows."""
    subject = f"gathering rows, {counted(threads, 'thread')}"
    return Stage(subject, partial(_gather, setting, threads), limits)


def copy_stage(setting: Setting, limits: Sequence[Stage] = ()) -> Stage:
    """Return the stage that copies batches from page-locked memory to the GPU."""
    copy = partial(_copy, setting, setting.batch_size, from_ram=True)
    return Stage("copy of a batch to the GPU", copy, limits)


def _take(setting: Setting) -> Measurement:
    pixels, blocks = setting.dataset.shards.maps[0], cycle(setting.random_blocks())
    out = np.zeros((setting.block_size, *pixels.shape[1:]), pixels.dtype)

    def step() -> int:
        block = next(blocks)
        np.take(pixels, block % len(pixels), axis=0, out=out[: len(block)], mode="clip")
        return len(block)

    return steady(step)


def _gather(setting: Setting, threads: int) -> Measurement:
    blocks = setting.random_blocks()
    buffers = [setting.sample.gather(blocks[0]) for _ in range(threads)]

    def gather(thread: int) -> int:
        for block in blocks[thread::threads]:
            setting.sample.gather(block, buffers[thread][: len(block)])
        return sum(map(len, blocks[thread::threads]))

    return steady(lambda: on_threads(threads, gather, range(threads)))


def _on_gpu(setting: Setting, operation: Callable[[], object], images: int) -> Measurement:
    """Return what measures an operation on so many images, which the GPU does asynchronously."""

    def step() -> int:
        for _ in range(32):
            operation()
        setting.synchronize()
        return 32 * images

    return steady(step)


def _copy(setting: Setting, images: int, *, from_ram: bool) -> Measurement:
    """Copy so many images at once to the GPU's memory."""
    if setting.device.type != "cuda":
        raise MemloadError("torch finds no CUDA device")
    target = torch.zeros((images, setting.row_bytes), dtype=torch.uint8, device=setting.device)
    source = target.cpu().pin_memory() if from_ram else target.clone()
    return _on_gpu(setting, lambda: target.copy_(source, non_blocking=True), images)


def _transform(setting: Setting) -> Measurement:
    """Prepare the random numbers of many batches at once, as a Loader does."""
    transform = setting.transform()
    size, on_gpu = setting.batch_size, setting.device.type == "cuda"
    images = setting.sample.gather(np.arange(size)).to(setting.device).permute(0, 3, 1, 2)
    positions = np.arange((32 if on_gpu else setting.threads) * size)

    def step() -> int:
        prepared = transform.prepare(positions)

        def transform_batch(start: int) -> int:
            return len(prepared(images, None, start, start + size))

        starts = range(0, len(positions), size)
        transformed = on_threads(1 if on_gpu else setting.threads, transform_batch, starts)
        setting.synchronize()
        return transformed

    return steady(step)
