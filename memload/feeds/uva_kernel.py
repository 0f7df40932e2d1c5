"""The kernel of `UvaFeed`, apart from it since Triton is imported with it."""

import triton
import triton.language as tl


@triton.jit
def gather_rows(addresses, out, words, count, BLOCK: tl.constexpr):  # noqa: N803  # Triton's way of writing constants
    """Copy ``count`` rows of ``words`` words, from int64 ``addresses`` into ``out`` one after the other."""
    blocks = tl.cdiv(words, BLOCK)
    for job in range(tl.program_id(0), blocks * count, tl.num_programs(0)):
        row = job // blocks
        source = tl.load(addresses + row).to(tl.pointer_type(out.dtype.element_ty), bitcast=True)
        offset = (job % blocks) * BLOCK + tl.arange(0, BLOCK)
        inside = offset < words
        tl.store(
            out + row.to(tl.int64) * words + offset,
            tl.load(source + offset, mask=inside),
            mask=inside,
        )
