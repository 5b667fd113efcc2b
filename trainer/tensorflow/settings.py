"""The settings of a training that TensorFlow's loop cannot honour, by name. Pure: no TensorFlow."""

from __future__ import annotations

from trainer.config import DistributedTrainingConfig

_ONLY = {
    "precision": ("fp32", "set a policy where the model is made: keras.mixed_precision"),
    "compile": ("off", "TensorFlow compiles its graphs itself"),
    "communication": ("allreduce", "TensorFlow sums gradients exactly"),
    "strategy": ("ddp", "each rank of this strategy holds the whole model"),
    "activation_checkpointing": (False, "use keras.RematScope where the model is made"),
    "max_node_seconds": (None, "only trainings of PyTorch have a budget"),
    "profile_steps": (None, "use TensorFlow's own profiler: tf.profiler.experimental"),
}
"""The one value of a setting that can be honoured, and what to do instead of another."""


def explain_settings(config: DistributedTrainingConfig, is_one_host: bool = True) -> str:
    """Return why TensorFlow's loop cannot have these settings, and the remedy; "" if it can."""
    for name, (only, remedy) in _ONLY.items():
        if (given := getattr(config, name)) != only:
            return f"training.{name} = {given!r} is not for TensorFlow: {remedy}, and leave the setting at {only!r}"
    if not is_one_host and (config.tls is not None or config.encryption == "required"):
        given = "training.tls" if config.tls is not None else "training.encryption = 'required'"
        return f"{given}: TensorFlow sends gradients between hosts unencrypted. Encrypt the network, or leave it out"
    return ""
