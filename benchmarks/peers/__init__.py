"""Those who train side by side in `benchmarks.throughput`: ours, the bound, and what others make of the same step.

`turns` lets ranks work only when they are told to, `contestant` starts and tells them, `parts` is what all have in
common; each of the other modules is one way to train.
"""
