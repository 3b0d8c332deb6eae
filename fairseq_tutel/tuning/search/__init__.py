"""Search for the fastest exchange while training: a state machine on integers.

It has no torch, no clock and no communication. The caller passes times and tables in, and gets
choices (see :mod:`fairseq_tutel.tuning.exchange_tuner`).
"""
