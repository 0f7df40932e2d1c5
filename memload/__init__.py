"""memload: decode every image once, then feed the model at the speed of the bus.

>>> memload.build("images/", "out.bin", size=256)  # or: memload build images/ out.bin --size 256
>>> dataset = memload.MemmapDataset("out.bin")

Names are looked up on first use, so that ``import memload`` loads neither NumPy nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    import memload.transforms as transforms  # noqa: F401  # a module: no name of __all__
    from memload.building.builder import BuildReport, build
    from memload.building.manifest import Manifest
    from memload.building.sources import ImageFolder, Record, Source
    from memload.errors import (
        BuildError,
        ChecksumError,
        DecodeError,
        DependencyError,
        FeedError,
        FormatError,
        MemloadError,
        MissingError,
        SourceError,
    )
    from memload.inspection import info, preview, verify
    from memload.reading.collate import fast_collate
    from memload.reading.dataset import MemmapDataset
    from memload.reading.loader import Loader
    from memload.reading.prefetch import CudaPrefetcher, ThreadPrefetcher, background
    from memload.reading.samplers import (
        BlockShuffledSampler,
        ClassBalancedSampler,
        SequentialSampler,
        ShuffledSampler,
        WeightedSampler,
    )
    from memload.storage.index import Index

_HOME = {
    "BlockShuffledSampler": "reading.samplers",
    "BuildError": "errors",
    "BuildReport": "building.builder",
    "ChecksumError": "errors",
    "ClassBalancedSampler": "reading.samplers",
    "CudaPrefetcher": "reading.prefetch",
    "DecodeError": "errors",
    "DependencyError": "errors",
    "FeedError": "errors",
    "FormatError": "errors",
    "ImageFolder": "building.sources",
    "Index": "storage.index",
    "Loader": "reading.loader",
    "Manifest": "building.manifest",
    "MemloadError": "errors",
    "MemmapDataset": "reading.dataset",
    "MissingError": "errors",
    "Record": "building.sources",
    "SequentialSampler": "reading.samplers",
    "ShuffledSampler": "reading.samplers",
    "Source": "building.sources",
    "SourceError": "errors",
    "ThreadPrefetcher": "reading.prefetch",
    "WeightedSampler": "reading.samplers",
    "background": "reading.prefetch",
    "build": "building.builder",
    "fast_collate": "reading.collate",
    "info": "inspection",
    "preview": "inspection",
    "verify": "inspection",
}

__all__ = [
    "BlockShuffledSampler",
    "BuildError",
    "BuildReport",
    "ChecksumError",
    "ClassBalancedSampler",
    "CudaPrefetcher",
    "DecodeError",
    "DependencyError",
    "FeedError",
    "FormatError",
    "ImageFolder",
    "Index",
    "Loader",
    "Manifest",
    "MemloadError",
    "MemmapDataset",
    "MissingError",
    "Record",
    "SequentialSampler",
    "ShuffledSampler",
    "Source",
    "SourceError",
    "ThreadPrefetcher",
    "WeightedSampler",
    "__version__",
    "background",
    "build",
    "fast_collate",
    "info",
    "preview",
    "verify",
]


def __getattr__(name: str) -> object:
    if (
        name == "transforms"
    ):  # a module, for its names to be used as ``memload.transforms.Normalize``
        return import_module("memload.transforms")
    if name not in _HOME:
        raise AttributeError(f"module 'memload' has no attribute {name!r}")
    value = getattr(import_module(f"memload.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
