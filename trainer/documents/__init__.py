"""Reading documents that others may have written: strict JSON, the types of their fields, names that become paths.

What the documents mean does not belong here: who owns one makes something of it, such as `trainer.rundir`.
"""
