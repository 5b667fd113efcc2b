"""An example of your own model and loss, in two files.

Name them in ``job.json``, or in the launchpad of ``cost_estimate``::

    "model": {"factory": "examples.own_model.model:make_model", "args": {"hidden": 32}}
    "loss":  {"factory": "examples.own_model.loss:make_loss", "args": {"nu": 5.0}}

The folder that holds ``examples`` must be on the Python path of the nodes; the folder in which a job is started is.
The setting ``DTRAIN_FACTORY_MODULES=examples.own_model`` must allow the module (docs/own-model-and-data.md).

The contract:

- ``make_model(spec, outputs, **args)`` returns a ``torch.nn.Module`` that maps standardised windows
  ``(batch, spec.window, len(spec.features))``, float32, to ``(batch, outputs)``;
- ``make_loss(spec, **args)`` returns a module with ``outputs: int`` and ``forward(outputs, target) -> (batch,)``, one
  loss per sample, not reduced. With ``predictive(outputs) -> trainer.losses.Predictive`` it is judged as a
  distribution against the baselines; with ``point(outputs) -> (batch,)`` as a point forecast; both in the unit of the
  target;
- ``args`` are the keyword arguments of the functions; an argument that they do not take is refused by name, and a
  wrong shape is refused before training starts.
"""
