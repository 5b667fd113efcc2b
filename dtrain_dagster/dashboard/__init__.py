"""The live page of running jobs: the code that reads jobs from run directories, keeps their figures and serves them.

Pictures and reports of jobs that have ended belong to `reports`; HTTP serving in general belongs to `web`.
"""
