"""From the arguments of a build to what it will take and give."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from memload import wording
from memload.building.conversion import AnySettings
from memload.building.destination import check_not_read, check_output, existing_files
from memload.building.file_systems import check_file_system
from memload.building.rejects import sufficient_limit
from memload.building.request import Request, request_of
from memload.building.sources.opening import FilesToOpen
from memload.building.sources.record import Source
from memload.building.status import build_status
from memload.building.workspace import arrays_of
from memload.building.writer import rows_per_shard, with_shards
from memload.errors import BuildError, MemloadError
from memload.machine import available_cores, available_memory, usable_cores
from memload.planning.disk import DiskRates, measure_disk
from memload.planning.duration import Duration, at_once, duration, range_factor
from memload.planning.gathering import gathering_rate
from memload.planning.measuring import Conversion, convert_sample
from memload.planning.report import Plan
from memload.planning.sampling import SEED, Sample
from memload.storage.index import Array, Index
from memload.wording import counted, size_text

if TYPE_CHECKING:
    from memload.planning.serving import Serving

#: The share of the available RAM in which Linux keeps what is written before it is on the disk: its
#: default of vm.dirty_background_ratio.
_UNWRITTEN_SHARE: Final = 0.1
#: What a sample takes beside its rows, at most: the index and the journal.
_BESIDE_ROWS_BYTES: Final = 4 << 20
#: So many other processes for each core are worth a note.
_MUCH_LOAD: Final = 0.5


class Machine(NamedTuple):
    """The machine that will build and train. None: as this one. A GPU with 0 bytes is none."""

    cores: int | None = None
    ram: int | None = None  #: available bytes
    gpu_memory: int | None = None  #: free bytes


def predict(
    source: Any,
    output: str,
    *,
    machine: Machine,
    seconds_so_far: float,
    announce: Callable[[str], None],
    **options: Any,
) -> Plan:
    """Predict what `memload.build` will take and give, on this machine or on ``machine``.

    ``options`` are those of `memload.build`, after the command has parsed them. The source is
    listed, and a sample of its records is converted into a folder that is removed again.
    ``announce`` is told so before. ``seconds_so_far`` is what this process used before: mostly for
    imports, which a build needs, too.

    Raises as `memload.build` does, before it converts anything. An ``output`` that exists is no
    error, but one of a build that has not ended is.
    """
    started = time.perf_counter()
    given_workers = options.pop("num_workers")
    request = request_of(
        source,
        output,
        num_workers=available_cores() if given_workers is None else given_workers,
        source_options={"new_to": options.pop("new_to")},
        lock_timeout=0,
        progress=False,
        **options,
    )
    listing = _list_source(request)
    listing_seconds = seconds_so_far + time.perf_counter() - started
    sample = Sample(listing.source, request.num_workers)
    announce(f"Converting {len(sample):,} of {counted(len(listing.source), 'record')} …")
    measured = _measure(listing, sample)
    # The build has its own number of workers, if it is for another machine.
    num_workers = request.num_workers
    if given_workers is None and machine.cores is not None:
        num_workers = machine.cores
    num_workers = min(num_workers, len(listing.source))
    build_time = _duration(listing, measured, machine, num_workers, listing_seconds)
    return _plan_of(listing, measured, machine, num_workers, build_time)


class _Listing(NamedTuple):
    """A source, and how it will be built."""

    request: Request
    source: Source
    settings: AnySettings
    arrays: list[Array]  #: with their files, the images first

    @property
    def data_bytes(self) -> int:
        """The size of all files."""
        return sum(shard.bytes for array in self.arrays for shard in array.shards)

    @property
    def sample_bytes(self) -> int:
        """The size of an image, with its mask and other arrays."""
        return sum(array.row_bytes for array in self.arrays)


def _check_not_begun(path: Path) -> None:
    """Raise BuildError if the output is being built, or if its build was interrupted."""
    status = build_status(path)
    if status is not None:
        advice = "For a plan, name another OUT.BIN, or none."
        raise BuildError(f"{str(status).removesuffix('.')}. {advice}", path=path)


def _list_source(request: Request) -> _Listing:
    """List a source, and look at its first records. Raises as `memload.build` does."""
    check_file_system(request.output.parent, in_parts=False)
    _check_not_begun(request.output)
    source = request.preparation.open()
    settings = request.preparation.settings(source)
    arrays = arrays_of(settings)
    limit = rows_per_shard(arrays, request.shard_size)
    arrays = [with_shards(array, request.output, len(source), limit) for array in arrays]
    for read in request.data_sets_read(source):
        check_not_read(Index.open(read), request.output, arrays)
    check_output(request.output, arrays, overwrite=True)
    return _Listing(request, source, settings, arrays)


class _Measured(NamedTuple):
    """What was measured on this machine."""

    conversion: Conversion
    disk: DiskRates
    gathering: float  #: bytes a second
    load: float  #: processes for each core that were at work before


def _measure(listing: _Listing, sample: Sample) -> _Measured:
    """Measure the disk, convert a sample, and gather rows.

    Nothing is left of what is written. Raises BuildError if nothing can be written.
    """
    request, parent = listing.request, listing.request.output.parent
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    needed_bytes = len(sample) * listing.sample_bytes + _BESIDE_ROWS_BYTES
    try:
        disk = measure_disk(parent, listing.arrays[0].row_bytes)
        place = _folder_with_room(parent, needed_bytes)
        with tempfile.TemporaryDirectory(prefix=".memload-plan-", dir=place) as folder:
            conversion = convert_sample(
                sample,
                listing.settings,
                Path(folder),
                name=request.name,
                num_workers=min(request.num_workers, len(sample)),
                timeout=request.timeout,
            )
    except MemloadError:  # some are OSErrors, too
        raise
    except OSError as error:
        raise BuildError(
            f"{parent}: a sample cannot be written there: {error.strerror or error}. Make room, or "
            "name OUT.BIN in a folder in which you may write.",
            path=parent,
        ) from error
    return _Measured(conversion, disk, gathering_rate(listing.sample_bytes), load)


def _folder_with_room(parent: Path, needed_bytes: int) -> Path:
    """Return where a sample of so many bytes goes: beside the output, or else with temporary files.

    The disk of the output may be nearly full now. That is no reason not to plan.
    """
    if shutil.disk_usage(parent).free >= needed_bytes:
        return parent
    other = Path(tempfile.gettempdir())
    if shutil.disk_usage(other).free >= needed_bytes:
        return other
    raise BuildError(
        f"There is no room for the {size_text(needed_bytes)} of a sample, neither in {parent} nor "
        f"in {other}. Make room, or let TMPDIR name a folder that has room.",
        path=parent,
    )


def _duration(
    listing: _Listing,
    measured: _Measured,
    machine: Machine,
    num_workers: int,
    listing_seconds: float,
) -> Duration:
    """Return how long the build takes with so many workers on a machine."""
    cores = usable_cores()
    here = at_once(measured.conversion.num_workers, cores)
    return duration(
        measured.conversion,
        measured.disk,
        records=len(listing.source),
        data_bytes=listing.data_bytes,
        unwritten_bytes=_UNWRITTEN_SHARE * (machine.ram or available_memory() or 0),
        listing_seconds=listing_seconds,
        scale=here / at_once(num_workers, machine.cores or cores),
        range_factor=range_factor(
            measured.conversion,
            load=measured.load,
            is_other_machine=machine.cores is not None,
        ),
    )


def _plan_of(
    listing: _Listing,
    measured: _Measured,
    machine: Machine,
    num_workers: int,
    build_time: Duration,
) -> Plan:
    """Return the plan for a build with so many workers on a machine."""
    request, records, conversion = listing.request, len(listing.source), measured.conversion
    image, *others = listing.arrays
    height, width, channels = image.shape
    rejected = round(records * conversion.rejected / conversion.records)
    free_bytes = shutil.disk_usage(request.output.parent).free
    existing = existing_files(request.output, listing.arrays)
    return Plan(
        source=_name_of(request.preparation.source),
        records=records,
        usable=records - rejected,
        shape=(height, width, channels),
        dtype=np.dtype(image.descr).name,
        arrays=[array.name for array in others],
        bytes=listing.data_bytes,
        free_bytes=free_bytes,
        seconds=build_time.seconds,
        seconds_range=(build_time.low, build_time.high),
        num_workers=num_workers,
        scaled_from_cores=None if machine.cores is None else usable_cores(),
        serving=_serving(listing, measured, machine),
        tried=conversion.records,
        tried_rejected=conversion.rejected,
        seed=SEED,
        warnings=list(_warnings(listing, conversion, free_bytes, rejected)),
        notes=[*listing.source.notes, *_notes(measured, existing)],
        output_exists=bool(existing),
    )


def _name_of(source: Any) -> str:
    files = FilesToOpen.of(source)
    return type(source).__name__ if files is None else wording.listed(files.names, 2)


def _serving(listing: _Listing, measured: _Measured, machine: Machine) -> "Serving":
    """Return how the data set will be served."""
    # Not before the sample is converted: it imports torch, and workers would be forked from that.
    from memload.planning.serving import Memory, free_gpu_memory, serve

    gpu = free_gpu_memory() if machine.gpu_memory is None else machine.gpu_memory or None
    ram = available_memory() if machine.ram is None else machine.ram
    return serve(
        listing.data_bytes,
        image_bytes=listing.arrays[0].row_bytes,
        sample_bytes=listing.sample_bytes,
        memory=Memory(ram, gpu),
        disk=measured.disk,
        gathering=measured.gathering,
    )


def _notes(measured: _Measured, existing: Sequence[Path]) -> Iterator[str]:
    """Yield what makes the plan less certain, and which files the build would replace."""
    if existing:
        yield (
            f"{existing[0]} exists already. With --overwrite, the build replaces it once it is "
            "complete; or name another output"
        )
    if measured.disk.write is None:
        yield (
            "the disk is nearly full, so its speed was not measured. The time is that of "
            "converting, without writing"
        )
    if measured.load >= _MUCH_LOAD:
        yield (
            f"other processes were at work, {measured.load:.1f} for each core in the last minute, "
            "so the time is less certain"
        )


def _warnings(
    listing: _Listing, conversion: Conversion, free_bytes: int, rejected: int
) -> Iterator[str]:
    """Yield why the build would publish nothing.

    ``rejected`` is how many of all records probably cannot be used.
    """
    request, records = listing.request, len(listing.source)
    if listing.data_bytes > free_bytes:
        yield (
            f"the build will not begin, since it needs {size_text(listing.data_bytes)}, and only "
            f"{size_text(free_bytes)} are free. Make room, or name another disk"
        )
    if conversion.rejected and request.on_error == "raise":
        yield f"the build will stop at a record that cannot be used: {conversion.reasons}"
    elif not request.limit.allows(rejected, records):
        share = sufficient_limit(rejected, records)
        yield (
            f"the build will publish nothing, since about {share} cannot be used, and at most "
            f"{request.limit} may be: {conversion.reasons}. Mend them, or allow for more with "
            "--max-rejects"
        )
