"""The files of a data set: read, check and write them. Nothing here imports torch.

    out.idx ── index: read, check ──┬─▶ rows, labels, columns ──▶ where: choose samples
                                    └─▶ keys: the samples' names, read when one is used
    out.bin ── mapping: map ───▶ shards: check ──▶ gather rows that are in RAM
      └─────── file_reads: read ─────────┴───────▶ gather rows that are not

    index: write ──▶ out.idx        (building/ writes the shards)

- format.py: the specification of both files, and their names.
- index.py: everything that is known of a data set except its pixels. Where a row begins in a file.
- keys.py: the names of samples. The names of a subset are a view.
- mapping.py: maps files into memory, and tells the kernel which pages are needed.
- where.py: which samples have the values that a user asks for.
- file_reads.py: reads parts of files, through the page cache or past it.
- read_queue.py: reads many parts of files at once past the page cache (Linux's asynchronous I/O).
- shards.py: opens and checks the shards, and gathers rows from them.

Files are immutable while they are open. They are only ever replaced by renaming.
"""
