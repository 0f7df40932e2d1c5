"""The kernel of the feed uva, in a file of its own because it imports Triton."""

import triton
import triton.language as tl
from torch import Tensor

from memload.launch import launch

#: Programs of the kernel: enough to fill the bus, and few enough to leave the device to the model.
_PROGRAMS = 64
#: The most words that one program copies at a time.
_MAX_BLOCK = 2048


def gather_rows(addresses: Tensor, out: Tensor, words: int) -> None:
    """Copy a row of ``words`` words from each int64 address to ``out``, whose dtype is a word."""
    block = min(_MAX_BLOCK, 1 << (words - 1).bit_length())
    launch(_gather_rows, _PROGRAMS, addresses, out, words, len(addresses), BLOCK=block)


@triton.jit
def _gather_rows(addresses, out, words, count, BLOCK: tl.constexpr):  # noqa: N803  # Triton's style
    """Copy ``count`` rows of ``words`` words each from int64 ``addresses`` to ``out``."""
    blocks = tl.cdiv(words, BLOCK)
    for block in range(tl.program_id(0), blocks * count, tl.num_programs(0)):
        row = block // blocks
        source = tl.load(addresses + row).to(tl.pointer_type(out.dtype.element_ty), bitcast=True)
        offset = (block % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < words
        tl.store(
            out + row.to(tl.int64) * words + offset,
            tl.load(source + offset, mask=inside),
            mask=inside,
        )
