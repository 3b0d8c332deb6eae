"""What only a GPU can show."""

from contextlib import contextmanager

import torch


@contextmanager
def no_waiting():
    """Within, whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
