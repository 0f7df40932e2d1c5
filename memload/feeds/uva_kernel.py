"""The kernel of the feed uva, in a file of its own because it imports Triton."""

import triton
import triton.language as tl


@triton.jit
def gather_rows(addresses, out, words, count, BLOCK: tl.constexpr):  # noqa: N803  # Triton's style
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
