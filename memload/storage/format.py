"""The on-disk format, versions 1 and 2. This text is its specification.

Version 1 has images and columns of numbers. Version 2 adds masks and other arrays. A data set with
only images is written as version 1, which older readers open.

A data set is one **index** and one or more **shards** in one folder. A shard has rows of one array:
the images, or their masks, or anything else of which each sample has a row. All numbers are
little-endian.

File names
----------

One shard of ``out.bin`` is ``out.bin`` itself. Four shards are ``out-00000-of-00004.bin`` to
``out-00003-of-00004.bin``, with five digits or more. These hold the images. The shards of another
array, such as ``mask``, are ``out.mask.bin``, or ``out.mask-00000-of-00004.bin`` and so on. The
index is ``out.idx``. While a build runs, all its files are in the folder ``out.building``. The
build renames the index into place last; pixels without an index are an unfinished build. Builds
also write ``out.rejects.csv`` (UTF-8, columns ``path,reason``), which readers do not need.

Shards
------

A shard is an NPY file of version 1.0 whose header is padded to 4,096 bytes:

- bytes 0 to 5: ``93 4E 55 4D 50 59`` (``\\x93NUMPY``)
- bytes 6 and 7: ``01 00``
- bytes 8 and 9: ``F6 0F`` (4,086: the length of the text that follows)
- bytes 10 to 4,095: ASCII text: the dictionary below, then spaces, then optionally the seal, then
  one newline (``0A``)
- bytes 4,096 onwards: the rows, one after another, each in C order

The dictionary is ``{'descr': '|u1', 'fortran_order': False, 'shape': (260, 256, 256, 3), }``. The
shape begins with the number of rows. What else it may be depends on the kind of the array, and so
does the element type ``descr``. Readers refuse others.

- ``image``: shape ``(rows, H, W, C)``, element types ``|u1``, ``<u2``, ``<i2``, ``<i4``, ``<f2``,
  ``<f4``
- ``mask``: shape ``(rows, H, W)``, element types ``|u1``, ``<u2``
- ``array``: shape ``(rows, …)``, element types those of images, and ``|i1``, ``<i8``, ``<f8``,
  ``|b1``

The size of a shard is exactly ``4096 + rows × bytes of a row``.

The shards of any array but ``image`` may also be NPY files that another program wrote, in C order
and of format version 1.0 or 2.0. Their headers then have another size, below 65,536 bytes, which is
the size of the file less that of its rows. All shards of an array have headers of the same size. In
the header of masks, the shape may also be ``(rows, H, W, 1)``, as that of images with one channel
is.

The seal, such as ``# 0123456789abcdef``, distinguishes shards of the same shape. Its digits are the
first 16 hexadecimal digits of the SHA-256 of the CRC-32 of the shard's rows: those that the index
has, 4 bytes each, in the order of the rows. Readers of NPY files take it for a comment. Builds
write it. A shard without a seal is valid, too. Apart from the seal, the header follows from element
type and shape.

The rows of an array are numbered through all its shards in their order. The number of the first row
of the second shard is the number of rows in the first shard. A row that no sample uses, since its
picture was rejected, is all zeros.

Index
-----

The index is a safetensors file: the length of the header in 8 bytes, the header as JSON, then the
data of the tensors. The header has the ``dtype``, ``shape`` and ``data_offsets`` of each tensor,
which are its start and end in the data, and the metadata as ``__metadata__``. The tensors of a data
set of ``n`` samples are:

- ``row``, I64 ``(n,)``: The row with the sample's pixels in the array ``image``. Rows count from 0.
  They may be in any order, and several samples may share one.
- ``row/NAME``, I64 ``(n,)``: The same for another array ``NAME``. Where it is absent, ``row`` holds
  for that array, too.
- ``flags``, U8 ``(n,)``: Bits. 1: the picture was turned as its EXIF orientation says. 2: the
  chosen decoder failed and Pillow decoded the picture. 4: a point of the sample is outside the
  picture.
- ``key/offsets``, I64 ``(n + 1,)``: Where the samples' names start and end in ``key/bytes``. The
  first is 0, and none is less than the one before it.
- ``key/bytes``, U8 ``(any,)``: The names, one after another. A name is the path of the source file
  below the root of the source, with ``/`` between folders, in the encoding of the file system
  (usually UTF-8).
- ``crc32/NAME``, U32 ``(r,)``: The CRC-32 (as zlib computes it) of every row of the array ``NAME``,
  including rows that no sample uses. ``r`` is the number of rows of this array; arrays may differ
  in it.
- any other name, numbers ``(n, …)``: A column of the user's, with one entry for each sample. The
  name has no ``/``. If there are ``classes``, there is a column ``label``, I64 ``(n,)``, which
  counts into them.

The metadata have one entry, ``memload``. It is a JSON object with sorted and distinct keys, the
separators ``,`` and ``:``, and all characters beyond ASCII escaped. A name that is not valid
Unicode has lone surrogates: ``\\udc80`` stands for the byte 0x80, and so on.

- ``format_version``: 1, or 2 if there are arrays besides ``image``. Readers refuse greater ones.
- ``samples``: n
- ``arrays``: A list of ``{"name": "image", "descr": "|u1", "shape": [H, W, C], "shards": [{"file":
  "out.bin", "rows": r, "bytes": size of the file}, …]}``. One array is named ``image``. Each of the
  others has an entry ``"kind"``: ``"mask"``, whose values are ids of the image's pixels, or
  ``"array"``. The shape is that of a row. A ``file`` is a name in the folder of the index, without
  a folder. No two files have the same name, and a shard has at least one row. No array has the name
  of a column.
- ``tensors``: Every tensor of the file by name: ``{"dtype": "<i8", "shape": [n], "crc32": CRC-32 of
  its bytes}``, with the type as NumPy writes it.
- ``columns``: The names of the user's columns, in their order.
- ``classes``: The names of the classes in the order of their labels, or ``null``.
- ``points``: The names of the columns with points ``(n, k, 2)``: x and y in pixels of the stored
  picture. The centre of its top left pixel is (0, 0).
- ``boxes``: Only where there are any. The names of the columns with boxes, F32 ``(n, k, 4)``: left,
  top, right and bottom edge in pixels of the stored picture, the whole of which is (0, 0, W, H). A
  box of NaN is none.
- ``categories``: Only where there are any. The texts that columns of I64 ``(n,)`` count into, in
  the order of their numbers: ``{"split": ["test", "train"]}``.
- ``build``: How the pixels were made: settings and versions. For people, and of any content that is
  nested at most 64 levels deep.
- ``statistics``: For people and for normalisation. Like ``build``, of any content. ``mean`` and
  ``std`` have a number for each channel. They are computed over the rows in use. The largest value
  of an unsigned type (255, 65535) counts as 1. Signed integers and floats count as they are. They
  are absent if floats contain NaN or infinities.
- ``fingerprint``: The SHA-256, in hexadecimal, of this JSON text without the fingerprint. It
  identifies the data set.

Several indexes may use the same shards. A saved subset is an index of its own, and so is a data set
that was made by ``memload join``, ``concat`` or ``relabel``.
"""

import hashlib
import re
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from memload.errors import FormatError

FORMAT_VERSION = 2
HEADER_BYTES = 4096  # a page on most machines, so that rows can be mapped and registered in place
MAGIC = b"\x93NUMPY\x01\x00"
METADATA_KEY = "memload"

#: The header of an NPY file that another program wrote is smaller than this.
MAX_NPY_HEADER_BYTES = 1 << 16

#: Element types of images, of masks, of other arrays, and of columns.
DESCRS = ("|u1", "<u2", "<i2", "<i4", "<f2", "<f4")
DESCRS_OF_MASKS = ("|u1", "<u2")
DESCRS_OF_ARRAYS = (*DESCRS, "|i1", "<i8", "<f8", "|b1")
DESCRS_OF_COLUMNS = (*DESCRS_OF_ARRAYS, "<u4", "<u8")

#: Names that no column may have. The last one has a meaning in safetensors.
RESERVED = ("row", "flags", "key", "__metadata__")

#: Names that no array but the images may have either. Batches and samples use them.
_RESERVED_FOR_ARRAYS = (*RESERVED, "image", "images", "label", "index")
#: What follows in the name of one shard of several.
_SHARD_NUMBER = r"-\d{5,}-of-\d{5,}"
#: The name of an array is part of the names of its files.
_ARRAY_NAME = re.compile(r"\w[\w .-]{0,79}")

FLAG_ORIENTED = 1
FLAG_FALLBACK = 2
FLAG_OUTSIDE = 4


def npy_header(descr: str, shape: tuple[int, ...], seal: str = "") -> bytes:
    """Return the header of a shard of this element type and shape ``(rows, …)``."""
    sizes = ", ".join(str(size) for size in shape)
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}"
    length = HEADER_BYTES - len(MAGIC) - 2
    end = f"# {seal}\n" if seal else "\n"
    padded = text.ljust(length - len(end)) + end
    return MAGIC + length.to_bytes(2, "little") + padded.encode("ascii")


class NpyHeader(NamedTuple):
    """What the header of an NPY file says, and its size in bytes."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype
    size: int


def read_npy_header(file: BinaryIO) -> NpyHeader:
    """Read the header of an NPY file, of format version 1.0 or 2.0. Raises ValueError."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its format version {version[0]}.{version[1]} is not 1.0 or 2.0")
    read = np.lib.format.read_array_header_1_0
    if version == (2, 0):
        read = np.lib.format.read_array_header_2_0
    try:
        header = read(file)
    except (ValueError, OSError):
        raise
    except Exception as error:  # NumPy lets errors of Python's parser pass, such as TokenError
        raise ValueError(f"its header is damaged ({error})") from error
    return NpyHeader(*header, file.tell())


def seal_of(crc32: np.ndarray) -> str:
    """Return the seal of a shard whose rows have these checksums, uint32 ``(rows,)``."""
    return hashlib.sha256(np.ascontiguousarray(crc32, "<u4").data).hexdigest()[:16]


def output_paths(path: str | Path) -> tuple[Path, Path, Path]:
    """Return the index, the folder of an unfinished build and the list of rejects of ``out.bin``.

    Raises ValueError if the name does not end in ``.bin``.
    """
    path = Path(path)
    if path.suffix != ".bin" or not path.stem:
        example = path.with_suffix(".bin") if path.name else "out.bin"
        raise ValueError(
            f"output is {str(path)!r}, but its name must end in '.bin'. Write '{example}'."
        )
    return path.with_suffix(".idx"), path.with_suffix(".building"), path.with_suffix(".rejects.csv")


def array_path(path: str | Path, name: str) -> Path:
    """Return what the shards of an array of ``out.bin`` are named after, such as ``out.mask.bin``.

    Those of ``image`` are named after ``out.bin`` itself.
    """
    path = Path(path)
    return path if name == "image" else path.with_name(f"{path.stem}.{name}{path.suffix}")


def check_array_name(name: str) -> None:
    """Raise ValueError unless an array besides the images may be stored under this name."""
    if name in _RESERVED_FOR_ARRAYS:
        raise ValueError(
            f"{name!r} has a meaning of its own and cannot be the name of an array. Choose another "
            "one, such as 'mask'."
        )
    if not _ARRAY_NAME.fullmatch(name) or re.search(r"-\d{5,}$", name):
        raise ValueError(
            f"{name!r:.80} cannot be the name of an array, which is part of the names of its "
            "files: letters, digits, and in between also spaces, '.', '-' and '_', but no number "
            "of a shard at the end. Choose another one, such as 'mask'."
        )


def shard_names(path: str | Path, count: int) -> list[str]:
    """Return the file names of ``count`` shards of ``out.bin``, without a folder."""
    path = Path(path)
    if count == 1:
        return [path.name]
    return [f"{path.stem}-{shard:05d}-of-{count:05d}.bin" for shard in range(count)]


def shard_pattern(path: str | Path, name: str | None = "image") -> re.Pattern[str]:
    """Return what the shards of an array of ``out.bin`` are called, however many there are.

    Without ``name``, those of any array. Group 1 is what follows ``out``.
    """
    array = r"(?:\..+)?" if name is None else re.escape("" if name == "image" else f".{name}")
    return re.compile(rf"{re.escape(Path(path).stem)}({array}(?:{_SHARD_NUMBER})?\.bin)")


def index_path(path: str | Path) -> Path:
    """Return the index of a data set given as ``out.bin``, ``out``, ``out.idx`` or a shard.

    Raises FormatError if the path is that of something else.
    """
    path = Path(path)
    if path.suffix == ".idx":
        return path
    if path.suffix == ".bin":
        return path.with_name(re.sub(f"{_SHARD_NUMBER}$", "", path.stem) + ".idx")
    index = path.parent / f"{path.name}.idx"
    if path.exists() and not index.exists():
        raise FormatError(
            f"{path} is not a data set such as out.bin. Make one from a folder of images: 'memload "
            f"build {path if path.is_dir() else path.parent} out.bin'.",
            path=path,
        )
    return index
