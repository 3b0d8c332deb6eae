"""What the launcher shows of the ranks above 0."""

import io
import threading

from fairseq_tutel.launch.binding import RankBinding
from fairseq_tutel.launch.supervise import RankJob, _copy_lines

INFO = b"2026-01-02 03:04:05 | INFO | fairseq.distributed.utils | initialized host a as rank 1\n"
HYDRA = b"[2026-01-02 03:04:05,678][fairseq.distributed.utils][INFO] - initialized host a\n"
KEPT = (
    INFO.replace(b"INFO", b"WARNING"),
    HYDRA.replace(b"INFO", b"ERROR"),
    b"Traceback (most recent call last):\n",
    b"a user's | INFO | of something\n",
    b"\xff\xfe no text",
)


# of a rank that Ctrl-C meets while it waits for rank 0
STORE = (
    b"[W1122 00:29:22.9369 TCPStore.cpp:340] [c10d] TCP client failed to connect to host a:1\n",
    b"Exception raised from delay at /pytorch/socket.cpp:113 (most recent call first):\n",
    b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f6e in libc10.so)\n",
    b"<omitting python frames>\n",
    b"\n",
)


def shown(lines, without_info=False, stopping=False):
    job = RankJob(1, [], {}, RankBinding(1, None, None, None, 1), "[rank 1] ", without_info)
    target = io.BytesIO()
    _copy_lines(io.BytesIO(b"".join(lines)), target, job, threading.Lock(), lambda: stopping)
    return target.getvalue()


def prefixed(lines):
    return b"".join(b"[rank 1] " + line for line in lines)


def test_what_rank_0_says_as_well_is_left_out():
    assert shown((INFO, HYDRA, *KEPT)) == prefixed((INFO, HYDRA, *KEPT))
    assert shown((INFO, HYDRA, *KEPT), without_info=True) == prefixed(KEPT)


def test_a_job_that_is_asked_to_stop_prints_no_frames():
    assert shown((*STORE, *KEPT)) == prefixed((*STORE, *KEPT))
    assert shown((*STORE, *KEPT), stopping=True) == prefixed(KEPT)
