"""How fast each stage and each feed is on this machine, beside a limit of the same run.

    run ─▶ decoding ─▶ disk ─▶ memory            groups of stages
             └─ all stages of a group in turn, round after round
          medians, shares of limits ─▶ Report ─▶ text(), as_dict(), plot()

A `Stage` is one line of the report, or the limit of another one.

- run.py: `measure` calls all the others.
- setting.py: what is measured on: samples, batches, and the device.
- stages.py: stages, and how they are measured.
- decoding.py: decoding the source files.
- disk.py: reading what is not in RAM, and direct.py: the limit of that.
- memory.py: everything that is in RAM, on its way to the model.
- loading.py: the stages of disk.py and memory.py that iterate over a Loader.
- report.py: the report.
"""

from memload.bench.report import Report, check_plot
from memload.bench.run import measure

__all__ = ["Report", "check_plot", "measure"]
