"""The dashboard, and the commands beside it, with a training on each engine: they show what its nodes say, and what is
asked for there happens on the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests

from harness.engines.machines import Machines, Pods, missing, open_machines, variables
from harness.small_job import write_dataset
from tests.e2e.conftest import ROOT, Project, dashboard_of, make_project, wait_for
from trainer.rundir import LAUNCH, STATUS, RunDir

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1500)]
STEPS = 300
BRAKED = """
import time
from pathlib import Path

from torch import nn

from trainer.model.stock import tcn as stock_tcn


class Braked(nn.Module):
    def __init__(self, body, brake):
        super().__init__()
        self.body, self.brake = body, Path(brake)

    def forward(self, windows):
        if self.training and self.brake.exists():
            time.sleep(0.5)
        return self.body(windows)


def tcn(spec, outputs, brake):
    return Braked(stock_tcn(spec, outputs, 16, 0.1), brake)
"""
"""A model of a user's own that trains slowly for as long as a file is there."""


class Desk:
    """A job as a person deals with it: at its page, and in a shell."""

    def __init__(self, project: Project, machines: Machines, job_id: str) -> None:
        self.project, self.machines, self.job_id = project, machines, job_id
        self.brake = project.home / "brake"
        self.url = ""
        """The address of its page, once the dashboard is started."""
        self.rundir = RunDir(str(project.jobs / job_id))

    def shell(self, *words: str) -> str:
        done = self.project.cli(*words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def shown(self, part: str, **asked: str) -> Any:
        """What the page asks for."""
        answer = requests.get(f"{self.url}{part}", params=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def give(self, order: str) -> None:
        """Press a button of the page, and wait until its command has ended well."""
        given = requests.post(f"{self.url}/orders", json={"order": order}, timeout=60)
        assert given.status_code == 202, given.text
        last = wait_for(lambda: self._ended(), 120, f"the end of {order}")
        assert (last["order"], last["code"]) == (order, 0), last

    def _ended(self) -> Any:
        last = self.shown("/orders.json")["last"]
        return last if last["code"] is not None else None

    def step(self) -> int:
        return max((event["step"] for event in self.rundir.events("step")), default=0)

    def wait_for_steps(self, launch: int) -> None:
        """Wait until this launch trains."""
        begun = self.step()
        wait_for(lambda: self.step() > begun + 5, 200, f"steps of launch {launch}")
        assert self.launch()["launch"] == launch

    def launch(self) -> dict[str, Any]:
        return self.rundir.read_json(LAUNCH) or {}

    def state(self) -> str:
        return str((self.rundir.read_json(STATUS) or {}).get("state"))

    def assert_runs(self) -> None:
        """The engine runs both nodes, and everybody says so."""
        assert [job.state for job in self.machines.jobs(self.launch())].count("running") == 2
        assert self.shown(".json")["job"]["state"] == "running"
        told = json.loads(self.shell("dtrain", "status", self.job_id, "--json"))
        assert told["state"] == "running"
        assert "running" in self.shell("dtrain", "status", self.job_id)

    def assert_is_cancelled(self) -> None:
        """Nothing of it is left on the engine, it has a checkpoint, and everybody says so."""
        assert all(job.state == "ended" for job in self.machines.jobs(self.launch()))
        assert self.rundir.latest_checkpoint() is not None
        assert {node.exit_codes for node in self.rundir.nodes() if node.launch == self.launch()["launch"]} == {(143,)}
        assert self.state() == "cancelled"
        wait_for(lambda: self.shown(".json")["job"]["state"] == "cancelled", 30, "the page to say so")
        assert json.loads(self.shell("dtrain", "status", self.job_id, "--json"))["state"] == "cancelled"


@contextmanager
def desk_of(kind: str, folder: Path, python: str = "") -> Iterator[Desk]:
    """A home with a training of two nodes on an engine, and the dashboard of it. ``python``: a script in place of the
    interpreter in the image of Kubernetes' nodes."""
    if why := missing(kind):
        pytest.skip(why)
    with open_machines(kind) as machines:
        given = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SLURM_CONF") if name in os.environ}
        modules = folder / "modules"
        modules.mkdir()
        (modules / "braked.py").write_text(BRAKED)
        options = machines.options(folder)
        if isinstance(machines, Pods):
            image = Path(options["python"])  # has a user's own modules as well
            image.write_text(python or image.read_text().replace("PYTHONPATH=", f"PYTHONPATH={modules}:"))
        project = make_project(
            folder / "home",
            **variables(kind, options),
            **given,
            DTRAIN_CLUSTER=kind,
            DTRAIN_CLUSTER_NAME="engine",
            DTRAIN_FACTORY_MODULES="braked",
            DTRAIN_STOP_GRACE_SECONDS="60",  # a busy machine needs more than the usual ones to save a checkpoint
            PYTHONPATH=f"{ROOT}{os.pathsep}{modules}",
        )
        desk = Desk(project, machines, "one")
        desk.brake.touch()
        desk.shell(
            *("dtrain", "train", "--dataset", str(write_dataset(folder / "dataset")), "--nodes", "2", "--name", "one"),
            *("--epochs", "1000", "--set", f"training.max_steps={STEPS}", "--set", "training.log_frequency=1"),
            *("--model", "braked:tcn", "--set", f"model.args={json.dumps({'brake': str(desk.brake)})}", "--detach"),
        )
        try:
            with dashboard_of(project) as url:
                desk.url = f"{url.rstrip('/')}/jobs/one"
                yield desk
        finally:
            project.cli("dtrain", "cancel", "one")
            for process in project.processes():
                process.kill()


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "ray"])
def test_what_the_page_and_the_shell_ask_for_happens_on_the_engine(kind: str, tmp_path: Path) -> None:
    with desk_of(kind, tmp_path) as desk:
        desk.wait_for_steps(launch=1)
        desk.assert_runs()
        assert_logs_are_shown(desk)

        desk.give("cancel")
        desk.assert_is_cancelled()
        desk.give("resume")
        desk.wait_for_steps(launch=2)
        desk.assert_runs()

        assert "cancelled" in desk.shell("dtrain", "cancel", "one")
        desk.assert_is_cancelled()
        desk.give("resume")
        desk.brake.unlink()
        wait_for(lambda: desk.state() not in ("queued", "running"), 300, "the end of the training")
        assert desk.state() == "succeeded", desk.rundir.read_json(STATUS)
        assert desk.launch()["launch"] == 3
        result = desk.rundir.read_result()
        assert result is not None
        assert (result["status"], result["steps"]) == ("succeeded", STEPS)
        steps = [event["step"] for event in desk.rundir.events("step")]
        assert sorted(steps) == list(range(1, STEPS + 1)), "each launch went on where the one before it ended"
        assert all(job.state == "ended" for job in desk.machines.jobs(desk.launch()))
        wait_for(lambda: desk.shown(".json")["job"]["state"] == "succeeded", 30, "the page to say so")
        assert any("trains from step 0" in text for _, text in desk.shown("/logs.json")["lines"])
        refused = requests.post(f"{desk.url}/orders", json={"order": "resume"}, timeout=60)
        assert (refused.status_code, "it has succeeded" in refused.text) == (409, True)


def test_what_a_pod_of_kubernetes_says_that_cannot_begin_is_shown(tmp_path: Path) -> None:
    """An image without the project: its nodes write nothing into the run directory, so their output is the pods'."""
    said = "python3: No module named trainer"
    with desk_of("kubernetes", tmp_path, f"#!/bin/sh\necho '{said}' >&2\nexit 1\n") as desk:
        wait_for(lambda: desk.state() == "failed", 120, "the end of the job")
        assert [0, said] in desk.shown("/logs.json", node="0")["lines"]
        assert said in desk.shell("dtrain", "logs", "one")
        assert said in json.dumps(desk.shown("/facts.json")["failure"]), "why it failed"
        assert said in json.loads(desk.shell("dtrain", "status", "one", "--json"))["message"]
        assert all(job.state == "ended" for job in desk.machines.jobs(desk.launch()))


def assert_logs_are_shown(desk: Desk) -> None:
    """The page's tab of logs and `dtrain logs` have the lines of both nodes."""
    shown = desk.shown("/logs.json")
    assert shown["nodes"] == [0, 1]
    told = [json.loads(line) for line in desk.shell("dtrain", "logs", desk.job_id, "--json").splitlines()]
    for node in (0, 1):
        of_node = desk.shown("/logs.json", node=str(node))["lines"]
        [begun] = [line for line in of_node if "trains from step 0" in line[1]]
        assert begun[0] == node
        assert begun in shown["lines"]
        assert begun[1] in {line["text"] for line in told if line["node"] == node}
