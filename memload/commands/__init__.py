"""The commands: each parses its arguments, calls one function and prints the result.

    build      build
    describe   info, verify, preview
    edit       concat, join, relabel, export
    copy       copy
    doctor     doctor
    values     what is given to options: sizes, names, conditions
    output     what commands print

A command imports what it needs only when it runs, so that ``--help`` is fast. The first sentence of
its docstring is its line in ``memload --help``.
"""
