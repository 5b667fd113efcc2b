"""A process's access to its machine: cores, memory, clocks, temporary folders; and faults that tests inject into it.

Code that knows of a model, a world or a job does not belong here.
"""
