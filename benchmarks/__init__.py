"""What memload is measured with, for those who work on it. Users have `memload doctor`.

    python -m benchmarks.loading feeds --quick --dry-run    # one benchmark; --help has its options
    python -m benchmarks.ab ../old loading feeds            # the same for two checkouts, in turn
    python benchmarks/figures.py                            # the pages, once a line was added

    loading, compare, training, accuracy, cifar10, timeline, cold, transforms, build
        |  ways: functions that measure once, by name
        v
    harness        takes all ways in turn, in rounds  --->  results/NAME.jsonl, a line a run
                                                                |
    figures        README.md, docs/, RESULTS.md  <--------------+

Run them from the root of a checkout: that memload is measured.
"""
