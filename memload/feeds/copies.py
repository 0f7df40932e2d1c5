"""Copies by the device's own engines, from any memory that it can read; and registering memory.

The driver is called through ctypes with arrays of NumPy. That takes less time than through objects
of NVIDIA's cuda-bindings, and needs no package.
"""

import contextlib
import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memload.errors import FeedError

#: The driver's functions that copy rows, the best first: two forms of one that takes a whole batch,
#: and one that takes a single row, which all drivers have.
FUNCTIONS = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync", "cuMemcpyHtoDAsync_v2")


#: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets there.
_IN_STREAM_ORDER = 1


class RowCopies:
    """Copies the rows of a batch from host addresses to a tensor on the device.

    With a driver of CUDA 12.8 or later, one batched copy takes all rows: no kernel, no staging
    memory, hardly any CPU time. On an H100 it reaches 0.94 of what page-locked memory reaches. An
    older driver copies one row after another, at half of that. ``is_batched`` says which. Raises
    FeedError if there is no driver.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise FeedError(f"the CUDA driver cannot be loaded: {error}. Use feed='cpu'.") from None
        function = next(name for name in FUNCTIONS if hasattr(driver, name))
        self._copy: Any = getattr(driver, function)
        self.is_batched = "Batch" in function
        # A CUmemcpyAttributes is six integers: the order, two locations as hints, and flags.
        attributes = (ctypes.c_int * 6)(_IN_STREAM_ORDER)
        #: The attributes, from which copy on they hold, and how many there are.
        self._options = [
            ctypes.byref(attributes), ctypes.byref(ctypes.c_size_t(0)), ctypes.c_size_t(1)
        ]  # fmt: skip
        if function == "cuMemcpyBatchAsync":  # where it writes which copy has failed
            self._options.append(ctypes.byref(ctypes.c_size_t()))

    def __call__(self, addresses: np.ndarray, bytes_in_window: np.ndarray, out: Tensor) -> None:
        """Copy the rows at ``addresses`` into ``out`` ``(n, …)``, on the current stream.

        Both arrays are int64 ``(n,)``. ``bytes_in_window`` is what is left from each address to the
        end of its registration. A row that goes on beyond is copied in two parts, since one copy
        may not cross from one registration into the next. Raises FeedError.
        """
        row_bytes = out.nbytes // len(out)
        sizes = np.minimum(bytes_in_window, row_bytes)
        targets = out.data_ptr() + np.arange(len(addresses)) * row_bytes
        cut = np.flatnonzero(sizes < row_bytes)
        if cut.size:
            addresses = np.concatenate([addresses, addresses[cut] + sizes[cut]])
            targets = np.concatenate([targets, targets[cut] + sizes[cut]])
            sizes = np.concatenate([sizes, row_bytes - sizes[cut]])
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device.index).cuda_stream)
        status = 0
        if self.is_batched:
            arrays = [np.ascontiguousarray(array) for array in (targets, addresses, sizes)]
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
            status = self._copy(*pointers, ctypes.c_size_t(len(sizes)), *self._options, stream)
        else:
            parts = zip(targets.tolist(), addresses.tolist(), sizes.tolist(), strict=True)
            for target, address, size in parts:
                pointers = [ctypes.c_void_p(target), ctypes.c_void_p(address)]
                status = status or self._copy(*pointers, ctypes.c_size_t(size), stream)
        if status:
            raise FeedError(
                f"CUDA cannot start {len(sizes)} copies: status {status} of the driver. Use "
                "feed='pinned'."
            )


#: cudaHostRegisterPortable (for all devices) and cudaHostRegisterReadOnly.
_FLAGS = 1 | 8


def register(address: int, size: int) -> None:
    """Page-lock mapped memory that is only read, and let torch's current device read it.

    Raises FeedError if CUDA refuses.
    """
    status = _runtime().cudaHostRegister(address, size, _FLAGS)
    if int(status):
        # CUDA keeps the error and reports it to whatever torch calls next. A kernel clears it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        reason = _runtime().cudaGetErrorString(status)
        raise FeedError(
            f"{size:,} bytes of page cache cannot be registered with CUDA, perhaps because of the "
            f"file system ({reason}). Use feed='pinned'."
        )


def unregister(address: int) -> None:
    """Undo `register`."""
    _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # bindings of the CUDA torch uses
