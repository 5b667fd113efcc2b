"""The serving of pages, this project's and Dagster's: sockets, the guard in front of them, protection of stored
secrets.

A page's content belongs to the package that makes it, such as `dashboard`.
"""
