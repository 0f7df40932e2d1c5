"""An index is a value, and editing is a function from indexes to an index. Nothing imports torch.

::

    out.idx ───────────┐  concat, join, relabel,
    more.idx ──────────┼─▶ where, with_columns ───▶ Index ──▶ write() ──▶ all.idx
    labels.csv, f.npy ─┘                              │
                                                      └────▶ export ──▶ pngs/ or a WebDataset

Pixels stay where they are; only `export` reads them. ``memload build all.idx packed.bin`` packs.

- index_files.py: indexes come from paths and data sets, and go to new files.
- concat.py: the samples of several data sets, one after another.
- columns.py: labels and other columns, from lists and arrays; samples with some values.
- relabel.py: … from a table.
- join.py: further arrays beside the images.
- matching.py: which samples stand for the same picture, by their names.
- export.py: samples as PNG files in folders, or in a tar.
- file_names.py: … their names. Keys are not trusted.
- copy.py: the files of a data set, to another machine or a store.
"""
