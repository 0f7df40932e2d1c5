"""What bounds the training of a model here, and what to do about it.

::

    machine_checks, dataset_check ──▶ Check ─────────────────────┐
                                                                 ├──▶ Diagnosis
    LoaderMeasurer ──▶ Stage (a line of the table) ──────────────┤    str(), as_dict()
                 └───▶ BatchTimes ──▶ judge ──▶ Verdict ─────────┘

- checks: the machine, its libraries, and the files of a data set.
- stages: what is measured. A stage does its work piece by piece, and all are timed in one way.
- verdict: milliseconds in, sentences out.
- diagnosis: `diagnose`, for a Loader of yours, and `examine`, which is ``memload doctor``.
"""
