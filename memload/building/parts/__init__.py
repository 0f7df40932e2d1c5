"""Builds that several machines share: each shard is built by one of them.

::

    part 0 of 2 (machine A)          part 1 of 2 (machine B)
    joining.join                     joining.join       the first makes the list of the source
      │                                │
    shards 0, 2, 4 …                 shards 1, 3, 5 …   each with a lock and a journal of its own
      │                                │
    "part 1 is not done"             publish            who ends last joins the journals

All that they know of each other is in the folder on the disk that they share::

    out.building/
        lock              shared by all that are at work; held alone to begin and to publish
        plan.json         the settings, and how the source was opened, on which machine
        source            the opened source, so that it is listed only once
        keys              the names of its samples
        shards/00007/     the journal and the lock of a shard: lock, rows, rejects.jsonl, and begun:
                          when its holder began, and how many rows were finished then
        done/00007        a shard is complete on the disk; who built it, and how long that took
        done/00007.again  that shard is to be built again, by whichever part comes first
        source-*.pickle   a data set of the user's, for the tasks of an executor
        out-00007-of-00313.bin    a shard; only the holder of its lock writes to it

One file has one writing machine at a time, because clients of NFS write whole pages. Any number of
parts may end at any moment. A shard that is not done is taken up where its journal ends.

==================  ================================================================================
`build`             `build_in_parts`: join, build the shards of a part, publish
`joining`           opens the build that another part has begun, or begins it
`published`         whether the data set is complete already
`workspace`         the folder above: the state of each shard, and all journals as one
`listing`           the opened source as a file that is safe to read
`samples`           notices a machine that sees another source
`executors`         one task for each shard, on any `concurrent.futures.Executor`
`environment`       which part a process is, from the variables of Slurm, torchrun or Kubernetes
`status`            how far all shards are, for `memload info`
==================  ================================================================================
"""
