"""The assets of the graph and their checks: each asks, decides and records, and leaves the work to the other folders.

What can be said without a Dagster context does not belong here. Values of assets are stored by the path of their class:
a class that an asset returns keeps its module.
"""
