"""What follows once all rows of a build are converted: the index, the notes and the report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from memload.building.conversion import ArraySettings, Settings
from memload.building.journal import DONE, REJECTED, crc32_field, names_of_boxes
from memload.building.notes import box_notes, missing_notes, picture_notes, size_notes
from memload.building.rejects import RejectLimit, frequent_reasons, sufficient_limit
from memload.building.report import ArrayReport, BuildReport, PartReport
from memload.building.sources.new_samples import different_settings
from memload.building.sources.record import Source, optional
from memload.building.sources.remote import RemoteFiles, RemoteFolder
from memload.building.sources.table import Manifest
from memload.building.sources.wrapped import unwrapped
from memload.building.statistics import mask_ids, statistics
from memload.building.workspace import Workspace, remove
from memload.errors import BuildError
from memload.storage.format import output_paths
from memload.storage.index import Array, Index, class_counts


def complete(workspace: Workspace, limit: RejectLimit) -> Index:
    """Write and return the index and the ledger of a build whose rows are all converted.

    Raises BuildError if more are rejected than ``limit`` allows.
    """
    records, reasons = workspace.records(), workspace.reasons()
    used = np.flatnonzero(records["status"] == DONE)
    rejected = {row: reasons[row] for row in np.flatnonzero(records["status"] == REJECTED).tolist()}
    frequent = frequent_reasons(rejected, workspace.source.keys)
    if not used.size:
        remove(workspace.output)
        noun = _noun(workspace.source)
        none = f"none of {len(records):,} {noun} can"
        if len(records) == 1:
            none = f"the only one of the {noun} cannot"
        options = ", and --root, --path-column and --extension" * _is_table(workspace.source)
        raise BuildError(
            f"{workspace.name}: {none} be used: {frequent}. Check the {noun}{options}.",
            path=workspace.output,
        )
    if not limit.allows(len(rejected), len(records)):
        share = sufficient_limit(len(rejected), len(records))
        raise BuildError(
            f"{workspace.name}: {len(rejected):,} of {len(records):,} {_noun(workspace.source)} "
            f"cannot be used, and at most {limit} may be rejected: {frequent}. "
            f"{workspace.write_ledger(rejected)} lists all. Mend them, or leave them out with "
            f"--max-rejects {share} (max_rejects='{share}' in Python). Then run the same command "
            "again: it goes on from what is done. If you change other settings, "
            f"{workspace.how_to_begin_anew}.",
            path=workspace.output,
        )
    return workspace.write_index(_make_index(workspace, records, used), rejected)


def _noun(source: Source) -> str:
    """Return what messages call the samples of a source."""
    root = optional(source).root
    return "samples" if root is None else f"pictures in {root}"


def _is_table(source: Source) -> bool:
    source = unwrapped(source)
    is_remote = isinstance(source, RemoteFiles) and not isinstance(source, RemoteFolder)
    return isinstance(source, Manifest) or is_remote


def _make_index(workspace: Workspace, records: np.ndarray, used: np.ndarray) -> Index:
    from memload import __version__

    source = workspace.source
    columns = {
        name: np.ascontiguousarray(records[f"column/{name}"][used]) for name in source.schema
    }
    classes = None if source.classes is None else tuple(source.classes)
    facts = statistics(records, used, workspace.arrays[0])
    masks = [array.name for array in workspace.settings.extra_arrays if array.bitmap_size]
    if masks:
        facts["mask_ids"] = {name: mask_ids(records, used, name) for name in masks}
    if classes is not None:
        facts["class_counts"] = class_counts(columns["label"], len(classes))
    return Index(
        path=workspace.index_path,
        arrays=workspace.arrays,
        row=used.astype(np.int64),
        flags=np.ascontiguousarray(records["flags"][used]),
        keys=workspace.keys.take(used),
        columns=columns,
        crc32={
            array.name: np.ascontiguousarray(records[crc32_field(array.name)])
            for array in workspace.arrays
        },
        classes=classes,
        points=tuple(name for name, column in source.schema.items() if column.points),
        boxes=tuple(names_of_boxes(source.schema)),
        categories={name: tuple(texts) for name, texts in optional(source).categories.items()},
        build={
            "memload": __version__,
            "settings": workspace.settings.as_dict(),
            "libraries": workspace.libraries,
            "records": len(records),
            "rejected": len(records) - len(used),
        },
        statistics=facts,
    )


def all_notes(workspace: Workspace, index: Index, new_to: Any) -> list[str]:
    """Return the notes on the source and on all pictures, whichever call converted them."""
    notes = list(workspace.source.notes)
    if new_to is not None:
        notes += different_settings(new_to, workspace.settings.as_dict())
    return [*notes, *_notes(workspace), *_label_notes(index), *_id_notes(index)]


def _notes(workspace: Workspace) -> Iterator[str]:
    """Yield the notes on all pictures."""
    settings, records = workspace.settings, workspace.records()
    if not isinstance(settings, ArraySettings):
        yield from size_notes(records, settings.size)
    if isinstance(settings, Settings):
        yield from picture_notes(records, settings.size, settings.background)
    yield from box_notes(records, names_of_boxes(workspace.source.schema))
    yield from missing_notes(records, settings.extra_arrays, workspace.keys)


def _label_notes(index: Index) -> Iterator[str]:
    """Yield a note if labels do not number classes."""
    labels = index.columns.get("label")
    if index.classes is not None or labels is None or labels.ndim != 1 or not labels.size:
        return
    if labels.dtype.kind not in "iu" or labels.min() < 0:
        kind = "below 0" if labels.dtype.kind in "iu" else "no integers"
        yield f"some labels are {kind}, so num_classes is not known"


def _id_notes(index: Index) -> Iterator[str]:
    """Yield a note for each mask of black and white: white is what most losses leave out."""
    for name, ids in index.statistics.get("mask_ids", {}).items():
        if ids == [0, 255]:
            yield (
                f"{name} has only the ids 0 and 255, and 255 usually does not count "
                "(ignore_index=255). If it is the foreground, store 1 instead"
            )


def _label_range(index: Index) -> tuple[float, float] | None:
    """Return the least and greatest label, if each sample has one number."""
    labels = index.columns.get("label")
    if labels is None or labels.ndim != 1:
        return None
    labels = labels[np.isfinite(labels)]
    return (labels.min().item(), labels.max().item()) if labels.size else None


def report_on(
    name: Path,
    index: Index,
    part: PartReport | None = None,
    *,
    converted: int = 0,
    seconds: float = 0.0,
    num_workers: int = 0,
    notes: Sequence[str] = (),
) -> BuildReport:
    """Return the report of a build that published ``index``, or found it published.

    ``name`` is what the output is called.
    """
    image, rejected = index.image, index.image.rows - len(index)
    height, width, channels = image.shape
    return BuildReport(
        path=name,
        samples=len(index),
        classes=index.classes,
        label_range=_label_range(index),
        columns=tuple(index.columns),
        rejected=rejected,
        bytes=index.data_bytes,
        shape=(height, width, channels),
        dtype=np.dtype(image.descr).name,
        converted=converted,
        seconds=seconds,
        num_workers=num_workers,
        libraries=index.build["libraries"],
        notes=tuple(notes),
        ledger=output_paths(name)[2] if rejected else None,
        arrays=_array_reports(index.arrays),
        part=part,
    )


def unfinished_report(
    workspace: Workspace,
    part: PartReport,
    *,
    rejected: int,
    converted: int,
    seconds: float,
    num_workers: int,
) -> BuildReport:
    """Return the report of a part that leaves shards to others. There is no data set yet."""
    source = workspace.source
    return BuildReport(
        path=workspace.name,
        samples=0,
        classes=source.classes,
        label_range=None,
        columns=tuple(source.schema),
        rejected=rejected,
        bytes=sum(shard.bytes for shard in workspace.shards),
        shape=workspace.settings.shape,
        dtype=np.dtype(workspace.settings.descr).name,
        converted=converted,
        seconds=seconds,
        num_workers=num_workers,
        libraries=workspace.libraries,
        notes=tuple(source.notes),
        ledger=None,
        arrays=_array_reports(workspace.arrays),
        part=part,
    )


def _array_reports(arrays: Sequence[Array]) -> tuple[ArrayReport, ...]:
    return tuple(
        ArrayReport(array.name, array.kind, array.shape, np.dtype(array.descr).name)
        for array in arrays
        if array.kind != "image"
    )
