"""Where images come from. Every source is a value: names, columns, and where the bytes are.

::

    folder, zip, URL ──▶ names in folders ──┐
    tar ──▶ names, JSON ────────────────────┤
    CSV, TSV, JSONL, Parquet, ──▶ a table ──┼─▶ columns ──▶ Source ──▶ take, new_to,
    Hugging Face                            │                 │        with_classes, with_files
    npy, a memload data set ────────────────┤                 ▼
    a data set in Python ──▶ some samples ──┘      source[row] ──▶ Sample: key, image,
                                                                   columns, arrays

Nothing here decodes a picture. Only names and columns are in memory; images are opened one by one.

- samples: `Source`, its samples, and what makes other sources of it.
- reading: the options that say how a source is read.
- contents: the bytes of images: files, ranges of files, rows of something.
- columns: what values become: numbers, arrays, labels or categories. Nothing else decides it.
- boxes: points and boxes among the values of a table.
- archives: folders and zips: names, and the classes in them.
- tars: tar files in WebDataset's layout.
- tables: CSV, TSV and JSON lines; templates that name files, and the choice of rows.
- parquet: Parquet files and Hugging Face's data sets.
- remote: folders and files at URLs.
- existing: memload's own data sets, and .npy files.
- mapped: any object with ``len()`` and ``[index]``.
- matching: which mask belongs to which image.
- opening: finds out what a source is.
"""
