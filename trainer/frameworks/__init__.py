"""A program of a user's own under Horovod, DeepSpeed, Ray Train or TensorFlow, started on the nodes of a job.

Each process of a job has torchrun's variables. ``python -m trainer.frameworks --engine NAME -- COMMAND`` translates
them to those that a framework wants, brings up what it needs beside its ranks, and becomes the command. The program
itself is the user's: nothing of it is imported here, and a framework's modules only where that framework is used.
`Trainer` with one of these as its strategy is no business of this room.
"""
