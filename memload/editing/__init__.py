"""An index is a value, and editing is a function from indexes to an index. Nothing imports torch.

::

    out.idx ──┐   concat, join, relabel,
              ├──▶ where, with_columns ──▶ Index ──▶ write() ──▶ all.idx
    more.idx ─┘                              │              pixels stay where they are
    labels.csv, features.npy                 └───▶ export ──▶ pngs/cat/1.png, pngs/metadata.jsonl
                                                              or a WebDataset

`concat`                the samples of several data sets, one after another
`join`                  arrays of other data sets and NPY files, beside the images
`relabel`               labels and other columns, from a table
`rename`                another name for pixels and index together
`named_lines`           the lines of a table, by the names of samples
`columns`               labels and other columns, from arrays and lists
`matching`              which samples stand for the same picture, by their names
`npy`                   NPY files of other programs
`statistics`            those of several data sets, from those of each
`report`                where an index may be written, and what the user is told
`copying`               samples written anew as one data set
`export`                samples as image files in folders, or in a tar
`writers`               … where the files go
`encoding`              … rows as PNG, JPEG and NPY
`facts`                 … keys, labels and columns as text
`file_names`            … paths for keys, which are not trusted
`cells`                 … the columns of its table
`aside`                 files in a temporary folder, renamed once they are complete
`lock`, `checked_json`  who writes into such a folder
`destination`           the files of a copy: whether they may be written; renaming them
`writer`                rows into shards
`threads`               work whose results come in order
`selected`              some samples of a data set, and their rows
======================  ============================================================================
=======
- index_files.py: indexes come from paths and data sets, and go to new files.
- concat.py: the samples of several data sets, one after another.
- statistics.py: … their statistics.
- columns.py: labels and other columns, from lists and arrays; samples with some values.
- relabel.py: … from a table.
- tables.py: names and columns in CSV, TSV and JSON Lines.
- join.py: further arrays beside the images.
- npy.py: … from NPY files of other programs.
- matching.py: which samples stand for the same picture, by their names.
- export.py: samples as image files in folders, or in a tar.
- file_names.py: … their names. Keys are not trusted.
- copying.py: samples written anew, until a build takes an index.
"""
