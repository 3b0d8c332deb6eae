"""Errors, warnings and help in fairseq's programs."""
