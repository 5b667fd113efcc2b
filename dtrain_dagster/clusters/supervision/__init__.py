"""The process that watches a job and outlives its submitter, whatever places the job's nodes.

`supervisor` asks `clusters.exit_policy` what follows when nodes end, and a `placer.Placer` to do it. Local processes
and the jobs of an engine (SLURM, Kubernetes, Ray: `agent_placer`) are placers; what is special to each is in its own
room.
"""
