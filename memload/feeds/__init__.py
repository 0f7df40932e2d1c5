"""Bring the rows of samples to the device: one file for each way, and the choice among them.

    choice ─▶ feed ─▶ prepare(samples): once a chunk ─▶ fetch(start, stop): once a batch

    page cache ─┬─ threads copy rows to memory ────────────────────▶ batch on the CPU   cpu
                ├─ threads copy rows to page-locked memory ─ copy ─▶ batch on the GPU   pinned
                ├─ the GPU's copy engines read the page cache ─────▶ batch on the GPU   dma
                ├─ a kernel on the GPU reads the page cache ───────▶ batch on the GPU   uva
                └─ all rows, once ─▶ GPU memory ─ index_select ────▶ batch on the GPU   resident

- choice.py: which feed serves some samples on some device, and why.
- interface.py: what a feed is given, and what it promises.
- cpu.py, pinned.py, dma.py, uva.py, resident.py: the feeds, as drawn above.
- uva_kernel.py: the kernel of uva.py. Importing it imports Triton.
- joined.py: several arrays, such as images and masks: a feed for each.
- pages.py: registers the page cache with CUDA; what dma.py and uva.py have in common.
- buffers.py: memory for batches on the CPU, used again and again.

A feed knows nothing of the order of samples, as a sampler knows nothing of pixels.

What your code writes into an image in place stays in your process and never reaches the file. The
feeds ``cpu`` and ``pinned`` read your process's view and include it; the others may read the file.
"""
