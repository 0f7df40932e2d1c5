"""The container of an index: a safetensors file, which holds named tensors behind a JSON header.

memload reads and writes these files itself. The safetensors library would copy all tensors twice to
write them, and would map a file to read it, so that a failing disk ended the process with SIGBUS.
"""

import json
import math
import os
from collections.abc import Mapping
from io import BufferedReader
from typing import Any, NamedTuple

import numpy as np

#: The limit of the safetensors library.
_MAX_HEADER_BYTES = 100_000_000
#: The limit of NumPy.
_MAX_DIMENSIONS = 64
#: Element types as safetensors and as NumPy call them. Data are stored in the reverse order.
TYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "I16": "<i2", "U16": "<u2", "F16": "<f2",
    "I32": "<i4", "U32": "<u4", "F32": "<f4", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
_NAMES = {descr: name for name, descr in TYPES.items()}


class Tensor(NamedTuple):
    """A tensor in a file: its type as NumPy writes it, its shape, its first byte and its size."""

    descr: str
    shape: tuple[int, ...]
    start: int
    size: int


def make_header(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file in which these tensors follow in the order of `in_file_order`.

    It is to the byte what the safetensors library writes. Raises ValueError if it is too large.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in in_file_order(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        dtype, shape = _NAMES[tensor.dtype.str], list(tensor.shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise ValueError(
            f"the metadata take {len(text):,} bytes, but {_MAX_HEADER_BYTES:,} is the maximum"
        )
    return len(text).to_bytes(8, "little") + text


def in_file_order(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of tensors in the order of their data: wide types first, then by name."""
    types = list(_NAMES)
    return sorted(tensors, key=lambda name: (-types.index(tensors[name].dtype.str), name))


def read_header(file: BufferedReader) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file by name, and its metadata.

    A damaged file raises ValueError, KeyError, TypeError, AttributeError or RecursionError. Tensors
    that are returned fill the file without gaps.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    require(8 + length <= size, f"its header of {length:,} bytes does not fit in {size:,} bytes")
    require(length <= _MAX_HEADER_BYTES, f"its header has {length:,} bytes")
    entries = json.loads(file.read(length).decode())
    metadata = entries.pop("__metadata__")
    tensors = {}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        (start, stop), shape, descr = entry["data_offsets"], entry["shape"], TYPES[entry["dtype"]]
        whole = all(type(number) is int and 0 <= number < 2**63 for number in (start, *shape))
        require(whole and len(shape) <= _MAX_DIMENSIONS, f"tensor {name!r} has a wrong shape")
        require(8 + length + start == end, f"tensor {name!r} does not follow the one before it")
        tensor_size = int(descr[2:]) * math.prod(shape)
        require(stop - start == tensor_size, f"tensor {name!r} has a wrong size")
        tensors[name] = Tensor(descr, tuple(shape), end, tensor_size)
        end += tensor_size
    require(end == size, f"it has {size:,} bytes instead of {end:,}")
    return tensors, metadata


def read_tensor(file: BufferedReader, tensor: Tensor) -> np.ndarray:
    """Return a tensor, read into memory. Raises OSError, and ValueError if the file has shrunk."""
    data = np.empty(tensor.size, np.uint8)
    file.seek(tensor.start)
    require(file.readinto(data.data) == tensor.size, "it was truncated while it was read")
    return data.view(tensor.descr).reshape(tensor.shape)


def require(condition: bool, problem: str) -> None:
    """Raise ValueError with this text unless a condition holds."""
    if not condition:
        raise ValueError(problem)
