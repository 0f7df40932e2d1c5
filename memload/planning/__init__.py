"""What a build will take and give, before it is begun: ``memload plan``.

    source ─▶ sampling    200 of its records, at random
                 ▼
              measuring   the workers of a build convert them: seconds a record, and rejects
              disk        a file in the folder of the output: what the disk writes and reads
              gathering   threads copy rows: what the CPU brings
                 ▼
              duration    of the build
              serving     the feed that will read the data set, and what it will wait for
                 ▼
              report      what is printed

`predict` in ``prediction`` takes these steps.

The sample is listed, looked at, decoded, stored and indexed by the code of ``memload.building``, so
that decoders, fits and rejects count as they do in a build.
"""

from memload.planning.prediction import Machine, predict
from memload.planning.report import Plan

__all__ = ["Machine", "Plan", "predict"]
