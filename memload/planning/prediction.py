"""From the arguments of a build to what it will take and give."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from memload import wording
from memload.building.checks import check_arguments
from memload.building.conversion import AnySettings
from memload.building.destination import check_output
from memload.building.file_systems import check_file_system
from memload.building.preparation import Preparation
from memload.building.rejects import RejectLimit, sufficient_limit
from memload.building.sources.opening import FilesToOpen
from memload.building.sources.record import Source
from memload.building.status import build_status
from memload.building.workspace import arrays_of
from memload.building.writer import parse_shard_size, rows_per_shard, with_shards
from memload.errors import BuildError, MemloadError
from memload.machine import available_cores, available_memory
from memload.planning.disk import DiskRates, measure_disk
from memload.planning.duration import Workers, duration
from memload.planning.measuring import Conversion, convert_sample
from memload.planning.report import Plan, Serving
from memload.planning.sampling import SEED, Sample
from memload.storage.index import Array

#: The arguments of `memload.build` that say how images are stored and decoded.
_IMAGE_OPTIONS: Final = (
    *("fit", "interpolation", "decoder", "fast", "strict", "exif", "background", "fill"),
    "max_pixels",
)
#: The share of the available RAM in which Linux keeps what is written before it is on the disk: its
#: default of vm.dirty_background_ratio.
_UNWRITTEN_SHARE: Final = 0.1


class Machine(NamedTuple):
    """The machine that will build and train. None: as this one. A GPU with 0 bytes is none."""

    cores: int | None = None
    ram: int | None = None  #: available bytes
    gpu_memory: int | None = None  #: free bytes


def predict(source: Any, output: str, *, is_named: bool, machine: Machine, **options: Any) -> Plan:
    """Predict what `memload.build` will take and give, on this machine or on ``machine``.

    ``options`` are those of `memload.build`, as its command has them. The source is listed, and a
    sample of its records is converted into a folder beside ``output``, which is removed again.
    ``is_named`` says whether the user has named ``output``, so that it must not exist.

    Raises as `memload.build` does, before it converts anything.
    """
    start_seconds = _seconds_of_imports()
    given_workers = options["num_workers"]
    num_workers = available_cores() if given_workers is None else given_workers
    name, path = _checked(source, output, num_workers, options)
    if is_named:
        _check_not_begun(path)
    listed = _listed(source, path, num_workers, options)
    if is_named:
        check_output(path, listed.arrays, options["overwrite"])
    sample, records = Sample(listed.source, num_workers), len(listed.source)
    timeout = options["timeout"]
    conversion, disk = _measured(sample, listed.settings, path, name, num_workers, timeout)
    cores = available_cores()
    workers = Workers.of(given_workers, machine.cores or cores, records)
    needed = duration(
        conversion,
        disk,
        records=records,
        data_bytes=listed.data_bytes,
        unwritten_bytes=_UNWRITTEN_SHARE * (machine.ram or available_memory() or 0),
        begin_seconds=start_seconds + listed.seconds,
        scale=Workers.of(given_workers, cores, records).at_once / workers.at_once,
    )
    rejected = round(records * conversion.rejected / len(sample))
    image, *others = listed.arrays
    height, width, channels = image.shape
    return Plan(
        source=_name_of(source),
        records=records,
        samples=records - rejected,
        shape=(height, width, channels),
        dtype=np.dtype(image.descr).name,
        arrays=[array.name for array in others],
        bytes=listed.data_bytes,
        free_bytes=shutil.disk_usage(path.parent).free,
        seconds=needed.seconds,
        seconds_range=(needed.low, needed.high),
        num_workers=workers.number,
        scaled_from_cores=None if machine.cores is None else cores,
        serving=_serving(listed.data_bytes, image.row_bytes, machine, disk),
        sampled=len(sample),
        seed=SEED,
        rejected=conversion.rejected,
        warnings=list(_warnings(conversion, records, rejected, options)),
        notes=list(listed.source.notes),
    )


class _Listed(NamedTuple):
    """A source, and how it will be built."""

    source: Source
    settings: AnySettings
    arrays: list[Array]  #: with their files, the images first
    seconds: float  #: that finding this out took

    @property
    def data_bytes(self) -> int:
        """The size of all files."""
        return sum(shard.bytes for array in self.arrays for shard in array.shards)


def _seconds_of_imports() -> float:
    """Return the CPU time of a process that has only begun to plan. A build needs it, too."""
    return time.process_time()


def _listed(source: Any, path: Path, num_workers: int, options: Mapping[str, Any]) -> _Listed:
    """List a source, and look at its first records. Raises as `memload.build` does."""
    started = time.perf_counter()
    preparation = _preparation(source, num_workers, options)
    preparation.check()
    opened = preparation.open()
    settings = preparation.settings(opened)
    arrays = arrays_of(settings)
    limit = rows_per_shard(arrays, parse_shard_size(options["shard_size"]))
    arrays = [with_shards(array, path, len(opened), limit) for array in arrays]
    return _Listed(opened, settings, arrays, time.perf_counter() - started)


def _check_not_begun(path: Path) -> None:
    """Raise BuildError if the output is being built, or if its build was interrupted."""
    status = build_status(path)
    if status is not None:
        advice = "For a plan, name another OUT.BIN, or none."
        raise BuildError(f"{str(status).removesuffix('.')}. {advice}", path=path)


def _checked(
    source: Any, output: str, num_workers: int, options: Mapping[str, Any]
) -> tuple[Path, Path]:
    """Return the output as it was given, and from the root. Raises as `memload.build` does."""
    RejectLimit(options["max_rejects"])
    parse_shard_size(options["shard_size"])
    checked = ("mode", "max_pixels", "on_error", "timeout", "missing_masks", "mask_fill", "new_to")
    name, path = check_arguments(
        source,
        output,
        num_workers=num_workers,
        lock_timeout=0,
        **{name: options[name] for name in checked},
    )
    check_file_system(path.parent, in_parts=False)
    return name, path


def _preparation(source: Any, num_workers: int, options: Mapping[str, Any]) -> Preparation:
    given = ("classes", "size", "mode", "missing_masks", "mask_fill", "timeout")
    return Preparation(
        source=source,
        source_options={"new_to": options["new_to"]},
        image_options={name: options[name] for name in _IMAGE_OPTIONS},
        num_workers=num_workers,
        **{name: options[name] for name in given},
    )


def _measured(
    sample: Sample,
    settings: AnySettings,
    path: Path,
    name: Path,
    num_workers: int,
    timeout: float,
) -> tuple[Conversion, DiskRates]:
    """Convert the sample, and measure the disk, in a new folder beside the output ``path``.

    It is removed again. Raises BuildError if nothing can be written there.
    """
    parent = path.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".memload-plan-", dir=parent) as folder:
            conversion = convert_sample(
                sample,
                settings,
                Path(folder),
                name=name,
                num_workers=min(num_workers, len(sample)),
                timeout=timeout,
            )
            return conversion, measure_disk(Path(folder))
    except MemloadError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise BuildError(
            f"{parent}: a sample cannot be written there: {error.strerror or error}. Make room, or "
            "name OUT.BIN in a folder in which you may write.",
            path=parent,
        ) from error


def _name_of(source: Any) -> str:
    files = FilesToOpen.of(source)
    return type(source).__name__ if files is None else wording.listed(files.names, 2)


def _serving(data_bytes: int, row_bytes: int, machine: Machine, disk: DiskRates) -> Serving:
    """Return how the data set will be served."""
    # Not before the sample is converted: it imports torch, and workers would be forked from that.
    from memload.planning.serving import Memory, free_gpu_memory, serve

    gpu = free_gpu_memory() if machine.gpu_memory is None else machine.gpu_memory or None
    ram = available_memory() if machine.ram is None else machine.ram
    return serve(data_bytes, row_bytes, Memory(ram, gpu), disk)


def _warnings(
    conversion: Conversion, records: int, rejected: int, options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield why the build would publish nothing. So many of the records cannot be used."""
    if not conversion.rejected:
        return
    limit = RejectLimit(options["max_rejects"])
    if options["on_error"] == "raise":
        yield f"the build will stop at a record that cannot be used: {conversion.reasons}"
    elif not limit.allows(rejected, records):
        share = sufficient_limit(rejected, records)
        yield (
            f"the build will publish nothing, since about {share} cannot be used, and at most "
            f"{limit} may be: {conversion.reasons}. Mend them, or allow for more with --max-rejects"
        )
