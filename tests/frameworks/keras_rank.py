"""One rank that trains the stock model's Keras twin: ``python -m tests.frameworks.keras_rank RUN_DIR SETTINGS``."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.frameworks.keras_twin import copy_weights, stock_twin, student_t
from tests.frameworks.small_windows import FIGURES, MARKET, QUIET, SETTINGS, stock_model, windows
from trainer import DistributedConfig, TensorFlowDistributedTrainer


def main() -> None:
    run_dir, settings = sys.argv[1], json.loads(sys.argv[2])
    dropout = settings.pop("dropout", 0.0)

    def make_model() -> Any:
        twin = stock_twin(MARKET.spec, dropout=dropout)
        copy_weights(stock_model(dropout), twin)
        return twin

    config = DistributedConfig(**{**SETTINGS, **settings})
    trainer = TensorFlowDistributedTrainer(
        make_model, config, loss=student_t(MARKET.spec), run_dir=run_dir, tracking=QUIET
    )
    result = trainer.fit(*(windows(split) for split in FIGURES))
    print(json.dumps({"steps": result.steps, "test": dict(result.test)}))


if __name__ == "__main__":
    main()
