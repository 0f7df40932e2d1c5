"""The header of a safetensors file, read as hostile input.

Read here and not by safetensors, which opens the file by its name once more: another may have taken that meanwhile,
a pipe would be waited for, and a disk that gives nothing would end the process. What is refused there is refused here.
"""

import json
import math
from typing import Any, NamedTuple

#: safetensors' own limit.
MAX_HEADER_BYTES = 100_000_000

#: NumPy's limit, and what keeps the product of a shape small.
_MAX_DIMENSIONS = 64

#: The element types that an index may have, as safetensors and as NumPy call them.
TYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "U32": "<u4",
    "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip


class Tensor(NamedTuple):
    """One tensor: its type as NumPy writes it, its shape, and where it starts and ends in the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """What a file holds. ``tensors`` lie one behind another and fill ``size - start`` bytes, from ``start`` on."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    start: int


def header_bytes(first: bytes, size: int) -> int:
    """Return how many bytes of a file of ``size`` its header takes, given the first eight. Raises ValueError."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length > size - 8:
        raise ValueError(f"{size:,} bytes, of which a header would take {8 + length:,}")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length:,} bytes, where {MAX_HEADER_BYTES:,} are allowed")
    return 8 + length


def parse_header(data: bytes, size: int) -> Header:
    """Return the header of a file of ``size`` bytes that begins with ``data``, as long as `header_bytes` says.

    Memory and time grow with the header's own length, and with no number in it. Raises ValueError, and
    RecursionError where it is nested too deeply.
    """
    text = data[8:].decode("utf-8")
    listed = load_json(text) if text.startswith("{") else None
    if not isinstance(listed, dict):
        raise ValueError("a header that is no JSON object")
    metadata = listed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError("metadata that are no texts")
    for name in (*listed, *metadata, *metadata.values()):
        name.encode("utf-8")  # lone surrogates, which safetensors cannot hold
    tensors = {name: _tensor(name, entry) for name, entry in listed.items()}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.start != end:
            raise ValueError(
                f"a tensor {name[:80]!r} from byte {tensor.start:,} on, and not from {end:,}"
            )
        end = tensor.stop
    if end != size - len(data):
        raise ValueError(
            f"{size - len(data):,} bytes of tensors, where the header tells of {end:,}"
        )
    return Header(tensors, metadata, len(data))


def load_json(text: str) -> Any:
    """Return what a JSON text says; not what Python alone takes for JSON, nor one of two entries of the same name.

    Raises as `parse_header` does.
    """
    return json.loads(text, parse_constant=_refuse, object_pairs_hook=_object)


def _refuse(name: str) -> None:
    raise ValueError(f"{name}, which JSON does not know")


def _object(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(entries)
    if len(found) != len(entries):
        raise ValueError("an entry that is there twice")
    return found


def _tensor(name: str, entry: Any) -> Tensor:
    if isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "data_offsets"}:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        descr = TYPES.get(dtype) if isinstance(dtype, str) else None
        if descr and _counts(shape) and _counts(offsets) and len(offsets) == 2:
            start, stop = offsets
            if stop - start == int(descr[2:]) * math.prod(shape):
                return Tensor(descr, tuple(shape), start, stop)
    shown = repr(entry)
    raise ValueError(
        f"no tensor by the name {name[:80]!r}: {shown if len(shown) <= 200 else shown[:199] + '…'}"
    )


def _counts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(number) is int and 0 <= number < 2**63 for number in value)
    )
