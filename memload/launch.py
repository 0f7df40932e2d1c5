"""Launches of Triton kernels that take little of the host's time."""

from typing import Any

import torch
import triton
from torch import Tensor

#: Whether compiled kernels are called with their constants, as they are since Triton 3.3.
_TAKES_CONSTANTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)

#: Compiled kernels and their constants, by the kernel and all that they were compiled for.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_MAX_COMPILED = 4096


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Do what ``kernel[(programs,)](*arguments, **constants)`` does, in less time.

    The first argument is a tensor, on whose device and current stream the kernel runs. Constants
    are the last parameters of the kernel, and options such as ``num_warps``.

    At each launch, Triton 3.6 goes through all arguments and all global constants of the kernel to
    find what it compiled for such arguments. That takes 10 to 20 µs for the kernels of memload.
    Here it is done once for each list of arguments, and later launches take 4 to 8 µs. Of a tensor,
    only the dtype counts, and whether 16 divides its address.
    """
    device = arguments[0].device
    if device.type == "cpu" or not _TAKES_CONSTANTS:  # on the CPU, Triton's interpreter
        with torch.cuda.device(device if device.type == "cuda" else -1):
            kernel[(programs,)](*arguments, **constants)
        return
    key = id(kernel), device.index, *map(_described, arguments), *constants.items()
    with torch.cuda.device(device):
        known = _compiled.get(key)
        if known is not None:
            compiled, values = known
            compiled[programs, 1, 1](*arguments, *values)
            return
        compiled = kernel[(programs,)](*arguments, **constants)
    if len(_compiled) >= _MAX_COMPILED:  # arguments change from batch to batch
        _compiled.clear()
    names = kernel.arg_names[len(arguments) :]
    _compiled[key] = compiled, tuple(constants[name] for name in names)


def ceil_div(dividend: int, divisor: int) -> int:
    """Return a quotient, rounded up. ``triton.cdiv`` takes 2 µs, and this a tenth."""
    return -(-dividend // divisor)


def _described(argument: Any) -> Any:
    """Return what a kernel is compiled for."""
    if type(argument) is int:  # most are, and 1 and True are not the same
        return argument
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return type(argument), argument
