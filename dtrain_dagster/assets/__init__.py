"""The assets of the graph and their checks. Each asks, decides and records, and leaves the work to the other packages.

Code that needs no Dagster context does not belong here. Values of assets are stored by the path of their class: a class
that an asset returns keeps its module.
"""
