"""Keeps the ranks of one launcher from printing the same error each."""

import hashlib
import os

from ....command_line import LAUNCHER


def is_first_to_report(text: str) -> bool:
    """Return whether no other rank of this launcher has printed the same error."""
    folder = os.environ.get(LAUNCHER)
    if not folder:
        return True
    try:
        os.makedirs(folder, exist_ok=True)
        name = hashlib.sha256(text.encode()).hexdigest()
        os.close(os.open(os.path.join(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:  # no room, or a folder that is this node's alone
        return True
    return True
