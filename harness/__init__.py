"""Programs that stand in for the outside world, or wrap it, for tests and benchmarks alike.

An emulated Azure, real engines on one machine, hosts as network namespaces, tapes of faults that strike nodes and
links, and the small trainings that all of them run (`worlds`, `elastic_nodes`, `small_job`, `clinic`). No tests and no
measurements belong here: `tests` prove, `benchmarks` measure, and this package imports neither of them.
"""
