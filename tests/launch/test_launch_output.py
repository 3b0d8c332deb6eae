"""What the launcher shows of the ranks above 0."""

import io
import threading

import pytest

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


@pytest.mark.parametrize("without_info, shown", [(True, KEPT), (False, (INFO, HYDRA, *KEPT))])
def test_what_rank_0_says_as_well_is_left_out(without_info, shown):
    job = RankJob(1, [], {}, RankBinding(1, None, None, None, 1), "[rank 1] ", without_info)
    target = io.BytesIO()
    _copy_lines(io.BytesIO(b"".join((INFO, HYDRA, *KEPT))), target, job, threading.Lock())
    assert target.getvalue() == b"".join(b"[rank 1] " + line for line in shown)
