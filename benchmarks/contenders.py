"""The ways that `compare.py` sets beside each other: how each stores pictures and reads them.

Each has what its own documentation recommends for speed. A contender is a function that stores
pictures, unless it reads the JPEGs, and one that returns batches ``(images, labels)``. All but those
that decode in training store what `pictures.planes` returns; a label is the number of a picture.
"""

import itertools
import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import Numbered, planes, resized, to_planes
from PIL import Image
from torch.utils.data import DataLoader, default_collate

SIDE = 224
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Job:
    """What to store or to read, and how."""

    images: Path  #: a folder of JPEGs
    built: Path  #: what the contender stores
    batch: int
    workers: int  #: processes or threads, the contender's own choice
    device: str  #: "cpu" or "cuda"
    count: int  #: of pictures

    @property
    def files(self) -> list[str]:
        """The pictures; the place in this list is the label."""
        return sorted(map(str, self.images.glob("*.jpg")))[: self.count]

    def pictures(self) -> Iterator[np.ndarray]:
        """Yield all pictures, decoded on all cores, for writers that leave that to the user."""
        with multiprocessing.Pool(CORES) as pool:
            yield from pool.imap(stored_pixels, self.files, chunksize=16)

    def loader_options(self) -> dict[str, Any]:
        """Return what every kind of DataLoader is given."""
        return {
            "batch_size": self.batch,
            "num_workers": self.workers,
            "persistent_workers": self.workers > 0,
            "pin_memory": self.device != "cpu",
        }

    def data_loader(self, dataset: Any, **options: Any) -> Iterable[Any]:
        """Return torch's DataLoader in random order."""
        return DataLoader(dataset, shuffle=True, **self.loader_options(), **options)


class Converted:
    """The batches of a loader, made ``(images, labels)``."""

    def __init__(self, loader: Iterable[Any], convert: Callable[[Any], tuple[Any, Any]]) -> None:
        self.loader, self.convert = loader, convert

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.convert, self.loader)


def stored_pixels(path: str) -> np.ndarray:
    """Return what is stored of a file, (3, side, side)."""
    return planes(path, SIDE).numpy()


def image_and_label(batch: Any) -> tuple[Any, Any]:
    """Return the members of a dictionary."""
    return batch["image"], batch["label"]


def unchanged(batch: Any) -> Any:
    """Collate what already is a batch."""
    return batch


# Ways that store decoded pictures


def build_memload(job: Job) -> None:
    """Build by a manifest, whose labels are the numbers."""
    import memload

    rows = [f"{Path(path).name},{number}" for number, path in enumerate(job.files)]
    manifest = job.built / "numbers.csv"
    manifest.write_text("\n".join(["path,label", *rows, ""]))
    source = memload.open_source(manifest, root=job.images)
    memload.build(source, job.built / "out.bin", size=SIDE, progress=False)


def read_memload(feed: str, job: Job) -> Iterable[Any]:
    """Return the Loader."""
    import memload

    options: dict[str, Any] = {"device": job.device, "feed": feed, "num_threads": job.workers}
    return memload.Loader(job.built / "out.bin", job.batch, shuffle=True, **options)


def read_fast_collate(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader with memload's data set and collate function."""
    import memload

    dataset = memload.MemmapDataset(job.built / "out.bin")
    return job.data_loader(dataset, collate_fn=memload.fast_collate)


def build_numpy(job: Job) -> None:
    """Fill a memory map."""
    shape = (job.count, 3, SIDE, SIDE)
    pixels = np.lib.format.open_memmap(job.built / "images.npy", "w+", np.uint8, shape)
    for number, picture in enumerate(job.pictures()):
        pixels[number] = picture
    pixels.flush()


def read_numpy(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader with its own collate function."""
    # copy-on-write, as torch wants memory that it may write to
    pixels = np.load(job.built / "images.npy", mmap_mode="c")
    return job.data_loader(Numbered(pixels, torch.from_numpy))


class Indexed(Numbered):
    """Pictures of which DataLoader takes a whole batch by one index."""

    def __getitems__(self, numbers: list[int]) -> tuple[Any, Any]:
        return self.load(self.items[numbers]), torch.tensor(numbers)


def read_indexed(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader, which takes whole batches from the memory map by one index."""
    # an ordinary array, as parts of a memory map would be memory maps, slowly
    pixels = np.asarray(np.load(job.built / "images.npy", mmap_mode="c"))
    return job.data_loader(Indexed(pixels, torch.from_numpy), collate_fn=unchanged)


def build_tensordict(job: Job) -> None:
    """Fill the memory-mapped tensors of tensordict's recipe for ImageNet, 64 at a time."""
    from tensordict import MemoryMappedTensor, TensorDict

    image = MemoryMappedTensor.empty((job.count, 3, SIDE, SIDE), dtype=torch.uint8)
    label = MemoryMappedTensor.empty((job.count,), dtype=torch.int64)
    data = TensorDict({"image": image, "label": label}, batch_size=[job.count])
    data = data.memmap(job.built / "data")
    pictures = job.pictures()
    for start in range(0, job.count, 64):
        images = torch.from_numpy(np.stack(list(itertools.islice(pictures, 64))))
        labels = torch.arange(start, start + len(images))
        part = TensorDict({"image": images, "label": labels}, batch_size=[len(images)])
        data[start : start + len(images)] = part


def read_tensordict(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader, which takes whole batches from a TensorDict by one index."""
    from tensordict import TensorDict

    data = TensorDict.load_memmap(job.built / "data")
    return Converted(job.data_loader(data, collate_fn=unchanged), image_and_label)


def write_ffcv(job: Job, samples: Any) -> None:
    """Write raw pixels of samples, (side, side, 3) and a label."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    writer = DatasetWriter(str(job.built / "data.beton"), fields, num_workers=CORES)
    writer.from_indexed_dataset(samples, shuffle_indices=False)


def build_ffcv(job: Job) -> None:
    """Write raw pixels of the pictures."""
    write_ffcv(job, Numbered(job.files, lambda path: resized(Image.open(path), SIDE)))


def read_ffcv(job: Job, *, fits_in_memory: bool = True) -> Iterable[Any]:
    """Return FFCV's Loader, as it recommends for data that fits in memory, or that does not."""
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToDevice, ToTensor, ToTorchImage

    device = torch.device(job.device, None if job.device == "cpu" else 0)
    move = [] if job.device == "cpu" else [ToDevice(device, non_blocking=True)]
    return Loader(
        str(job.built / "data.beton"),
        batch_size=job.batch,
        num_workers=job.workers,
        order=OrderOption.RANDOM if fits_in_memory else OrderOption.QUASI_RANDOM,
        os_cache=fits_in_memory,
        drop_last=False,
        pipelines={
            "image": [SimpleRGBImageDecoder(), ToTensor(), *move, ToTorchImage()],
            "label": [IntDecoder(), ToTensor(), Squeeze(), *move],
        },
    )


def arrow_rows(files: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what Arrow stores. All columns have one dtype, so labels are stored as bytes."""
    for path in files:
        label = int(Path(path).stem).to_bytes(4, "little")
        yield {"image": stored_pixels(path), "label": list(label)}


def build_datasets(job: Job) -> None:
    """Write Arrow files."""
    from datasets import Array3D, Dataset, Features, Sequence, Value

    label = Sequence(Value("uint8"), length=4)
    features = Features(image=Array3D((3, SIDE, SIDE), "uint8"), label=label)
    cache, arguments = str(job.built / "cache"), {"files": job.files}
    made = Dataset.from_generator(arrow_rows, features, cache, gen_kwargs=arguments, num_proc=CORES)
    made.save_to_disk(str(job.built / "arrow"))
    shutil.rmtree(cache)


def read_datasets(job: Job) -> Iterable[Any]:
    """Return torch's DataLoader over the data set in torch's format."""
    from datasets import load_from_disk

    def convert(batch: Any) -> tuple[Any, Any]:
        return batch["image"], batch["label"].contiguous().view(torch.int32).flatten()

    dataset = load_from_disk(str(job.built / "arrow")).with_format("torch", dtype=torch.uint8)
    return Converted(job.data_loader(dataset), convert)


def build_streaming(job: Job) -> None:
    """Write MDS shards of arrays, uncompressed."""
    from streaming import MDSWriter

    columns = {"image": f"ndarray:uint8:3,{SIDE},{SIDE}", "label": "int"}
    with MDSWriter(out=str(job.built / "mds"), columns=columns) as writer:
        for number, picture in enumerate(job.pictures()):
            writer.write({"image": picture, "label": number})


def read_streaming(job: Job) -> Iterable[Any]:
    """Return MosaicML's loader of local shards."""
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=str(job.built / "mds"), shuffle=True, batch_size=job.batch)
    return Converted(StreamingDataLoader(dataset, **job.loader_options()), image_and_label)


def lit_sample(item: tuple[int, str]) -> dict[str, Any]:
    """Return what LitData stores."""
    return {"image": planes(item[1], SIDE), "label": item[0]}


def build_litdata(job: Job) -> None:
    """Write chunks of tensors."""
    from litdata import optimize

    options = {"chunk_bytes": "64MB", "num_workers": CORES, "start_method": "fork"}
    items, folder = list(enumerate(job.files)), str(job.built / "lit")
    optimize(lit_sample, items, folder, verbose=False, **options)


def read_litdata(job: Job) -> Iterable[Any]:
    """Return LitData's loader of local chunks."""
    from litdata import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(str(job.built / "lit"), shuffle=True, drop_last=False)
    return Converted(StreamingDataLoader(dataset, **job.loader_options()), image_and_label)


def write_tars(job: Job, kind: str, contents: Iterable[Any]) -> None:
    """Put samples into tar files, several for each worker."""
    from webdataset import ShardWriter

    pattern, most = str(job.built / "%05d.tar"), math.ceil(job.count / (4 * CORES))
    with ShardWriter(pattern, maxcount=most, verbose=0) as out:
        for number, content in enumerate(contents):
            out.write({"__key__": f"{number:08d}", "cls": number, kind: content})


def build_array_tars(job: Job) -> None:
    """Put decoded pictures into tar files."""
    write_tars(job, "npy", job.pictures())


def build_jpeg_tars(job: Job) -> None:
    """Put the JPEGs into tar files."""
    write_tars(job, "jpg", (Path(path).read_bytes() for path in job.files))


def tar_sample(sample: dict[str, Any]) -> tuple[Any, int]:
    """Return the pixels and the label of a decoded sample."""
    if "npy" in sample:
        return torch.from_numpy(sample["npy"]), sample["cls"]
    return to_planes(resized(sample["jpg"], SIDE)), sample["cls"]


def read_tars(job: Job) -> Iterable[Any]:
    """Return WebDataset's loader; batches are made in the workers."""
    import webdataset

    tars = sorted(map(str, job.built.glob("*.tar")))
    samples = webdataset.WebDataset(tars, shardshuffle=len(tars)).shuffle(500).decode("pil")
    batches = samples.map(tar_sample).batched(job.batch, collation_fn=default_collate)
    return webdataset.WebLoader(batches, **job.loader_options() | {"batch_size": None})


# Ways that decode in training


def read_dali(job: Job) -> Iterable[Any]:
    """Return DALI's iterator, which decodes on the GPU and leaves batches there."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

    @pipeline_def(batch_size=job.batch, num_threads=job.workers, device_id=0)
    def pipeline() -> Any:
        labels = list(range(job.count))
        data, label = fn.readers.file(
            files=job.files, labels=labels, random_shuffle=True, name="reader"
        )
        images = fn.decoders.image(data, device="mixed", output_type=types.RGB)
        bilinear = {"interp_type": types.INTERP_LINEAR, "antialias": True}
        images = fn.crop(fn.resize(images, resize_shorter=SIDE, **bilinear), crop=(SIDE, SIDE))
        return fn.transpose(images, perm=[2, 0, 1]), label.gpu()

    options = {"auto_reset": True, "last_batch_policy": LastBatchPolicy.PARTIAL}
    names = ["image", "label"]
    batches = DALIGenericIterator([pipeline()], names, reader_name="reader", **options)
    return Converted(batches, lambda pipelines: image_and_label(pipelines[0]))


def by_jpeg4py(path: str) -> torch.Tensor:
    """Decode with jpeg4py."""
    import jpeg4py

    return to_planes(resized(Image.fromarray(jpeg4py.JPEG(path).decode()), SIDE))


def by_simplejpeg(path: str) -> torch.Tensor:
    """Decode with simplejpeg, at 1/2 or less where that leaves twice the size."""
    import simplejpeg

    data = Path(path).read_bytes()
    size = simplejpeg.decode_jpeg_header(data)[:2]
    height, width = (min(length, 2 * math.ceil(SIDE * length / min(size))) for length in size)
    # a scale between costs pixels and hardly saves time, hence min_factor
    pixels = simplejpeg.decode_jpeg(data, min_height=height, min_width=width, min_factor=2)
    return to_planes(resized(Image.fromarray(pixels), SIDE))


def by_torchvision(path: str) -> torch.Tensor:
    """Decode and resize with torchvision alone, on tensors."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2 import functional

    pixels = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    return functional.center_crop(functional.resize(pixels, [SIDE], antialias=True), [SIDE, SIDE])


def read_jpegs(load: Callable[[str], torch.Tensor], job: Job) -> Iterable[Any]:
    """Return torch's DataLoader over the files themselves."""
    return job.data_loader(Numbered(job.files, load))


@dataclass(frozen=True)
class Contender:
    """A way to store pictures and to read them. Those with the same ``build`` share its files."""

    read: Callable[[Job], Iterable[Any]]
    build: Callable[[Job], None] | None
    modules: str  #: imported before anything is timed
    counts: tuple[int | None, ...] = (None,)  #: of workers; None is as many as there are cores
    unit: str = "worker"
    device: str | None = None  #: the only one
    decodes: bool = False  #: in training, so that its rate does not depend on how many there are


def reading_memload(feed: str, device: str, *counts: int | None) -> Contender:
    """Return memload's Loader with a feed."""
    read = partial(read_memload, feed)
    return Contender(read, build_memload, "memload", counts, "thread", device)


def jpegs(load: Callable[[str], torch.Tensor], modules: str) -> Contender:
    """Return torch's DataLoader over the JPEGs themselves."""
    return Contender(partial(read_jpegs, load), None, modules, decodes=True)


BOTH = (None, 0)
#: What is compared, by its name in the table. The first that is measured is memload's best.
CONTENDERS = {
    "memload, Loader": reading_memload("cpu", "cpu", None, 1),
    "memload, Loader, dma": reading_memload("dma", "cuda", 1),
    "memload, Loader, pinned": reading_memload("pinned", "cuda", None),
    "memload, DataLoader + fast_collate": Contender(
        read_fast_collate, build_memload, "memload", (0,)
    ),
    "FFCV, raw": Contender(
        read_ffcv, build_ffcv, "ffcv.loader ffcv.writer ffcv.transforms", (None, 1)
    ),
    "tensordict, memory-mapped": Contender(read_tensordict, build_tensordict, "tensordict", BOTH),
    "NumPy memmap, a batch by one index": Contender(read_indexed, build_numpy, "numpy", BOTH),
    "NumPy memmap, default collate": Contender(read_numpy, build_numpy, "numpy", BOTH),
    "Hugging Face datasets, torch format": Contender(
        read_datasets, build_datasets, "datasets", BOTH
    ),
    "MosaicML streaming, arrays": Contender(read_streaming, build_streaming, "streaming", BOTH),
    "LitData, tensors": Contender(read_litdata, build_litdata, "litdata", BOTH),
    "WebDataset, arrays": Contender(read_tars, build_array_tars, "webdataset"),
    "WebDataset, JPEG": Contender(read_tars, build_jpeg_tars, "webdataset", decodes=True),
    "DALI, JPEG": Contender(
        read_dali, None, "nvidia.dali.plugin.pytorch", unit="thread", device="cuda", decodes=True
    ),
    "JPEG, DataLoader, torchvision.io": jpegs(
        by_torchvision, "torchvision.io torchvision.transforms.v2"
    ),
    "JPEG, DataLoader, simplejpeg": jpegs(by_simplejpeg, "simplejpeg"),
    "JPEG, DataLoader, jpeg4py": jpegs(by_jpeg4py, "jpeg4py"),
    "JPEG, DataLoader, Pillow": jpegs(partial(planes, side=SIDE), "PIL.Image"),
}
