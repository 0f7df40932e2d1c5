"""From files to batches: random access, orders, the Loader and the prefetchers.

The way of a batch, from top to bottom; each step calls the next one only:

    Loader                      loader.py     one iteration: where it begins, what it has seen
      │ pipeline                pipeline.py   once: the feed, its stream, how many are in flight
      │ chunks of sample numbers
      │                         epochs.py     which samples each batch holds, for this rank
      │                         samplers.py   in what order: a function of (seed, epoch)
      ▼ reads: one for each batch
    ahead                       ahead.py      begins them many batches early, in order
      │ begin                   ../feeds/        asks the disk for rows that are not in RAM
      ▼ jobs: one for each batch
    ahead                       ahead.py      begins them a few batches early, perhaps on threads
      ▼
    SideStream.begin            streams.py    CUDA only: on a stream of its own
      ▼
    make_batch                  batches.py    prepared once a chunk, called once a batch
      │ fetch                   ../feeds/        waits for rows; rows and columns to the device
      │ transform               ../transforms/   whole batches, one draw a sample
      ▼
    SideStream.hand_over        streams.py    CUDA only: the consumer's stream waits for the batch
      ▼
    (images, labels)            batches.py    a named tuple, perhaps in static buffers

Beside it:

    arguments.py  what a Loader takes, and what it says to everything else
    columns.py    which columns and arrays are handed out
    dataset.py    MemmapDataset: one sample at a time, for torch's DataLoader
    origin.py     where its index comes from: a file, or several data sets one after another
    collate.py    fast_collate: samples to a batch, in one copy
    stats.py      how long the loop has waited for batches
    dropped.py    says that fast_collate has dropped samples
    prefetch.py   CudaPrefetcher, ThreadPrefetcher, background: any iterable, through ahead.py
"""
