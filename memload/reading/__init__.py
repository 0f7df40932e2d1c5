"""From files to batches: random access, orders, the Loader and the prefetchers."""
