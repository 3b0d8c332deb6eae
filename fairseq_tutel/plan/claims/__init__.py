"""``python -m fairseq_tutel.plan claims``: every published claim about Tutel, recomputed.

A claim is one row of :data:`.rows.CLAIMS`. The planner predicts it for the published machine
(:mod:`.predictions`), a result file has it measured (``measured.json``), or a test shows it. The
verdict follows from these. Nothing is fitted to a claim::

    rows.py  -->  predictions.py  -->  the planner, configs/hardware
       |--------> measured.json   -->  scripts/bench/results (a test compares them)
       v
    report.py     the table, and one claim in detail
    figures.py    lines over GPUs, sizes and tokens (the room picture draws them)
    program.py    arguments; calls both
"""

from .program import describe_claims

__all__ = ["describe_claims"]
