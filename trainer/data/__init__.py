"""The dataset as a node reads it: manifest, verified shards, the samples of each step, and the proof of their use.

How a dataset is made does not belong here: the orchestrator writes it, and a node only reads it.
"""
