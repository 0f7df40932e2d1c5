"""Runs programs in forks of this process, which has imported what they need: ``prepared_python.py MODULE…``.

To import torch and a trainer takes longer than what the tests do with them. Each line of the input is a list of
programs that run together, each as [arguments, environment, folder, name of the file for its stdout and stderr].
The answer is the exit code of the first that failed, or 0.
"""

import importlib
import json
import os
import signal
import sys


def become(arguments, environment, folder, printed):
    """Take over what a process of its own would have been given."""
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv[:] = arguments
    sys.path[0] = os.path.dirname(arguments[0])  # noqa: PTH120
    for descriptor, ending in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(printed + ending, os.O_WRONLY | os.O_CREAT), descriptor)


for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    running, status = set(), 0
    for program in json.loads(line):
        child = os.fork()
        if child == 0:
            become(*program)
            with open(sys.argv[0]) as file:  # noqa: PTH123
                exec(compile(file.read(), file.name, "exec"))
            sys.exit()
        running.add(child)
    while running:
        child, ended = os.wait()
        running.remove(child)
        if ended and not status:  # the others would wait for it
            status = ended
            for other in running:
                os.kill(other, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(status), flush=True)
