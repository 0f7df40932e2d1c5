"""What to do when a call of the system fails during a build."""

import errno
from pathlib import Path

from memload.errors import BuildError


def system_error(output: Path, error: OSError) -> BuildError:
    """Return the error for a call of the system that failed: a lack of something, or writing."""
    goes_on = "then run the same command again: it goes on where it stopped."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        text = f"too many files are open ({error}). Raise that limit (ulimit -n), {goes_on}"
    elif error.errno in (errno.EAGAIN, errno.ENOMEM):
        text = f"the system has no memory or processes left ({error}). Free some, {goes_on}"
    else:
        text = f"cannot be written: {error}. Make room or mend that, {goes_on}"
    return BuildError(f"{output}: {text}", path=output)
