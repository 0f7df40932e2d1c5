"""The files of a data set: read, check and write them. Nothing here imports torch.

    out.idx ── index: read, check ──┬─▶ rows, labels, columns ──▶ where: choose samples
                                    └─▶ keys: the samples' names, read when one is used
    out.bin ── mapping: map ──▶ shards: check ──┬─▶ gather rows that are in RAM
                                                └─▶ read rows that are not

    index: write ──▶ out.idx        (building/ writes the shards)

- format.py: the specification of both files, and their names.
- index.py: everything that is known of a data set except its pixels. Where a row lies in a file.
- keys.py: the names of samples. The names of a subset are a view.
- where.py: which samples have the values that a user asks for.
- mapping.py: maps files into memory side by side.
- shards.py: opens and checks the shards, and gathers rows from them.

Files are immutable while they are open. They are only ever replaced by renaming.
"""
