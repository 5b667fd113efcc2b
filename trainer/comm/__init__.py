"""Communication of the ranks of one world: the launcher's facts, rendezvous, proof of identity, and collectives.

The membership of a world whose nodes come and go belongs in `trainer.elastic`, on which nothing here depends. Which
tensors are summed, and when, belongs in `trainer.parallel`.
"""
