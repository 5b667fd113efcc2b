"""What nodes cost: prices, exact money, paid time, where it went, what is expected. No cluster is asked from here.

What to do about costs (other nodes, a projection, a limit) belongs to `planning`, pictures of them to `reports`.
"""
