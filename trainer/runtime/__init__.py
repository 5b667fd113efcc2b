"""What a process has of its machine: cores, memory, clocks, temporary folders; and faults that tests inject into it.

What knows of a model, a world or a job does not belong here.
"""
