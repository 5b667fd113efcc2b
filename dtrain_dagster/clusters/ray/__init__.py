"""Nodes as detached actors of a Ray cluster, each of which runs the node agent as a plain process."""
