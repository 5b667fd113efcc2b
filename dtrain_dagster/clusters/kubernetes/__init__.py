"""Nodes as pods of a Kubernetes cluster: one Job of one pod per incarnation of a node."""
