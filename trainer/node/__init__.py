"""One node of a job: its processes, their environment, marks and logs, and the agent that runs them on a host.

A cluster starts `python -m trainer.node` once per node; the local cluster starts the processes of its nodes itself,
with the same parts. How ranks find each other belongs in `trainer.comm` and `trainer.elastic`.
"""
