"""A folder for the PYTHONPATH of ranks: Python imports ``sitecustomize`` before their program."""
