"""Where images come from. Everything here gives records by position; nothing here decodes.

::

    what the user names ──▶ opening ──▶ a Source ──▶ Record: name, image, columns

    a folder                folder          listed: names and columns in memory
    a CSV or TSV file       table           columns: numbers, labels, categories
    Parquet files           parquet         classes: labels that count into a given list
    tar files, a zip        tar, zip
    an .npy file            arrays
    a memload data set      existing
    a URL                   remote
    a map-style data set    dataset
"""
