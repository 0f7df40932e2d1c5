"""Where images come from. Everything here gives records by position; nothing here decodes.

::

    what the user names ──▶ opening ──▶ a Source ──▶ Record: name, image, columns

    what it is              module
    ─────────────────────────────────
    a folder                folder
    a CSV or TSV file       table
    Parquet files           parquet
    tar files, a zip        tar, zip
    an .npy file            arrays
    a memload data set      existing
    a URL                   remote
    a map-style data set    dataset

    module                  what several sources use
    ─────────────────────────────────────────────────────────────────────
    record                  the interface: `Source` and its records
    listed                  sources whose names and columns are in memory
    json_columns            the JSON objects in tars
    exported                tables that `memload export` has written
    columns                 numbers, labels and categories of all samples
    hugging_face            what its data sets say about their columns
    unnamed                 errors for boxes and masks that are not named
    entries                 masks, arrays, points and boxes of a data set's samples
    names                   what columns are commonly called
    positional              a file that several processes read
    wrapped                 a source that changes the records of another one
    classes                 … so that labels count into a given list
    beside                  … so that they have masks and arrays from folders
    matching                which file in such a folder belongs to which image
    places                  where the images of a table are, if they are not where it says
    new_samples             … so that those which a data set has are left out
"""
