"""What bounds the training of a model here, and what to do about it.

    machine_checks ─┐
    data_checks ────┴─▶ Check ──────────────────────────────────┐
    loader_times ─┐                                             ├─▶ Diagnosis ─▶ str(), as_dict()
    worker_times ─┴─▶ Measurements ─▶ Times ─▶ judge ─▶ Verdict ┘

- examination.py: what the command does.
- diagnosis.py: `diagnose`, for a loader of the user's.
- checks.py: what a check is.
- machine_checks.py: cores, memory, libraries and the GPU. Does without torch if that is broken.
- data_checks.py: the data set, its files, and which feeds can serve it.
- measurements.py: stages of `memload.bench`, one after another, until their time is over.
- loader_times.py: how long a batch of a Loader takes, and its parts.
- worker_times.py: the same of a DataLoader.
- disk.py: what both of them take from the disk.
- judging.py: numbers in, sentences out.
- report.py: what was found, as text and as JSON.
"""
