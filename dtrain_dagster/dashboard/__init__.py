"""The live page of running jobs: how they are read from run directories, kept, and served.

Pictures and reports of jobs that have ended belong to `reports`; how HTTP is served at all, to `web`.
"""
