"""``python -m controller`` is ``reconcile``."""

from controller.cli import main

main(prog_name="reconcile")
