"""From files to batches: random access, orders, the Loader and the prefetchers.

The way of a batch, from top to bottom; each step calls the next one only:

    Loader               loader.py     one iteration: where it begins, what it has seen
      │ Pipeline         pipeline.py   once: the feed, its stream, how many batches are in flight
      │ Chunk            epochs.py     which samples each batch holds, for this rank
      │                  samplers.py   in what order: a function of (seed, epoch)
      ▼
    JobMaker.jobs        batches.py    uploads a chunk's columns, begins to read each batch
      │ feed.prepare     ../feeds/     looks up rows
      │ .begin           ../feeds/     asks the disk for rows that are not held
      ▼
    run_ahead            loop.py       takes jobs early, and lets batches be made ahead
      ▼
    SideStream.begin     streams.py    CUDA only: on a stream of its own
      ▼
    Job.make             batches.py    makes a batch
      │ .fetch           ../feeds/     waits for rows; brings them to the device
      │ transform        ../transforms/   whole batches, one draw for each sample
      ▼
    SideStream.hand_over streams.py    CUDA only: the consumer's stream waits for the batch
      ▼
    (images, labels)     batches.py    a named tuple, perhaps in static buffers

Beside it:

- arguments.py: what a Loader takes, and what it says to everything else.
- dataset.py: MemmapDataset, one sample at a time, for torch's DataLoader; which columns are
  handed out.
- concat.py: where its index comes from: a file, or several data sets one after another.
- collate.py: fast_collate, samples to a batch in one copy.
- stats.py: how long the loop has waited for batches.
- prefetch.py: CudaPrefetcher, for any iterable, through loop.py.
- background.py: ThreadPrefetcher, any iterable on a thread.
"""
