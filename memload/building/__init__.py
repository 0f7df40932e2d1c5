"""From images to files: decode, resize and write. Nothing here imports torch.

The way of an image, from top to bottom; the middle runs in worker processes::

    builder.build          check the arguments; preparation: open the source
      │                    sole: begin, or go on with what is in out.building
    rows.convert_rows      cut the rows that are not done into chunks
      │
    pool.run               hand out chunks of rows; replace a worker that dies or hangs
      │  rows 0 to 32
    worker.RowWork ──────▶ skip a row that is done already and unchanged
      │  sources             which file or sample a row is: its key and columns
      │  conversion          read it ─▶ decoders ─▶ resizing ─▶ pixels and their sums
      │  extra_arrays        its masks ─▶ stored_values ─▶ resizing; other arrays as they are
      │  writer              pixels ─▶ out.building/out.bin, each row at its own offset
      │  journal             record ─▶ out.building/rows, with checksums of itself and of the pixels
      ▼  how many were converted, and which were rejected
    completion.complete    records ─▶ statistics and index; workspace: flush
      │
    destination.publish    rename the files into place, the index last

After an interruption the workspace is found again, and every row with a right record and right
pixels is done. So nothing has to reach the disk in order, and any number of workers may write.

What is called an array: the images, the masks and all others. `Index.arrays` and
`Workspace.arrays` are all of them. ``extra_arrays`` are those beside the images, and so are
`Source.arrays`, `Record.arrays` and `BuildReport.arrays`. Only the argument ``arrays`` of `build`
leaves masks out, since they have an argument of their own.

======================  ============================================================================
`builder`               `build`: the steps above
`request`               the checked arguments of a build
`preparation`           from the arguments to the source, and how its records are converted
`report`                `BuildReport`, what `build` returns
`checks`                wrong arguments and unusable sources
`sources`               folders, tables, archives, data sets and more as sequences of records
`conversion`            a record to a row: its pixels, flags and sums
`extra_arrays`          its masks, which go where the pixels go, and its other arrays
`stored_values`         the values of masks and arrays as their files have them
`files`                 reads the files of samples, and sees whether they have changed
`decoders`, `resizing`  bytes to a picture; a picture to a fixed shape
`depth`                 pictures with more than 8 bits
`rows`                  converts the rows that are not done, with the worker pool
`target`                which rows these are, and where they go
`pool`                  worker processes that survive a crash or a hang
`worker`                what a worker does with a chunk of rows
`inherited`             files that a data set has open, opened again in each worker
`first_samples`         looks at the first samples of a data set, in a worker
`first_arrays`          shape and type of masks and arrays, from the first usable sample
`writer`                the shards under construction
`journal`               which rows are done, provably
`notes`                 what the report says about enlarged, transparent, deep and missing pictures
`rejects`               how many samples may be rejected, and the most frequent reasons
`progress`              a bar, or a line in the log
`workspace`             the folder ``out.building``, and how it becomes a data set
`sole`                  a build by itself: beginning, going on, taking in changes of the source
`parts`                 a build that several machines share
`completion`            what follows once all rows are converted: index, notes and report
`plans`                 what decides on the rows: an unfinished build goes on only with the same
`lock`                  keeps two builds of one output apart
`pillow_warnings`       ignored while a build runs
`checked_json`          JSON of the temporary folder, which may be damaged
`file_systems`          refuses object storage, and warns of locks that other machines do not see
`system_errors`         what to do when a call of the system fails
`status`                how far an unfinished build is, for `memload info`
`destination`           publishing: the finished files are renamed into place, the index last
`statistics`            mean, standard deviation and sizes
======================  ============================================================================
"""
