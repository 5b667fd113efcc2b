"""`dtrain` as a person uses it: as a process, with its output and its exit code."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console
from shells import Shell, shell_in
from told_events import told, write_run

from dtrain_dagster.cli.facts import format_progress, read_course
from dtrain_dagster.cli.job_options import as_begun, dataset_config, plan_job, runnable
from dtrain_dagster.cli.jobs import print_status
from dtrain_dagster.cli.main import RETIRED, SECTIONS, load_command, main
from dtrain_dagster.cli.start import ended_by_signals
from dtrain_dagster.clusters.base import JobSpec, JobState, JobStatus
from dtrain_dagster.clusters.managers import LocalClusterManager
from dtrain_dagster.jobs.facts import JobFacts
from dtrain_dagster.jobs.orders import order_of
from dtrain_dagster.jobs.start import BudgetSpentError, fingerprint, start_job
from dtrain_dagster.planning.projection import TimeLeft
from dtrain_dagster.settings.environment import Settings
from harness.small_job import write_dataset
from trainer.config import ConfigError
from trainer.documents.presences import NodePresence
from trainer.rundir import LIMIT, RunDir

USUAL_PARTS = {"model": {"factory": "har_tcn"}, "loss": {"factory": "return_and_volatility"}}
SCRIPT = """
import os, sys, time
rank = int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
if "fail" in sys.argv and rank == 1:
    sys.exit(7)
if "wait" in sys.argv:
    time.sleep(300)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    (tmp_path / "s.py").write_text(SCRIPT)
    with shell_in(tmp_path, DTRAIN_NODES="2", DTRAIN_OPTIONS="command_tracking=off") as made:
        yield made


OPTIONS = {
    "init": "--drop --name --own-model --table --target folder",
    "data": "--drop --json --missing --seed --split-by --target --task --test-fraction --valid-fraction source",
    "train": "--backend --change --config --dataset --detach --dry-run --epochs --keep-failed --loss --model --name "
    "--nodes --procs-per-node --script --set --settings arguments",
    "tune": "--config --dataset --epochs --loss --model --name --nodes --out --procs-per-node --seconds --set",
    "search": "--budget --config --dataset --epochs --json --loss --maximise --metric --model --name --nodes "
    "--nodes-per-trial --parallel --plan --procs-per-node --pruner --sampler --script --seed --set --show --space "
    "--trials arguments",
    "launch": "--detach --dry-run --engine --keep-failed --master-port --name --nodes --procs-per-node command",
    "fleet": "--check file",
    "cancel": "name",
    "jobs": "--fleets --json",
    "status": "--follow --html --json --lift --nodes --trace -f name",
    "logs": "--follow --json --node --tail -f job_id",
    "cost": "--json --none --per-month --refresh --region --sku --usage-export name",
    "ui": "--all --allow-host --allow-user --host --port --read-only --workspace -w page",
    "doctor": "--json --nodes",
}


def test_commands_and_options_are_those_that_people_have_learnt():
    names = [name for names in SECTIONS.values() for name in names]
    found = {name: " ".join(sorted(o for each in load_command(name).params for o in each.opts)) for name in names}
    assert found == OPTIONS


@pytest.mark.slow
def test_help_and_commands_load_nothing_that_they_do_not_need():
    ask = "from dtrain_dagster.cli.common import manager_of, read_settings; manager_of(read_settings())"
    every = "; ".join(f"load_command({name!r})" for names in SECTIONS.values() for name in names)
    steps = {
        "import dtrain_dagster.cli.main": ("torch", "dagster", "pydantic", "rich", "fsspec", "numpy", "azure"),
        f"{ask}; import dtrain_dagster.cli.jobs": ("dagster", "mlflow", "torch", "numpy", "pandas", "requests"),
        f"from dtrain_dagster.cli.main import load_command; {every}": ("dagster", "mlflow", "torch", "optuna"),
    }
    code = "import sys\n" + "".join(
        f"{step}\nprint([name for name in {heavy!r} if name in sys.modules])\n" for step, heavy in steps.items()
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["[]"] * 3


@pytest.mark.slow
def test_launch_runs_a_script_on_nodes_and_passes_its_words_and_exit_code_on(shell: Shell):
    """A script in a subfolder finds the modules of the working directory."""
    (shell.folder / "helper.py").write_text("WORD = 'found'")
    (shell.folder / "scripts").mkdir()
    (shell.folder / "scripts" / "uses.py").write_text(f"import helper; print(helper.WORD)\n{SCRIPT}")
    said = shell.here("launch", "--nodes", "2", "--procs-per-node", "2", "--", "scripts/uses.py", "--epochs", "3")
    for rank in range(4):
        assert f"[node {rank // 2}] rank {rank} of 4 --epochs 3\n" in said
    assert "] found\n" in said
    said = shell.here("launch", "--name", "bad", "s.py", "fail", code=7)
    assert "job bad failed: rank 1 on node 1 failed first (exit code 7)" in said
    assert "bad" in shell.here("jobs")
    rows = json.loads(shell.here("cost", "bad", "--json"))
    assert [row["cause"] for row in rows["ledger"]] == ["script"], "it was no start-up"
    assert rows["goodput"] is None, "nobody knows what of it was of use"
    assert "script" in shell.here("cost", "bad")


@pytest.mark.parametrize("command", [["jobs"], ["status"], ["launch", "s.py"], ["train", "--dataset", "x"]])
def test_a_setting_that_cannot_be_used_is_named_by_every_command(shell: Shell, command: list[str]):
    assert "DTRAIN_NODES='many'" in shell.refused(*command, DTRAIN_NODES="many")


@pytest.mark.slow
def test_a_disk_that_fills_up_is_named_and_ends_in_an_error(shell: Shell):
    status = f"{shell.env['DTRAIN_HOME']}/storage/jobs/full/status.json"
    (shell.folder / "fill.py").write_text(
        "import os, psutil, resource, time\n"
        f"while not os.path.exists({status!r}):\n"  # what is tested comes after the start
        "    time.sleep(0.05)\n"
        "if os.environ['RANK'] == '0':\n"  # from now on no file of these may grow, as on a full disk
        "    supervisor = psutil.Process(os.getppid())\n"
        "    for process in (supervisor, supervisor.parent()):\n"  # and the submitter
        "        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, 0))\n"
    )
    said = shell("launch", "--name", "full", "fill.py", code=1)
    assert "job full failed: the supervisor died" in said
    assert f"{shell.env['DTRAIN_HOME']}/storage/jobs/full cannot be written" in said
    assert "make room there" in said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_command_with_its_code_after_what_has_to_be_done(number: signal.Signals, code: int):
    done: list[int] = []
    with pytest.raises(SystemExit) as ended, ended_by_signals(lambda: done.append(1)):
        signal.raise_signal(number)
    assert (ended.value.code, done) == (code, [1])


@pytest.mark.slow
def test_ctrl_c_cancels_the_job(shell: Shell):
    code, out, err = shell.interrupted("launch", "--name", "long", str(shell.folder / "s.py"), "wait", when="rank")
    assert code == 130, out + err
    assert "cancelling job long" in err
    assert "job long: cancelled" in err
    assert f"run it again: dtrain launch --name long {shell.folder}/s.py wait\n" in err
    assert shell.processes() == []
    assert "cancelled" in shell.here("status", "long")


@pytest.mark.slow
def test_a_detached_job_is_listed_followed_and_cancelled(shell: Shell):
    """Ctrl-C ends a command that follows, and not the job."""
    assert shell.here("jobs").startswith("no jobs in ")
    said = shell.here("launch", "--detach", "--name", "bg", str(shell.folder / "s.py"), "wait")
    assert said == "bg\nfollow it: dtrain logs --follow bg\n"
    assert "job bg is already running" in shell.refused("launch", "--name", "bg", "s.py")
    code, out, err = shell.interrupted("logs", "--follow", "--node", "1", "bg", when="[node 1] rank 1 of 2 wait\n")
    assert (code, out) == (130, "")
    assert re.search(r"^job bg: running\nso far: \d+ s; ", err)
    assert err.endswith("the job goes on; follow it: dtrain status bg --follow\nend it: dtrain cancel bg\n")
    assert "bg   running" in shell.here("jobs")
    assert "running: bg" in shell.here("doctor")
    assert shell.here("cancel", "bg") == "job bg: cancelled\n"
    assert shell.here("cancel", "bg") == "job bg: cancelled already\n"
    assert shell.here("logs", "bg", "--tail", "1").splitlines()[1] == "rank 0 of 2 wait"
    last = shell.here("logs", "bg", "--follow", "--tail", "1")
    assert last == "[node 0] rank 0 of 2 wait\n[node 1] rank 1 of 2 wait\n"


class TestPlanJob:
    TEXT = json.dumps({"job_id": "j", "dataset": {"uri": "data"}, "training": {"world_size": 6}})

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        return Settings(home=tmp_path, nodes=3)

    @pytest.fixture
    def two(self, settings: Settings) -> Settings:
        """Two processes on each node."""
        return settings.model_copy(update={"processes_per_node": 2})

    def test_world_size_follows_the_nodes(self, settings: Settings, two: Settings):
        job, nodes = plan_job(self.TEXT, "x", [], 2, two)
        assert (nodes, job.training.world_size) == (2, 4)
        assert job.run_dir == str(settings.home / "storage" / "jobs" / "j")

    def test_a_stated_world_size_decides_where_no_nodes_are_asked_for(self, settings: Settings, two: Settings):
        job, nodes = plan_job(self.TEXT, "x", [], None, two)
        assert (nodes, job.training.world_size) == (3, 6)
        with pytest.raises(ConfigError, match="world_size = 6 is not a multiple of 4"):
            plan_job(self.TEXT, "x", [], None, settings.model_copy(update={"processes_per_node": 4}))
        text = json.dumps({"job_id": "j", "dataset": {"uri": "data"}})
        job, nodes = plan_job(text, "x", [], None, settings)
        assert (nodes, job.training.world_size) == (3, 3)

    def test_an_override_has_the_last_word(self, settings: Settings):
        job, nodes = plan_job(self.TEXT, "x", ["training.world_size=5"], 2, settings)
        assert (nodes, job.training.world_size) == (2, 5)

    def test_a_job_goes_on_with_fewer_nodes_as_it_was_planned(self, two: Settings):
        job, _ = plan_job(self.TEXT, "x", [], 3, two)
        assert as_begun(job) == job
        RunDir(job.run_dir).write_job(job)
        again, nodes = plan_job(self.TEXT, "x", [], 1, two)
        assert (as_begun(again), nodes) == (job, 1)

    def test_a_job_goes_on_with_what_is_changed_by_name(self, two: Settings, monkeypatch: pytest.MonkeyPatch):
        job, _ = plan_job(self.TEXT, "x", [], 3, two)
        with pytest.raises(ConfigError, match=r"job j was not begun: give --set"):
            as_begun(job, changes=["training.epochs=9"])
        manager = LocalClusterManager(two.home)
        monkeypatch.setattr(manager, "submit_job", lambda spec: None)
        start_job(manager, job, 3, 1, {})
        other = plan_job(self.TEXT, "x", ["training.epochs=9", "training.learning_rate=0.5"], 3, two)[0]
        with pytest.raises(ConfigError) as refused:
            as_begun(other)
        assert "training.epochs = 9 (6 before); training.learning_rate = 0.5 (0.002 before)" in str(refused.value)
        assert "give --change training.epochs=9 --change training.learning_rate=0.5" in str(refused.value)
        with pytest.raises(
            ConfigError, match=r"learning_rate = 0\.5 .* give --change training\.learning_rate=0\.5; else"
        ):
            as_begun(other, changes=["training.epochs=9"])
        changed = as_begun(job, changes=["training.epochs=9", "training.batch_size_per_gpu=64"])
        assert changed.training == replace(job.training, epochs=9, batch_size_per_gpu=64)
        start_job(manager, changed, 3, 1, {})
        assert RunDir(job.run_dir).read_job() == changed
        assert (order := order_of(two.home, RunDir(job.run_dir))) is not None
        assert order.job == changed, "and it counts as ordered"
        for fixed in ("training.seed=4", "tracking.tags={}", "model.factory=mlp", "dataset.uri=other"):
            with pytest.raises(ConfigError, match=f"--change {fixed.partition('=')[0]}: only fields of training may"):
                as_begun(job, changes=[fixed])
        budget = as_begun(changed, changes=["training.max_node_seconds=99"])
        assert budget.training == replace(changed.training, max_node_seconds=99)
        with pytest.raises(ConfigError, match=r"model\.factory = 'mlp' .* before\); choose another --name"):
            as_begun(plan_job(self.TEXT, "x", ["training.epochs=9", "model.factory=mlp"], 3, two)[0])
        with pytest.raises(ConfigError, match="job j runs: cancel it first"):
            as_begun(job, runs=True, changes=["training.epochs=9"])

    def test_a_job_goes_on_with_another_budget_and_not_with_one_that_is_spent(self, two: Settings, monkeypatch):
        job, _ = plan_job(self.TEXT, "x", ["training.max_node_seconds=60"], 3, two)
        rundir, manager = RunDir(job.run_dir), LocalClusterManager(two.home)
        rundir.write_job(job)
        rundir.write_node(NodePresence(node_id=0, launch=1, started_at=100.0, ended_at=161.0))
        with pytest.raises(BudgetSpentError, match=r"max_node_seconds = 60\): raise it"):
            start_job(manager, as_begun(job), 3, 1, {})
        raised = as_begun(plan_job(self.TEXT, "x", ["training.max_node_seconds=99"], 3, two)[0])
        submitted: list[JobSpec] = []
        monkeypatch.setattr(manager, "submit_job", submitted.append)
        start_job(manager, raised, 3, 1, {})
        assert len(submitted) == 1
        assert rundir.read_job() == raised
        assert rundir.read_job().training.max_node_seconds == 99
        assert rundir.read_json(LIMIT) == {"max_node_seconds": 99, "stop_at_usd": None}, "for nodes that run already"
        unnamed = plan_job(self.TEXT, "x", [], 3, two)[0]
        assert as_begun(unnamed, runs=True) == raised, "following a job changes nothing"
        start_job(manager, as_begun(unnamed), 3, 1, {})
        assert rundir.read_json(LIMIT) == {"max_node_seconds": None, "stop_at_usd": None}
        assert fingerprint(job, 3, 1) == fingerprint(raised, 3, 1), "the same training, and so the same job"

    def test_nodes_elsewhere_find_out_their_own_cores(self, settings: Settings):
        assert plan_job(self.TEXT, "x", [], 2, settings)[0].training.threads_per_rank is not None
        elsewhere = settings.model_copy(update={"cluster": "azure_ml", "storage": "az://dtrain"})
        job, _ = plan_job(self.TEXT, "x", [], 2, elsewhere)
        assert (job.training.threads_per_rank, job.run_dir) == (None, "az://dtrain/jobs/j")

    def test_a_dataset_is_found_by_folder_and_by_id(self, settings: Settings):
        folder = settings.home / "storage" / "datasets" / "abc"
        write_dataset(folder)
        for given in ("abc", str(folder)):
            text = dataset_config(settings, given)
            assert json.loads(text) == {"dataset": {"uri": str(folder)}, **USUAL_PARTS}
        other = json.loads(dataset_config(settings, "abc", has_own_model=True))
        assert other["loss"] == {"factory": "student_t"}  # of one forecast, as other models make
        with pytest.raises(ConfigError, match=r"--dataset nope: .*abc"):
            dataset_config(settings, "nope")


def test_the_latest_dataset_is_the_one_built_last_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    settings = Settings(home=tmp_path)
    with pytest.raises(ConfigError, match="--dataset latest: there is no dataset"):
        dataset_config(settings, "latest")
    datasets = tmp_path / "storage" / "datasets"
    for name, created in (("zzz", "2026-01-01T00:00:00+00:00"), ("aaa", "2026-03-01T00:00:00Z"), ("half", None)):
        (datasets / name).mkdir(parents=True)
        if created:
            (datasets / name / "manifest.json").write_text(json.dumps({"created_at": created}))
    (datasets / "broken").mkdir()
    (datasets / "broken" / "manifest.json").write_text('{"created_at": "2026-04')
    (datasets / "pipe").mkdir()
    os.mkfifo(datasets / "pipe" / "manifest.json")
    assert json.loads(dataset_config(settings, "latest")) == {"dataset": {"uri": str(datasets / "aaa")}, **USUAL_PARTS}
    assert capsys.readouterr().err.splitlines()[-1] == "--dataset latest: aaa (windows), built 2026-03-01 00:00 UTC"
    (datasets / "rows").mkdir()
    rows = {"created_at": "2026-04-01T00:00:00Z", "kind": "rows", "task": "binary"}
    (datasets / "rows" / "manifest.json").write_text(json.dumps(rows))
    assert json.loads(dataset_config(settings, "latest"))["dataset"] == {"uri": str(datasets / "rows")}
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.endswith("rows (binary of rows), built 2026-04-01 00:00 UTC")
    done = CliRunner().invoke(main, ["train", "--dataset", "pipe"], env={"DTRAIN_HOME": str(tmp_path)})
    assert (done.exit_code, "pipe/manifest.json is not a regular file" in done.output) == (2, True)


def test_a_python_script_runs_with_the_python_of_dtrain(tmp_path: Path):
    script = tmp_path / "a.py"
    script.touch()
    assert runnable([str(script), "-x"]) == (sys.executable, str(script), "-x")
    assert runnable(["true", "x"]) == ("true", "x")


def test_a_line_of_progress_says_what_is_known():
    from dtrain_dagster.jobs.view import JobView

    assert format_progress(JobView()) == "waiting for nodes · 0 nodes"
    assert format_progress(JobView(nodes_alive=2)) == "starting · 2 nodes", "they have come"
    progress = JobView(phase="training", step=20, total_steps=40, epoch=2, loss=0.5, samples_per_second=1234.0)
    expected = "training · step 20/40 · epoch 2 · ETA 1 min 05 s · loss 0.5000 · 1,234 samples/s · 1 node"
    assert format_progress(replace(progress, nodes_alive=1), TimeLeft(seconds=65, has_finish=True)) == expected
    assert "ETA 5 s to the last step" in format_progress(progress, TimeLeft(seconds=5, has_finish=False))
    assert "ETA" not in format_progress(progress)
    left = TimeLeft(seconds=5, has_finish=True)
    ended = "succeeded · step 20/40 · epoch 2 · loss 0.5000"
    assert format_progress(progress, left, JobState.SUCCEEDED) == ended, "with no speed, nodes or time left"


def test_a_job_that_has_ended_has_no_time_left(tmp_path: Path):
    rundir = write_run(tmp_path, "a", told(4))
    running = JobStatus(job_id="a", state=JobState.RUNNING, started_at=0.0)
    for state in JobState:
        console = Console(width=200, file=io.StringIO())
        status = replace(running, state=state)
        course = read_course(status, rundir)
        print_status(console, JobFacts(status=status, run_dir=rundir.uri, began_at=0.0), rundir, course, "")
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "step 20" in shown
        assert "epoch 1" in shown, "people count from 1"
        assert ("ETA" in shown) is not state.is_final, state


def test_help_lists_each_command_in_one_section_with_a_whole_sentence():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    for name in (name for names in SECTIONS.values() for name in names):
        [line] = re.findall(rf"^  {name} +(\S.*)$", shown, re.MULTILINE)
        assert line.endswith("."), line
        assert not line.endswith("..."), f"{name}: shorten the first sentence of its help"


@pytest.mark.parametrize("words", RETIRED)
def test_what_was_typed_before_says_what_to_type_now(words: str):
    done = CliRunner().invoke(main, [*words.split(), "one", "--json"])
    assert (done.exit_code, len(done.output.splitlines())) == (2, 1), done.output
    for instead in re.findall(r"dtrain (\w+)", RETIRED[words]):
        assert any(instead in names for names in SECTIONS.values()), words
    for module in re.findall(r"python -m (\S+)", RETIRED[words]):
        assert importlib.util.find_spec(module), words
