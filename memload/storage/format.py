"""The on-disk layout, format version 1. This text is the specification.

A data set is one **index** and one or more **shards** in one folder. All numbers are little-endian.

Names
    The shards of ``out.bin`` are ``out.bin`` itself where there is one, and
    ``out-00000-of-00004.bin`` … ``out-00003-of-00004.bin`` (five digits or more) where there are four. The
    index is ``out.idx``. While a build runs, everything lies in the folder ``out.building``; the index is
    renamed into place last, so that pixels without an index are an unfinished build. Beside them stands
    ``out.rejects.csv`` (UTF-8, columns ``path,reason``), which no reader needs.

Shards
    A shard is an NPY file, version 1.0, whose header is padded to 4,096 bytes:

    ======================  ======================================================================
    bytes 0 to 5            ``93 4E 55 4D 50 59`` (``\\x93NUMPY``)
    bytes 6 and 7           ``01 00``
    bytes 8 and 9           ``F6 0F`` (4,086: the length of the text that follows)
    bytes 10 to 4,095       ``{'descr': '|u1', 'fortran_order': False, 'shape': (260, 256, 256, 3), }``,
                            then spaces, then perhaps the seal, then one newline (``0A``); ASCII
    bytes 4,096 to the end  the array in C order: row after row, each ``H × W × C`` elements
    ======================  ======================================================================

    The seal, ``# 0123456789abcdef``, tells the shard from others of its shape: the first 16 hexadecimal digits of the
    SHA-256 of its rows' CRC-32 (as the index has them: 4 bytes each, in the order of the rows). To readers of NPY
    files it is a comment. Builds write it; a shard without one is read too. Otherwise the header follows from element
    type and shape alone, and the size of a shard is exactly ``4096 + rows × row bytes``.

    ``descr`` is one of ``|u1``, ``<u2``, ``<f2``, ``<f4``. Rows are numbered through all shards of an array in their
    order: the first row of the second shard is the number of rows in the first. A row that no sample uses (its
    picture was rejected) is all zeros.

Index
    The index is a safetensors file: 8 bytes of header length, a JSON header, the tensors. The header gives
    every tensor's ``dtype``, ``shape`` and ``data_offsets``, its start and end in the bytes that follow the
    header, and the metadata as ``__metadata__``. The tensors, for a data set of ``n`` samples and ``r`` rows:

    ===================  ==================  =========================================================
    name                 type and shape      meaning
    ===================  ==================  =========================================================
    ``row``              I64 ``(n,)``        the row that holds the sample's pixels, ``0 <= row < r``;
                                             in any order, and a row may serve several samples
    ``flags``            U8 ``(n,)``         bits: 1 the picture was turned by its EXIF orientation;
                                             2 the chosen decoder gave up and Pillow decoded it;
                                             4 a point of the sample lies outside the picture
    ``key/offsets``      I64 ``(n + 1,)``    where the samples' names start and end in ``key/bytes``;
                                             starts with 0, never falls
    ``key/bytes``        U8 ``(any,)``       the names, one after another: the path of the source file
                                             below its root, ``/`` between folders, as the bytes of
                                             the filesystem (UTF-8 on most)
    ``crc32/NAME``       U32 ``(r,)``        CRC-32 (zlib's) of every row of the array ``NAME``,
                                             unused rows included
    any other name       numbers ``(n, …)``  a column of the user's, one entry a sample; where ``classes``
                                             are given, ``label`` is there, is I64 ``(n,)`` and counts into
                                             them. No such name holds a ``/``
    ===================  ==================  =========================================================

    Its metadata hold one entry, ``memload``: a JSON object written with sorted keys, of which none is there twice,
    the separators ``,`` and ``:``, and every character beyond ASCII escaped. A name that is no valid Unicode
    holds lone surrogates (``\\udc80`` stands for the byte 0x80, and so on).

    ==================  ===========================================================================
    ``format_version``  1. A reader refuses a greater one
    ``samples``         n
    ``arrays``          a list: ``{"name": "image", "descr": "|u1", "shape": [H, W, C], "shards":
                        [{"file": "out.bin", "rows": r, "bytes": size of the file}, …]}``.
                        ``file`` is a bare name in the folder of the index, and no two are the same. Every
                        array has the same number of rows, a shard at least one; the array named ``image`` is
                        always there
    ``tensors``         every tensor of the file, by name: ``{"dtype": "<i8", "shape": [n], "crc32":
                        CRC-32 of its bytes}``, the type as NumPy writes it
    ``columns``         names of the user's columns in their order
    ``classes``         names of the classes in the order of their labels, or ``null``
    ``points``          names of the columns that hold points ``(k, 2)``: x and y in pixels of the stored
                        picture, where (0, 0) is the centre of the top left pixel
    ``build``           how the pixels were made: settings and versions; for people, of any content
                        that is nested at most 64 levels deep
    ``statistics``      for people and for normalising, likewise of any content; ``mean`` and ``std``, a number a
                        channel, are those of the used rows with the largest value of a whole type (255,
                        65535) taken as 1, and absent where floats hold NaN or infinities
    ``fingerprint``     SHA-256, in hexadecimal, of this JSON text without the fingerprint itself: the
                        identity of the data set
    ==================  ===========================================================================

    An index may stand beside one that another index describes, over the same shards: a subset is a file of
    a few hundred bytes and its ``row``.
"""

import hashlib
import os
import re
from pathlib import Path

import numpy as np

from memload.errors import FormatError

FORMAT_VERSION = 1
HEADER_BYTES = 4096  # one page on most machines, so that rows can be mapped and registered in place
MAGIC = b"\x93NUMPY\x01\x00"
METADATA_KEY = "memload"
MAX_DEPTH = 64

#: Element types that a shard may have.
DESCRS = ("|u1", "<u2", "<f2", "<f4")

#: Names with a meaning of their own, the last one in safetensors; any other is a column of the user's.
RESERVED = ("row", "flags", "key", "__metadata__")

FLAG_ORIENTED = 1
FLAG_FALLBACK = 2
FLAG_OUTSIDE = 4


def npy_header(descr: str, shape: tuple[int, ...], seal: str = "") -> bytes:
    """Return the 4,096 bytes that a shard of this element type and shape ``(rows, H, W, C)`` starts with."""
    sizes = ", ".join(str(size) for size in shape)
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}"
    body = HEADER_BYTES - len(MAGIC) - 2
    mark = f"# {seal}\n" if seal else "\n"
    return (
        MAGIC + body.to_bytes(2, "little") + (text.ljust(body - len(mark)) + mark).encode("ascii")
    )


def seal_of(crc32: np.ndarray) -> str:
    """Return the seal of a shard whose rows have these checksums, uint32 ``(rows,)``."""
    return hashlib.sha256(np.ascontiguousarray(crc32, "<u4").data).hexdigest()[:16]


def output_paths(path: str | Path) -> tuple[Path, Path, Path]:
    """Return the index, the folder of an unfinished build and the ledger that belong to ``out.bin``.

    Raises ValueError if the name does not end in ``.bin``.
    """
    path = Path(path)
    if path.suffix != ".bin" or not path.stem:
        raise ValueError(
            f"output: expected a file name that ends in '.bin', found {str(path)!r}: "
            f"write '{path.with_suffix('.bin') if path.name else 'out.bin'}'"
        )
    return path.with_suffix(".idx"), path.with_suffix(".building"), path.with_suffix(".rejects.csv")


def shard_names(path: str | Path, count: int) -> list[str]:
    """Return the file names of ``count`` shards of ``out.bin``, without a folder."""
    path = Path(path)
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{shard:05d}-of-{count:05d}.bin" for shard in range(count)]


def index_path(path: str | Path) -> Path:
    """Return the index of a data set given as ``out.bin``, ``out``, ``out.idx`` or one of its shards.

    Raises FormatError where the path is that of something else.
    """
    path = Path(path)
    if path.suffix == ".idx":
        return path
    if path.suffix == ".bin":
        own = path.with_suffix(".idx")
        there = os.path.exists(own)  # noqa: PTH110  # which no name can be too long for
        return (
            own if there else path.with_name(re.sub(r"-\d{5,}-of-\d{5,}$", "", path.stem) + ".idx")
        )
    index = path.with_name(path.name + ".idx") if path.name else None  # "." and "/" have none
    if index is None or (os.path.exists(path) and not os.path.exists(index)):  # noqa: PTH110  # as above
        found, images = ("a folder", path) if path.is_dir() else ("another file", path.parent)
        raise FormatError(
            f"{path}: expected a data set such as out.bin, found {found}. Make one from a folder of images with "
            f"'memload build {images} out.bin'",
            path=path,
        )
    return index
