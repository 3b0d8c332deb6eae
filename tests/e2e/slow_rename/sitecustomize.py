"""Put on PYTHONPATH by a test: makes each rename of a file take long enough to be killed in."""

import os
import time

_replace = os.replace


def _slow_replace(*args, **kwargs):
    time.sleep(0.25)
    return _replace(*args, **kwargs)


os.replace = _slow_replace
