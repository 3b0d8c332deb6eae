"""The planner: what a training run needs and does, before a GPU is asked for.

Hydra or fairseq's parser reads the configuration (:mod:`.compose`, :mod:`.settings`), parameters
are counted on the model itself, on the meta device (:mod:`.parameters`). Memory, work and traffic
are formulas, proven against measured runs; times come from a hardware profile and are predictions
(:mod:`.planner` puts them together). Nothing is imported here, so that the command line answers a
wrong word at once.
"""
