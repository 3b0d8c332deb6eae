"""``python -m fairseq_tutel.launch``."""

import sys

from fairseq_tutel.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
