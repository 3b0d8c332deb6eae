"""Tutel-style mixture of experts as a plugin for stock fairseq (--user-dir fairseq_tutel)."""
