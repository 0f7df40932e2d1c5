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
    from memload.builder import BuildReport, build
    from memload.collate import fast_collate
    from memload.dataset import MemmapDataset
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
    from memload.index import Index
    from memload.inspection import info, preview, verify
    from memload.loader import Loader
    from memload.manifest import Manifest
    from memload.prefetch import CudaPrefetcher, ThreadPrefetcher, background
    from memload.samplers import (
        BlockShuffledSampler,
        ClassBalancedSampler,
        SequentialSampler,
        ShuffledSampler,
        WeightedSampler,
    )
    from memload.sources import ImageFolder, Record, Source

_HOME = {
    "BlockShuffledSampler": "samplers",
    "BuildError": "errors",
    "BuildReport": "builder",
    "ChecksumError": "errors",
    "ClassBalancedSampler": "samplers",
    "CudaPrefetcher": "prefetch",
    "DecodeError": "errors",
    "DependencyError": "errors",
    "FeedError": "errors",
    "FormatError": "errors",
    "ImageFolder": "sources",
    "Index": "index",
    "Loader": "loader",
    "Manifest": "manifest",
    "MemloadError": "errors",
    "MemmapDataset": "dataset",
    "MissingError": "errors",
    "Record": "sources",
    "SequentialSampler": "samplers",
    "ShuffledSampler": "samplers",
    "Source": "sources",
    "SourceError": "errors",
    "ThreadPrefetcher": "prefetch",
    "WeightedSampler": "samplers",
    "background": "prefetch",
    "build": "builder",
    "fast_collate": "collate",
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
    if name == "transforms":  # a module, for its names to be used as ``memload.transforms.Normalize``
        return import_module("memload.transforms")
    if name not in _HOME:
        raise AttributeError(f"module 'memload' has no attribute {name!r}")
    value = getattr(import_module(f"memload.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
