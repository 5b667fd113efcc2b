"""The one job that carries out a wanted training: its order, how it is found or started, followed, and read.

The choice of its nodes belongs in `clusters`; the use of its model, in `registry`.
"""
