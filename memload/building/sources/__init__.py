"""Where images come from. Everything here gives records by position; nothing here decodes.

::

    what the user names ──▶ opening ──▶ a Source ──▶ Record: name, image, columns

    what it is              module       what several of them use
    ──────────────────────────────────────────────────────────────────────────────
    a folder                folder       listed      names and columns in memory
    a CSV or TSV file       table        columns     numbers, labels, categories
    Parquet files           parquet      positional  a file that processes share
    tar files, a zip        tar, zip     names       what columns are commonly called
    an .npy file            arrays       record      the interface, `Source`
    a memload data set      existing
    a URL                   remote       classes     wraps a source, so that its labels
    a map-style data set    dataset                  count into a given list
"""
