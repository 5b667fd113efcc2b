"""A model's own code in a process with limits, without secrets.

What is asked of the model there does not belong here: callers pass the questions and get the answers.
"""
