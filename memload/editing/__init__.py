"""Data sets made from data sets. Nothing here imports torch.

::

    out.idx ──┐
              ├──▶ concat, join, relabel ──▶ all.idx      a new index; pixels stay where they are
    more.idx ─┘

======================  ============================================================================
`concat`                the samples of several data sets, one after another
`join`                  arrays of other data sets and NPY files, beside the images
`relabel`               labels and other columns, from a table
`columns`               labels and other columns, from arrays and lists
`matching`              which samples stand for the same picture, by their names
`npy`                   NPY files of other programs
`statistics`            those of several data sets, from those of each
`report`                where an index may be written, and what the user is told
======================  ============================================================================
"""
