"""``python -m memload`` runs the ``memload`` command."""

from memload.cli import main

main(prog_name="memload")
