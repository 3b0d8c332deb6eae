"""``python -m fairseq_tutel.picture``."""

from ..command_line import run_and_exit
from . import main

if __name__ == "__main__":
    run_and_exit(main)
