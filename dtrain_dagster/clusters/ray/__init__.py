"""Ray: nodes of a training as detached actors of a cluster, each of which runs the node agent as a plain process.

What every engine has in common belongs in `dtrain_dagster.clusters.supervision`.
"""

ACTOR = "DtrainNode"
"""The class of nodes in Ray's lists."""
