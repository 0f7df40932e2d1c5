"""What bounds the training of a model here, and what to do about it.

    machine_checks, data_checks ─▶ Check ──────────────────────────┐
                                                                   ├─▶ Diagnosis ─▶ str(), as_dict()
    loader_measurer, or      ┌─▶ Measured (a line of the table) ─▶ │
    dataloader_measurer ─────┴─▶ Times ─▶ judge ─▶ Verdict ────────┘

- examination.py: what the command does.
- diagnosis.py: `diagnose`, for a loader of the user's.
- checks.py: what a check is.
- machine_checks.py: cores, memory, libraries and the GPU. Does without torch if that is broken.
- data_checks.py: the data set, its files, and which feeds can serve it.
- measurements.py: runs stages of `memload.bench`, one after another, until their time is over.
- loader_measurer.py: how long a batch of a Loader takes, and its parts.
- dataloader_measurer.py: the same of torch's DataLoader.
- file_systems.py: which file system a folder is on.
- disk.py: what both of them take from the disk.
- times.py: what was measured, as numbers.
- judging.py: these numbers in, sentences out.
- report.py: what was found, as text and as JSON.
"""
