"""Bring the rows of samples to the device: one file for each way, and the choice among them.

    choice ─▶ feed ─▶ prepare(samples) ─▶ begin(start, stop) ─▶ fetch()
                      once a chunk        once a batch, early   the batch

    page cache ─┬─ threads copy rows to memory ────────────────────▶ batch on the CPU   cpu
                ├─ threads copy rows to page-locked memory ─ copy ─▶ batch on the GPU   pinned
                ├─ the GPU's copy engines read the page cache ─────▶ batch on the GPU   dma
                ├─ a kernel on the GPU reads the page cache ───────▶ batch on the GPU   uva
                ├─ dma or uva, for as many rows as fit ────────────▶ batch on the GPU   disk
                │  disk ─ threads read the other rows ─────────────────┘
                └─ all rows, once ─▶ GPU memory ─ index_select ────▶ batch on the GPU   resident

The way of a row from the disk to the GPU, with dma, uva and disk. Each name is a file:

    budget: which windows of the files (windows) may be held in RAM
      ▼
    held: one thread reads them ─▶ page cache, registered with CUDA (registered) ─┐
                                                                                  ├─▶ dma or uva
    row_reader: threads read rows that are not held ─▶ page-locked (page_locked) ─┘   copies both

What the words mean:

- used rows: the rows that the samples use.
- window: 256 MiB of a file. A plan says how many bytes of each window are meant.
- claim: the part of the budget that a Loader has taken, as a plan.
- held: in memory that the GPU reads by itself: in registered page cache, or in its own memory.
- kept: to be held in RAM, and therefore read through the page cache.
- rows that stay: those that gathered.py leaves in the page cache, without registering it.

The files:

- choice.py: which feed serves some samples on some device, and why.
- factory.py: creates feeds by their names.
- limits.py: how much memory rows may take, by default and as a Loader was told.
- interface.py: what a feed is given, and what it promises.
- cpu.py, pinned.py, resident.py: the feeds of these names.
- gathered.py: which rows stay in the page cache when cpu.py and pinned.py gather them.
- page_cache.py: the feeds dma, uva and disk. Begin here to follow a row.
- dma.py, uva.py: how they copy a batch: by the GPU's copy engines, or by a kernel.
- uva_kernel.py: the kernel of uva.py. Importing it imports Triton.
- budget.py: the RAM that all Loaders of a process share.
- windows.py: which parts of the files are held, 256 MiB at a time. Arithmetic only.
- row_ranges.py: which rows lie in memory by now, and where. Arithmetic only.
- held.py: brings these parts into RAM while training runs.
- registered.py: registers them with CUDA, so that the GPU can read them.
- device_rows.py: rows of the feed disk that are held in the device's own memory.
- row_reader.py: reads the other rows from the files, many at a time.
- busy_time.py: counts the bytes read from the files, and the seconds that took.
- page_locked.py: memory that the GPU can read, for the rows of row_reader.py and pinned.py.
- joined.py: several arrays, such as images and masks: a feed for each.
- buffers.py: memory for batches on the CPU, used again and again.

How a file is read, through the page cache or past it, is in ``storage/file_reads.py``. A feed knows
nothing of the order of samples, as a sampler knows nothing of pixels.

What your code writes into an image in place stays in your process and never reaches the file.
``dataset[i]`` shows it. Batches may be read from the file, with any feed, and need not show it.
"""
