"""The planner: parameters, memory, traffic and predicted speed of a run before it starts.

Hydra or fairseq's parser reads the configuration (:mod:`.compose`, :mod:`.settings`). Parameters
are counted on the model itself, on the meta device (:mod:`.parameters`). Memory, work and traffic
are formulas that tests compare with measured runs. Times are predictions from a hardware profile
(:mod:`.planner` combines all). Nothing is imported here, so that the command line refuses a wrong
argument at once.
"""
