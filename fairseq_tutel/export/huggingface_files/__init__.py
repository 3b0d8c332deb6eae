"""What an exported folder holds beside its weights: files of transformers' own form, copied.

Nothing here is imported by this package, and nothing in it imports this package or fairseq.
"""
