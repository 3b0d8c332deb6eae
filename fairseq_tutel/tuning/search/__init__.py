"""Which exchange is fastest, found out while training: a state machine on integers.

No torch, no clock, no communication: whoever uses this gives it times and tables, and gets choices
(see :mod:`fairseq_tutel.tuning.exchange_tuner`).
"""
