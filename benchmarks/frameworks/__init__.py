"""The frameworks that train side by side in `benchmarks.throughput`: ours, the bound, and others with the same step.

`protocol` lets a rank work only in its turn, `framework_process` starts the processes and gives the turns, `rounds`
decides the order, `workload` has the parts that all share, and `serve` is one rank; each of the other modules is the
loop of one framework. Conclusions from the measurements belong to `benchmarks.throughput`.
"""
