"""The one job that does a training which is wanted: its order, how it is found or started, followed, and read.

Which nodes it gets belongs to `clusters`; what is done with its model, to `registry`.
"""
