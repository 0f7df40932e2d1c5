"""Bring the rows of samples to the device: four ways, and the choice among them.

    choice ─▶ feed ─▶ prepare(samples) ─▶ begin(start, stop) ─▶ fetch()
                      once a chunk        once a batch, early   the batch

    page cache ─┬─ threads copy rows to memory ─────────────────▶ batch on the CPU   cpu
                ├─ threads copy rows to page-locked memory ─────▶ batch on the GPU   pinned
                ├─ the GPU's copy engines read rows there ──────▶ batch on the GPU   dma
                │  disk ─ threads read the rows that are not held ──┘
                └─ all rows, once ─▶ GPU memory ─ index_select ─▶ batch on the GPU   resident

A row is *held* if it lies in page cache that is registered with CUDA, so that the GPU reads it and
the system cannot drop it.

- feed.py: what a feed is given, and what it promises. Begin here.
- gather.py: the feeds cpu and pinned, and memory for batches that is used again.
- resident.py: the feed resident.
- pages.py: the feed dma, which is called disk in the log if it does not hold all rows.
- held.py: how much of each file is held, and the thread that brings it in.
- reader.py: threads that read the other rows.
- copies.py: the driver's copies, and registering memory.
- joined.py: several arrays, such as images and masks: a feed for each.
- choice.py: which feed serves, and why.

What your code writes into an image in place stays in your process and never reaches the file.
``dataset[i]`` shows it. Batches may be read from the file, with any feed, and need not show it.
"""
