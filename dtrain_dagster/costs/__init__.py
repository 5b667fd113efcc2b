"""The costs of nodes: prices, exact money, paid time and its causes, estimates. No cluster is asked from here.

What to do about costs (other nodes, a projection, a limit) belongs to `planning`, pictures of them to `reports`.
"""
