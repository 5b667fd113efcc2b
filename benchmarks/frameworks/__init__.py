"""The frameworks that train side by side in `benchmarks.throughput`: ours, the bound, and others with the same step.

`protocol` lets ranks work only when they are told to, `framework_process` starts and tells them, `rounds` decides who
works when, `workload` is what all have in common, and `serve` is one rank; each of the other modules is the loop of one
framework. What is concluded from the measurements belongs to `benchmarks.throughput`.
"""
