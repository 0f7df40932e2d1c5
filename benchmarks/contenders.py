"""The ways that `compare.py` sets beside each other: how each stores pictures, and how it hands out batches of them.

Each has what its own documentation recommends for speed. Nothing here imports what is not in every way's environment
but within functions. All but those that decode in training store what `resized` returns, and the label of a picture is
its place in the sorted folder.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """What to store or to read, and how."""

    folder: Path  #: has the pictures in "images"
    built: Path  #: what the way stores
    side: int
    batch: int
    workers: int  #: processes or threads, the way's own choice
    cores: int
    device: str  #: "cpu" or "cuda"
    count: int | None = None  #: of pictures; None is all

    def files(self) -> list[str]:
        """Return the pictures; the place in this list is the label."""
        return sorted(str(path) for path in (self.folder / "images").glob("*.jpg"))[: self.count]

    def pictures(self) -> Iterator[Any]:
        """Yield all pictures as (3, side, side), decoded on all cores: for writers that leave that to the user."""
        import multiprocessing

        with multiprocessing.Pool(self.cores) as pool:
            yield from pool.imap(partial(planes, side=self.side), self.files(), chunksize=16)


# Decoders. A path to a PIL image of at least twice the side if it has as much, or to a tensor.


def by_pillow(path: str, _side: int) -> Any:
    """Decode as ImageFolder does."""
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def by_jpeg4py(path: str, _side: int) -> Any:
    """Decode with jpeg4py."""
    import jpeg4py
    from PIL import Image

    return Image.fromarray(jpeg4py.JPEG(path).decode())


def by_simplejpeg(path: str, side: int) -> Any:
    """Decode with simplejpeg, at 1/2 or less where that leaves twice the size."""
    import simplejpeg
    from PIL import Image

    data = Path(path).read_bytes()
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    least = [min(size, 2 * math.ceil(side * size / min(height, width))) for size in (height, width)]
    # a scale between costs pixels and hardly saves time, hence min_factor
    return Image.fromarray(
        simplejpeg.decode_jpeg(data, min_height=least[0], min_width=least[1], min_factor=2)
    )


def by_torchvision(path: str, side: int) -> Any:
    """Decode and resize with torchvision alone, on tensors; return (3, side, side)."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2 import functional

    pixels = functional.resize(
        decode_jpeg(read_file(path), mode=ImageReadMode.RGB), [side], antialias=True
    )
    return functional.center_crop(pixels, [side, side])


def fitted(image: Any, side: int) -> Any:
    """Resize and crop a PIL image with torchvision's arithmetic; return an array of (side, side, 3)."""
    import numpy as np
    from PIL import Image

    image = image.convert("RGB")
    width, height = image.size
    size = (
        (side, int(side * height / width))
        if width <= height
        else (int(side * width / height), side)
    )
    left, top = round((size[0] - side) / 2), round((size[1] - side) / 2)
    image = image.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image.crop((left, top, left + side, top + side)))


def resized(path: str, side: int) -> Any:
    """Return the pixels of a file by Pillow, as (side, side, 3)."""
    return fitted(by_pillow(path, side), side)


def planes(path: str, side: int, decode: Callable[[str, int], Any] = by_pillow) -> Any:
    """Return the pixels of a file as (3, side, side), contiguous."""
    return fitted(decode(path, side), side).transpose(2, 0, 1).copy()


def tensor(path: str, side: int, decode: Callable[[str, int], Any] = by_pillow) -> Any:
    """Return the pixels of a file as a tensor of (3, side, side)."""
    import torch

    return torch.from_numpy(planes(path, side, decode))


# Ways. Each has a function that stores pictures, unless it reads the files, and one that returns its loader.


class Numbered:
    """A map-style data set: what a function makes of each item, and the item's number."""

    def __init__(self, items: Any, load: Callable[[Any], Any]) -> None:
        self.items, self.load = items, load

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return self.load(self.items[number]), number


def data_loader(job: Job, dataset: Any, **options: Any) -> Iterable[Any]:
    """Return torch's DataLoader, whose workers live from epoch to epoch."""
    from torch.utils.data import DataLoader

    return DataLoader(dataset, job.batch, shuffle=True, **workers(job), **options)


def workers(job: Job) -> dict[str, Any]:
    """Return what every kind of DataLoader is told."""
    return {
        "num_workers": job.workers, "persistent_workers": job.workers > 0, "pin_memory": job.device != "cpu",
    }  # fmt: skip


def read_jpegs(load: Callable[[str, int], Any], job: Job) -> Iterable[Any]:
    """Return torch's DataLoader over the files themselves."""
    return data_loader(job, Numbered(job.files(), partial(load, side=job.side)))


def build_memload(job: Job) -> None:
    """Build by a manifest, whose labels are the numbers."""
    import memload

    rows = [f"{Path(path).name},{number}" for number, path in enumerate(job.files())]
    manifest = job.built / "numbers.csv"
    manifest.write_text("\n".join(["path,label", *rows, ""]))
    source = memload.Manifest(manifest, root=job.folder / "images")
    memload.build(source, job.built / "out.bin", size=job.side, progress=False)


def read_memload(feed: str, job: Job) -> Iterable[Any]:
    """Return the Loader; `workers` is its number of threads."""
    import memload

    return memload.Loader(
        job.built / "out.bin",
        job.batch,
        shuffle=True,
        device=job.device,
        feed=feed,
        num_threads=job.workers,
    )


def read_fast_collate(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader with memload's data set and collate function."""
    import memload

    return data_loader(
        job, memload.MemmapDataset(job.built / "out.bin"), collate_fn=memload.fast_collate
    )


def build_numpy(job: Job) -> None:
    """Fill a memory map."""
    import numpy as np

    shape = (len(job.files()), 3, job.side, job.side)
    pixels = np.lib.format.open_memmap(job.built / "images.npy", "w+", np.uint8, shape)
    for number, picture in enumerate(job.pictures()):
        pixels[number] = picture
    pixels.flush()


def read_numpy(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader with its own collate function."""
    import numpy as np
    import torch

    # copy-on-write, as torch wants memory that it may write to
    return data_loader(
        job, Numbered(np.load(job.built / "images.npy", mmap_mode="c"), torch.from_numpy)
    )


def whole(batch: Any) -> Any:
    """Collate what already is a batch."""
    return batch


class Indexed(Numbered):
    """The same, which hands DataLoader a whole batch of the pictures by one index."""

    def __getitems__(self, numbers: list[int]) -> tuple[Any, Any]:
        import torch

        return self.load(self.items[numbers]), torch.tensor(numbers)


def read_indexed(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader, which takes whole batches from the memory map by one index."""
    import numpy as np
    import torch

    pixels = np.asarray(
        np.load(job.built / "images.npy", mmap_mode="c")
    )  # whose parts would be memory maps, slowly
    return data_loader(job, Indexed(pixels, torch.from_numpy), collate_fn=whole)


def build_tensordict(job: Job) -> None:
    """Fill the memory-mapped tensors of tensordict's recipe for ImageNet, 64 at a time."""
    import itertools

    import torch
    from tensordict import MemoryMappedTensor, TensorDict

    count = len(job.files())
    shapes = {
        "image": ((count, 3, job.side, job.side), torch.uint8),
        "label": ((count,), torch.int64),
    }
    empty = {
        name: MemoryMappedTensor.empty(shape, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
    }
    data = TensorDict(empty, batch_size=[count]).memmap(job.built / "data")
    pictures = job.pictures()
    for start in range(0, count, 64):
        images = torch.stack(
            [torch.from_numpy(picture) for picture in itertools.islice(pictures, 64)]
        )
        labels = torch.arange(start, start + len(images))
        data[start : start + len(images)] = TensorDict(
            {"image": images, "label": labels}, batch_size=[len(images)]
        )


def read_tensordict(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader, which takes whole batches from a TensorDict by one index."""
    from tensordict import TensorDict

    return data_loader(job, TensorDict.load_memmap(job.built / "data"), collate_fn=whole)


def build_ffcv(job: Job) -> None:
    """Write raw pixels."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    writer = DatasetWriter(str(job.built / "data.beton"), fields, num_workers=job.cores)
    writer.from_indexed_dataset(
        Numbered(job.files(), partial(resized, side=job.side)), shuffle_indices=False
    )


def read_ffcv(job: Job) -> Iterable[Any]:
    """Return FFCV's Loader with the page cache, as it recommends where the data set fits in memory."""
    import torch
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToDevice, ToTensor, ToTorchImage

    move = [] if job.device == "cpu" else [ToDevice(torch.device(job.device, 0), non_blocking=True)]
    pipelines = {
        "image": [SimpleRGBImageDecoder(), ToTensor(), *move, ToTorchImage()],
        "label": [IntDecoder(), ToTensor(), Squeeze(), *move],
    }
    return Loader(
        str(job.built / "data.beton"), batch_size=job.batch, num_workers=job.workers, order=OrderOption.RANDOM,
        os_cache=True, drop_last=False, pipelines=pipelines,
    )  # fmt: skip


def arrow_rows(files: list[str], side: int) -> Iterator[dict[str, Any]]:
    """Yield what Arrow stores."""
    for path in files:
        yield {
            "image": planes(path, side),
            "label": list(int(Path(path).stem).to_bytes(4, "little")),
        }


def build_datasets(job: Job) -> None:
    """Write Arrow files. The torch format has one dtype for all columns, so labels are stored as bytes."""
    from datasets import Array3D, Dataset, Features, Sequence, Value

    features = Features(
        image=Array3D((3, job.side, job.side), "uint8"), label=Sequence(Value("uint8"), length=4)
    )
    cache, arguments = str(job.built / "cache"), {"files": job.files(), "side": job.side}
    made = Dataset.from_generator(
        arrow_rows, features, cache, gen_kwargs=arguments, num_proc=job.cores
    )
    made.save_to_disk(str(job.built / "arrow"))
    shutil.rmtree(cache)


def read_datasets(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader over the data set in torch's format."""
    import torch
    from datasets import load_from_disk

    return data_loader(
        job, load_from_disk(str(job.built / "arrow")).with_format("torch", dtype=torch.uint8)
    )


def build_streaming(job: Job) -> None:
    """Write MDS shards of arrays, uncompressed."""
    from streaming import MDSWriter

    columns = {"image": f"ndarray:uint8:3,{job.side},{job.side}", "label": "int"}
    with MDSWriter(out=str(job.built / "mds"), columns=columns) as writer:
        for number, picture in enumerate(job.pictures()):
            writer.write({"image": picture, "label": number})


def read_streaming(job: Job) -> Iterable[Any]:
    """Return MosaicML's loader of local shards."""
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(job.built / "mds"), shuffle=True, batch_size=job.batch)
    return StreamingDataLoader(dataset, batch_size=job.batch, **workers(job))


def lit_sample(side: int, item: tuple[int, str]) -> dict[str, Any]:
    """Return what LitData stores."""
    return {"image": tensor(item[1], side), "label": item[0]}


def build_litdata(job: Job) -> None:
    """Write chunks of tensors."""
    from litdata import optimize

    optimize(
        partial(lit_sample, job.side), list(enumerate(job.files())), str(job.built / "lit"), chunk_bytes="64MB",
        num_workers=job.cores, start_method="fork", verbose=False,
    )  # fmt: skip


def read_litdata(job: Job) -> Iterable[Any]:
    """Return LitData's loader of local chunks."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(job.built / "lit"), shuffle=True, drop_last=False)
    return StreamingDataLoader(dataset, batch_size=job.batch, **workers(job))


def build_tars(decoded: bool, job: Job) -> None:
    """Put files or decoded pictures into shards, several for each worker."""
    from webdataset import ShardWriter

    files = job.files()
    samples = (
        (("npy", picture) for picture in job.pictures())
        if decoded
        else (("jpg", read(path)) for path in files)
    )
    with ShardWriter(
        str(job.built / "%05d.tar"), maxcount=math.ceil(len(files) / (4 * job.cores)), verbose=0
    ) as out:
        for number, (name, content) in enumerate(samples):
            out.write({"__key__": f"{number:08d}", "cls": number, name: content})


def read(path: str) -> bytes:
    """Return a file's bytes."""
    return Path(path).read_bytes()


def jpg_or_npy(side: int, sample: dict[str, Any]) -> tuple[Any, int]:
    """Make a tensor of a decoded sample."""
    import torch

    pixels = (
        sample["npy"] if "npy" in sample else fitted(sample["jpg"], side).transpose(2, 0, 1).copy()
    )
    return torch.from_numpy(pixels), sample["cls"]


def read_tars(job: Job) -> Iterable[Any]:
    """Return WebDataset's loader; batches are made in the workers."""
    import webdataset
    from torch.utils.data import default_collate

    tars = sorted(map(str, job.built.glob("*.tar")))
    samples = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(500).decode("pil")
    batches = samples.map(partial(jpg_or_npy, job.side)).batched(
        job.batch, collation_fn=default_collate
    )
    return webdataset.WebLoader(batches, batch_size=None, **workers(job))


def read_dali(job: Job) -> Iterable[Any]:
    """Return DALI's iterator, which decodes on the GPU and leaves batches there."""
    if job.device == "cpu":
        raise RuntimeError("decodes on the GPU: no GPU, or --device cpu")
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    files = job.files()

    @pipeline_def(batch_size=job.batch, num_threads=job.workers, device_id=0)
    def pipeline() -> Any:
        data, label = fn.readers.file(
            files=files, labels=list(range(len(files))), random_shuffle=True, name="reader"
        )
        images = fn.decoders.image(data, device="mixed", output_type=types.RGB)
        images = fn.resize(
            images, resize_shorter=job.side, interp_type=types.INTERP_LINEAR, antialias=True
        )
        return fn.transpose(fn.crop(images, crop=(job.side, job.side)), perm=[2, 0, 1]), label.gpu()

    return DALIGenericIterator(
        [pipeline()], ["image", "label"], reader_name="reader", auto_reset=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A way to store pictures and to read them."""

    package: str
    modules: tuple[str, ...]  #: imported before anything is timed
    read: Callable[[Job], Iterable[Any]]
    build: Callable[[Job], None] | None = None
    built_by: str | None = None  #: another kind, whose files it reads
    decodes: bool = (
        False  #: in training, so that its rate does not depend on the number of pictures
    )


def memload_kind(read: Callable[[Job], Iterable[Any]]) -> Kind:
    """Return a kind that reads what memload has built."""
    return Kind("memload", ("memload",), read, built_by="memload")


def jpegs(load: Callable[[str, int], Any], package: str, *modules: str) -> Kind:
    """Return a kind that decodes in a DataLoader."""
    return Kind(package, modules, partial(read_jpegs, load), decodes=True)


KINDS = {
    "memload": Kind("memload", ("memload",), partial(read_memload, "cpu"), build_memload),
    "dma": memload_kind(partial(read_memload, "dma")),
    "pinned": memload_kind(partial(read_memload, "pinned")),
    "fast_collate": memload_kind(read_fast_collate),
    "ffcv": Kind("ffcv", ("ffcv.loader", "ffcv.writer", "ffcv.transforms"), read_ffcv, build_ffcv),
    "tensordict": Kind("tensordict", ("tensordict",), read_tensordict, build_tensordict),
    "numpy": Kind("numpy", ("numpy",), read_numpy, build_numpy),
    "indexed": Kind("numpy", ("numpy",), read_indexed, built_by="numpy"),
    "datasets": Kind("datasets", ("datasets",), read_datasets, build_datasets),
    "streaming": Kind("mosaicml-streaming", ("streaming",), read_streaming, build_streaming),
    "litdata": Kind("litdata", ("litdata",), read_litdata, build_litdata),
    "tars": Kind("webdataset", ("webdataset",), read_tars, partial(build_tars, True)),
    "tars-jpeg": Kind(
        "webdataset", ("webdataset",), read_tars, partial(build_tars, False), decodes=True
    ),
    "dali": Kind("nvidia-dali-cuda130", ("nvidia.dali.plugin.pytorch",), read_dali, decodes=True),
    "torchvision": jpegs(
        by_torchvision, "torchvision", "torchvision.io", "torchvision.transforms.v2"
    ),
    "simplejpeg": jpegs(partial(tensor, decode=by_simplejpeg), "simplejpeg", "simplejpeg"),
    "jpeg4py": jpegs(partial(tensor, decode=by_jpeg4py), "jpeg4py", "jpeg4py"),
    "pillow": jpegs(tensor, "pillow", "PIL.Image"),
}


def ways(most: int, device: str) -> list[tuple[str, str, int]]:
    """Return name in the table, kind, and workers or threads, `most` or fewer. The first is memload's best."""
    cpu = [("memload, Loader", "memload", "thread", (most, 1))]
    gpu = [
        ("memload, Loader, dma", "dma", "thread", (1,)),
        ("memload, Loader, pinned", "pinned", "thread", (most,)),
    ]
    table = [
        *(cpu if device == "cpu" else gpu),
        ("memload, DataLoader + fast_collate", "fast_collate", "worker", (0,)),
        ("FFCV, raw", "ffcv", "worker", (most, 1)),
        ("tensordict, memory-mapped", "tensordict", "worker", (most, 0)),
        ("NumPy memmap, a batch by one index", "indexed", "worker", (most, 0)),
        ("NumPy memmap, default collate", "numpy", "worker", (most, 0)),
        ("Hugging Face datasets, torch format", "datasets", "worker", (most, 0)),
        ("MosaicML streaming, arrays", "streaming", "worker", (most, 0)),
        ("LitData, tensors", "litdata", "worker", (most, 0)),
        ("WebDataset, arrays", "tars", "worker", (most,)),
        ("WebDataset, JPEG", "tars-jpeg", "worker", (most,)),
        ("DALI, JPEG", "dali", "thread", (most,)),
        ("JPEG, DataLoader, torchvision.io", "torchvision", "worker", (most,)),
        ("JPEG, DataLoader, simplejpeg", "simplejpeg", "worker", (most,)),
        ("JPEG, DataLoader, jpeg4py", "jpeg4py", "worker", (most,)),
        ("JPEG, DataLoader, Pillow", "pillow", "worker", (most,)),
    ]
    return [
        (f"{title}, {count} {unit}{'s' * (count != 1)}", kind, count)
        for title, kind, unit, counts in table
        for count in dict.fromkeys(counts)
    ]
