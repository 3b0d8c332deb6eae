"""Balance of ranks without drops: ranks with little to do help the experts of busy ranks.

``plan.py`` decides from the counts of all ranks who computes which rows. ``moves.py`` sends the
weights of helped experts to their helpers, and gradients back. ``break_even.py`` says how many rows
pay for that. ``distributed/README.md`` has examples.
"""

from .break_even import break_even_rows, measured_break_even, rows_while_travelling
from .moves import WeightMoves
from .plan import BalancePlan, Move, gather_counts, plan_moves, plan_step
