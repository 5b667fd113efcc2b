"""Training of Keras models by TensorFlow's strategies, in a run directory as any other.

A loop of its own belongs here, with its model, its optimizer and its way to sum over ranks, which TensorFlow's
`MultiWorkerMirroredStrategy` does. Data, the order of samples, the learning rate, checkpoints and events are those of
the loop for PyTorch. TensorFlow is imported by `replica` alone.
"""
