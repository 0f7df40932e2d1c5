"""The kernel of `UvaFeed`, apart from it since Triton is imported with it."""

import triton
import triton.language as tl


@triton.jit
def gather_rows(table, out, words, count, BLOCK: tl.constexpr):  # noqa: N803  # Triton's way of writing constants
    """Copy rows of ``words`` words; ``table``, int64 ``(2, count)``, has their addresses and positions in ``out``."""
    blocks = tl.cdiv(words, BLOCK)
    for job in range(tl.program_id(0), blocks * count, tl.num_programs(0)):
        row = job // blocks
        source = tl.load(table + row).to(tl.pointer_type(out.dtype.element_ty), bitcast=True)
        position = tl.load(table + count + row)
        offset = (job % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < words
        tl.store(out + position * words + offset, tl.load(source + offset, mask=inside), mask=inside)
