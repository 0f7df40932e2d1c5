"""The commands: each parses its arguments, calls one function and prints the result.

    build      build
    describe   info, verify, preview
    edit       concat, join, relabel, export
    copy       copy
    doctor     doctor
    values     what is given to options: sizes, names, conditions
    output     what commands print, and how ``--help`` shows them

A command imports what it needs only when it runs, so that ``--help`` is fast.
"""
