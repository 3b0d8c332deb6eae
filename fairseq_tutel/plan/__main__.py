"""``python -m fairseq_tutel.plan``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
