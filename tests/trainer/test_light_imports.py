"""What has to start quickly, or on a machine without it, does not import what is heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ",".join(
    f"trainer.frameworks.{name}" for name in ("__main__", "horovod", "ray", "deepspeed", "tensorflow")
)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("trainer.evaluation.gate", {"torch"}),
        ("trainer.performance.memory", {"torch"}),
        ("trainer.runtime.retry", {"tenacity"}),
        ("trainer.observability.reporter", {"mlflow", "torch", "tensorboard"}),
        (FRAMEWORKS, {"torch", "numpy", "pandas", "ray", "tensorflow"}),
    ],
)
def test_nothing_heavy_is_imported(modules: str, heavy: set[str]) -> None:
    program = f"import sys, {modules}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
