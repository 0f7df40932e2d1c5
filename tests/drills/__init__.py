"""Fault drills: what happens when something is killed, filled up, damaged or altered at a random moment.

``python -m tests.drills`` takes half a minute, with ``--long`` some minutes: a hundred kills, and so on. A line for
each drill says what was done and what came of it; ``--seed`` chooses the moments. Exit status 1 if any fails.
"""
