"""Data sets made from data sets. Nothing here imports torch.

::

    out.idx ──┐
              ├──▶ concat, join, relabel ──▶ all.idx      a new index; pixels stay where they are
    more.idx ─┘

    out.bin, out.idx ──▶ rename ──▶ photos.bin, photos.idx                     the same files

======================  ============================================================================
`concat`                the samples of several data sets, one after another
`join`                  arrays of other data sets and NPY files, beside the images
`relabel`               labels and other columns, from a table or from arrays
`rename`                another name for pixels and index together
======================  ============================================================================
"""
