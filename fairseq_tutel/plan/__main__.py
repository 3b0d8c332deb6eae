"""``python -m fairseq_tutel.plan``."""

from ..command_line import run_and_exit
from .cli import main

if __name__ == "__main__":
    run_and_exit(main)
