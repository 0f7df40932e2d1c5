"""memload: decode every image once, then feed the model at the speed of the bus.

>>> memload.build("images/", "out.bin", size=256)  # or: memload build images/ out.bin --size 256
>>> dataset = memload.MemmapDataset("out.bin")

Names are imported on first use, so ``import memload`` loads neither NumPy nor torch.

Each folder and module imports only those below it. Down to ``storage`` all but ``measure``,
``reading``, ``feeds`` and ``transforms`` do without torch.

    cli, commands/              the command line
    measure/                    what bounds a training: ``memload doctor``
    inspection, contact_sheet   info and verify; preview
    reading/                    data sets, orders of samples, batches, the Loader
    feeds/                      rows to the device: dma, pinned, resident, cpu
    transforms/                 augmentations of whole batches, on their device
    editing/                    data sets made of others; export and copy
    building/                   images to rows, in processes that may be killed
    sources/                    what is built from: folders, tables, archives, data sets
    storage/                    the file format: index, shards, rows
    launch, upload              Triton kernels, and small arrays to a device
    machine, ranks, profiling   cores and memory; processes of a training; names in timelines
    errors, wording             exceptions; numbers and lists in messages
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

#: The modules of the package that have public names, each with these names.
_PUBLIC = {
    "building.build": "build",
    "building.dry_run": "DryRun dry_run",
    "building.report": "BuildReport",
    "building.status": "BuildStatus build_status",
    "contact_sheet": "preview",
    "editing.columns": "where with_columns",
    "editing.concat": "concat",
    "editing.copy": "copy",
    "editing.export": "export",
    "editing.join": "join",
    "editing.relabel": "relabel",
    "errors": "BuildError ChecksumError DecodeError DependencyError FeedError FormatError "
    "MemloadError MissingError NothingNewError SourceError",
    "inspection": "info verify",
    "measure.diagnosis": "Diagnosis diagnose",
    "reading.background": "ThreadPrefetcher background",
    "reading.collate": "fast_collate",
    "reading.dataset": "MemmapDataset",
    "reading.loader": "Loader",
    "reading.prefetch": "CudaPrefetcher",
    "reading.samplers": "MixtureSampler RepeatedSampler SequentialSampler ShuffledSampler "
    "WeightedSampler",
    "sources.mapped": "DatasetSource",
    "sources.opening": "open_source",
    "storage.index": "Index",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted([*_MODULE_OF, "__version__"])  # noqa: PLE0605  # derived from the table above

if TYPE_CHECKING:  # the same names, for type checkers and editors
    from memload import transforms as transforms
    from memload.building.build import build as build
    from memload.building.dry_run import DryRun as DryRun, dry_run as dry_run
    from memload.building.report import BuildReport as BuildReport
    from memload.building.status import BuildStatus as BuildStatus, build_status as build_status
    from memload.contact_sheet import preview as preview
    from memload.editing.columns import where as where, with_columns as with_columns
    from memload.editing.concat import concat as concat
    from memload.editing.copy import copy as copy
    from memload.editing.export import export as export
    from memload.editing.join import join as join
    from memload.editing.relabel import relabel as relabel
    from memload.errors import (
        BuildError as BuildError,
        ChecksumError as ChecksumError,
        DecodeError as DecodeError,
        DependencyError as DependencyError,
        FeedError as FeedError,
        FormatError as FormatError,
        MemloadError as MemloadError,
        MissingError as MissingError,
        NothingNewError as NothingNewError,
        SourceError as SourceError,
    )
    from memload.inspection import info as info, verify as verify
    from memload.measure.diagnosis import Diagnosis as Diagnosis, diagnose as diagnose
    from memload.reading.background import (
        ThreadPrefetcher as ThreadPrefetcher,
        background as background,
    )
    from memload.reading.collate import fast_collate as fast_collate
    from memload.reading.dataset import MemmapDataset as MemmapDataset
    from memload.reading.loader import Loader as Loader
    from memload.reading.prefetch import CudaPrefetcher as CudaPrefetcher
    from memload.reading.samplers import (
        MixtureSampler as MixtureSampler,
        RepeatedSampler as RepeatedSampler,
        SequentialSampler as SequentialSampler,
        ShuffledSampler as ShuffledSampler,
        WeightedSampler as WeightedSampler,
    )
    from memload.sources.mapped import DatasetSource as DatasetSource
    from memload.sources.opening import open_source as open_source
    from memload.storage.index import Index as Index


def __getattr__(name: str) -> object:
    if name == "transforms":  # a module: memload.transforms.Normalize works without another import
        return import_module("memload.transforms")
    if name == "Manifest":  # what was one before
        name = "open_source"
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'memload' has no attribute {name!r}")
    value = getattr(import_module(f"memload.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
