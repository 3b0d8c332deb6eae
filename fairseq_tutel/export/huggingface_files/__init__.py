"""Python files that are copied to an exported folder, beside its weights.

They import torch and transformers alone. This package imports ``layers_fairseq_moe`` alone.
"""
