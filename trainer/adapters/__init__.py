"""`trainer.fit.Trainer` by the names of other frameworks: `PyTorchDDPTrainer`, `HorovodTrainer`, `RayTrainer` and
`TensorFlowDistributedTrainer`.

An adapter translates what it is given, and starts the ranks where its framework does that. What a strategy does within
the loop is in `trainer.parallel`.
"""
