"""How the ranks of one world reach each other: the launcher's facts, rendezvous, proof of identity, and collectives.

Who is in a world when nodes come and go does not belong here, see `trainer.elastic`, on which nothing here depends;
neither does what is summed, and when, see `trainer.parallel`.
"""
