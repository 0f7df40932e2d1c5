"""From images to files: decode, resize and write. Nothing here imports torch.

A build is a row of shards. A shard is some rows: one file per array, one journal, one lock. The way
of an image, from top to bottom; the middle runs in worker processes::

    build            options: check the arguments, open the source; plan: written once, compared
      │              for each shard of this call
      │                shard: lock it, make its files
    rows               cut its rows into chunks
      │
    pool               hand out chunks of rows; replace a worker that dies or hangs
      │  rows 0 to 32
    rows ────────▶   skip a row that is done already
      │  conversion    its record, with columns and checksums
      │  settings      read it (values) ─▶ decoders, depth ─▶ resizing ─▶ pixels and their sums
      │  extra_arrays  its masks (values) ─▶ resizing; other arrays as they are
      │  shard         pixels and record, each at its own offset, with checksums
      ▼
    shard            seal and flush; 00007.rows becomes 00007.done
      │
    publish          if all shards are done: records ─▶ index; rename all, the index last

::

    out.building/
        plan.json                  what decides on the rows; written by whoever comes first
        out-00007-of-00313.bin     pixels, and likewise the files of masks and other arrays
        00007.rows, 00007.done     a record per row; whoever builds the shard has it locked
        00007.reasons              why rows were rejected
        out.idx, out.rejects.csv   written last; then only renaming is left to do
        replaced.idx               the index of the data set that is being replaced

A name is the state, so nothing in the folder has to reach the disk in order: after an interruption,
a row with a right record and right pixels is done. Nobody waits for anybody. A shard that another
process is at is passed over, and whoever finds all shards done publishes.

The images, the masks and all others are *arrays*. Those beside the images are *extra arrays*.

======================  ============================================================================
`build`                 `build`: the steps above
`options`               its arguments, checked; how the source is opened and converted
`dry_run`               what a build would store, and how long it would take
`plan`                  what decides on the rows: an unfinished build goes on only with the same
`shard`                 some rows: files, journal, lock, done
`record`                what is kept of a row; the values of its columns
`rows`                  what a worker does with a chunk of rows; finished rows compared
`pool`                  worker processes that survive a crash or a hang; single rows looked at
`publish`               records to index and ledger; the renames
`summary`               statistics, notes, frequent reasons, the limit of rejects
`report`                `BuildReport`, what `build` returns
`status`                how far an unfinished build is, for `memload info`
`progress`              a bar, or a line in the log
`first_samples`         the first usable sample, in a worker: columns, shapes, types
`open_files`            files that a data set has open, opened again in each worker
`conversion`            a sample to its rows and its record, or why not
`settings`              what decides on the rows; a sample to its pixels, flags and arrays
`extra_arrays`          its masks, which go where the pixels go, and its other arrays
`values`                the bytes of a file, or why not; masks and arrays as their files have them
`decoders`, `depth`     bytes to an upright picture; pictures with more than 8 bits
`resizing`              a picture to a fixed shape, with masks, points and boxes
======================  ============================================================================
"""
