"""The planner: parameters, memory, traffic and predicted speed of a run before it starts.

Nothing is imported here, so that the command line refuses a wrong argument at once.
"""
