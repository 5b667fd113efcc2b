"""`dtrain train --script`: a caller's own script on three nodes of this machine, of which one is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dtrain_dagster.jobs.script_job import explain_end
from trainer.data.coverage import find_coverage_errors

ROOT = Path(__file__).parents[3]
DTRAIN = "from dtrain_dagster.cli.main import main; main()"
SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from trainer import DistributedConfig, Trainer

class Points(Dataset):
    def __init__(self):
        self.inputs = torch.randn(150, 2, generator=torch.Generator().manual_seed(0))
    def __len__(self):
        return len(self.inputs)
    def __getitem__(self, position):
        shaken = self.inputs[position] + 0.1 * torch.randn(2)
        return shaken, (self.inputs[position, 0] > 0).long()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
config = DistributedConfig(world_size=3, gradient_accumulation_steps=2, epochs=int(sys.argv[1]), log_frequency=1,
                           checkpoint_frequency=2)
Trainer(model, config).fit(DataLoader(Points(), batch_size=10, num_workers=1), Points())
"""


def run(folder: Path, *command: str, **environment: str) -> str:
    (folder / "points.py").write_text(SCRIPT)
    given = {**os.environ, "PYTHONPATH": str(ROOT), "DTRAIN_HOME": str(folder / "home"), **environment}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=given, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def outcome(run_dir: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((run_dir / "result.json").read_text()), torch.load(run_dir / "model" / "weights.pt")


@pytest.mark.slow
@pytest.mark.long
def test_a_node_of_a_script_is_killed_and_nothing_changes(tmp_path: Path) -> None:
    fault = json.dumps([{"kind": "kill", "at": "backward", "step": 4, "node": 1}])
    run(tmp_path, "-c", DTRAIN, "train", "--script", "points.py", "--nodes", "3", "--name", "points",
        "--", "3", DTRAIN_FAULTS=fault)  # fmt: skip
    run(tmp_path, "points.py", "3")
    result, weights = outcome(tmp_path / "home/storage/jobs/points")
    [alone] = (tmp_path / "runs").iterdir()
    expected, undisturbed = outcome(alone)
    assert result["consumed"] == expected["consumed"]
    assert find_coverage_errors(result["consumed"], 150, 3) == []
    for name, tensor in undisturbed.items():
        assert torch.allclose(weights[name], tensor, atol=1e-5), name
    events = [
        json.loads(line) for path in (tmp_path / "home/storage/jobs/points/events").iterdir() for line in path.open()
    ]
    assert [1] in [event["lost"] for event in events if event["kind"] == "membership"]


def test_why_a_script_ended_is_one_line() -> None:
    trace = 'Traceback (most recent call last):\n  File "/home/me/a.py", line 7, in <module>\n    read()\n'
    deeper = f"  File \"{torch.__file__}\", line 9, in load\nKeyError: 'x'\n"
    assert explain_end(1, trace + deeper).endswith("KeyError: 'x' (/home/me/a.py, line 7)")
    refused = f"{trace}trainer.errors.ConfigError: training.a is not a setting\ntraining.b = 0: it should be more\n"
    told = "training.a is not a setting; training.b = 0: it should be more (/home/me/a.py, line 7)"
    assert explain_end(1, refused) == told
    assert "without calling Trainer" in explain_end(0, "a warning")
    assert explain_end(3, "") == "it ended with exit code 3 before it trained, and printed nothing"
