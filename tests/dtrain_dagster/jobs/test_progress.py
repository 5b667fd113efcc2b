"""Which job does a training: found before a second one is bought."""

import sys

import pytest

from dtrain_dagster.clusters.base import JobState
from dtrain_dagster.jobs.progress import KnownJob, choose_job
from dtrain_dagster.jobs.start import fingerprint
from dtrain_dagster.jobs.view import JobView, fold
from dtrain_dagster.support.user_code import digest_user_code, stage_for_nodes
from trainer.config import DatasetRef, JobConfig
from trainer.rundir import event

FINGERPRINT, RUN = "0a1b2c3d", "11111111-aaaa"
OWN, OTHER = f"train-{FINGERPRINT}-11111111", f"train-{FINGERPRINT}-22222222"
THIRD = f"train-{FINGERPRINT}-33333333"


def known(job_id: str, state: JobState, claimed: bool = False, has_checkpoint: bool = False) -> KnownJob:
    return KnownJob(job_id=job_id, state=state, claimed=claimed, has_checkpoint=has_checkpoint)


@pytest.mark.parametrize(
    ("jobs", "action", "job_id"),
    [
        ([], "start", OWN),
        ([known(OWN, JobState.RUNNING)], "attach", OWN),
        ([known(OWN, JobState.SUCCEEDED, claimed=True)], "adopt", OWN),
        ([known(OWN, JobState.FAILED)], "restart", OWN),
        ([known(OTHER, JobState.RUNNING)], "attach", OTHER),
        ([known(OTHER, JobState.SUCCEEDED)], "adopt", OTHER),
        ([known(OTHER, JobState.SUCCEEDED, claimed=True)], "start", OWN),
        ([known(OTHER, JobState.FAILED)], "start", OWN),
        ([known(OTHER, JobState.FAILED, has_checkpoint=True)], "restart", OTHER),
        ([known(OTHER, JobState.FAILED, has_checkpoint=True), known(OWN, JobState.FAILED)], "restart", OWN),
        ([known(OTHER, JobState.SUCCEEDED, claimed=True, has_checkpoint=True)], "start", OWN),
        ([known(THIRD, JobState.SUCCEEDED, claimed=True), known(OTHER, JobState.FAILED, False, True)], "start", OWN),
        ([known(THIRD, JobState.SUCCEEDED), known(OTHER, JobState.FAILED, has_checkpoint=True)], "adopt", THIRD),
        ([known("train-ffffffff-22222222", JobState.FAILED, has_checkpoint=True)], "start", OWN),
        ([known(f"probe-{FINGERPRINT}", JobState.RUNNING)], "start", OWN),
        ([known(OTHER, JobState.SUCCEEDED), known(OWN, JobState.RUNNING)], "attach", OWN),
    ],
)
def test_choose_job(jobs, action, job_id):
    choice = choose_job(FINGERPRINT, RUN, jobs)
    assert (choice.action, choice.job_id) == (action, job_id)
    assert choice.reason


def test_the_fingerprint_changes_with_what_is_trained_and_with_nothing_else(tmp_path, monkeypatch):
    def mark(nodes: int = 3, **fields) -> str:
        job = JobConfig(**{"job_id": "a", "run_dir": "b", "dataset": DatasetRef(uri="c", dataset_id="d")} | fields)
        return fingerprint(job, nodes, 1)

    base = mark()
    assert mark(job_id="x", run_dir="y") == base
    assert mark(nodes=2) != base
    assert mark(dataset=DatasetRef(uri="c", dataset_id="e")) != base
    assert mark(dataset=DatasetRef(uri="elsewhere", dataset_id="d")) == base

    module = tmp_path / "mine_for_fingerprint.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "mine_for_fingerprint")
    module.write_text("def make(spec, outputs): ...")
    own = mark(model={"factory": "mine_for_fingerprint:make"})
    module.write_text("def make(spec, outputs): ...  # edited")
    assert mark(model={"factory": "mine_for_fingerprint:make"}) != own


def test_progress_follows_the_events():
    step = {"epoch": 1, "loss": -1.5, "samples_per_second": 10.0, "eta_seconds": 5.0}
    progress = fold(JobView(), [event("phase", 0, 1, name="data"), event("phase", 1, 1, name="other")])
    assert (progress.phase, progress.step) == ("loading the model", 0)
    progress = fold(progress, [event("step", 0, 1, step=20, **step)])
    assert (progress.phase, progress.step, progress.loss) == ("training", 20, -1.5)
    progress = fold(progress, [event("evaluation", 0, 1, step=20, split="valid", loss=-1.6)])
    assert progress.valid_loss == -1.6
    assert progress.epoch == 2, "files count from 0, people from 1"
    words = []
    for stage in ("test split", "baselines", "report", "model", "one of a later version"):
        progress = fold(progress, [event("finish", 0, 1, stage=stage)])
        words.append(progress.phase)
    assert words == [
        "evaluating the test split",
        "fitting the baselines",
        "writing the report",
        "writing the model",
        "finishing",
    ]
    assert fold(progress, [event("step", 0, 1, step=21, **step)]).phase == "training", "a launch was lost"


def without_other_packages(monkeypatch, folder):
    """Which of all installed packages a file is of takes a second to find out, each time."""
    monkeypatch.syspath_prepend(str(folder))  # at the end, this restores the whole path
    sys.path[:] = [path for path in sys.path if "site-packages" not in path]


def test_another_version_of_an_installed_factory_is_another_training(tmp_path, monkeypatch):
    without_other_packages(monkeypatch, tmp_path)
    packages = tmp_path / "lib" / "site-packages"
    told = packages / "fp_wheel-1.0.dist-info"
    told.mkdir(parents=True)
    (packages / "fp_wheel.py").write_text("def make(**_): ...\n")
    (told / "top_level.txt").write_text("fp_wheel\n")
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "fp_wheel")
    monkeypatch.syspath_prepend(str(packages))
    part = {"factory": "fp_wheel:make"}
    job = JobConfig(job_id="a", run_dir="b", dataset=DatasetRef(uri="c", dataset_id="d"), model=part)
    marks = []
    for version in ("1.0", "1.1"):
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fp-wheel\nVersion: {version}\n")
        marks.append(fingerprint(job, 1, 1))
    assert marks[0] != marks[1]


def test_an_edited_helper_that_goes_to_the_nodes_is_another_training_and_no_other_file_is(tmp_path, monkeypatch):
    files = {
        "fp_model/__init__.py": "",
        "fp_model/net.py": "from .layers import wide\nimport fp_beside\n",
        "fp_model/layers.py": "import fp_transitive\nwide = 1\n",
        "fp_beside.py": "",
        "fp_transitive.py": "",
    }
    bystanders = ["fp_unused.py", "fp_model/unused.py", "fp_model/data.csv"]
    for name in [*files, *bystanders]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(files.get(name, ""))
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "fp_model")
    monkeypatch.syspath_prepend(str(tmp_path))
    factory = "fp_model.net:make"
    job = JobConfig(job_id="a", run_dir="b", dataset=DatasetRef(uri="c", dataset_id="d"), model={"factory": factory})
    staged = stage_for_nodes(tmp_path / "staged", [factory])
    assert [name for name in staged if not name.startswith("trainer/")] == sorted(files)

    before = fingerprint(job, 1, 1)
    for name in bystanders:
        (tmp_path / name).write_text("x = 1\n")
        assert fingerprint(job, 1, 1) == before, name
    for name, text in files.items():
        (tmp_path / name).write_text(text + "x = 1\n")
        assert fingerprint(job, 1, 1) != before, name
        (tmp_path / name).write_text(text)
        assert fingerprint(job, 1, 1) == before, name

    (tmp_path / "fp_transitive.py").rename(tmp_path / "fp_renamed.py")
    (tmp_path / "fp_model/layers.py").write_text(files["fp_model/layers.py"].replace("transitive", "renamed"))
    assert fingerprint(job, 1, 1) != before


def test_another_version_of_what_a_users_module_imports_is_another_training(tmp_path, monkeypatch):
    """But not of what every training needs; and a helper counts from wherever it lies on the Python path."""
    without_other_packages(monkeypatch, tmp_path)
    packages, own, helpers = (tmp_path / name for name in ("lib/site-packages", "own", "helpers"))
    told = packages / "fp_library-1.0.dist-info"
    for folder in (told, own, helpers):
        folder.mkdir(parents=True)
        monkeypatch.syspath_prepend(str(folder if folder != told else packages))
    (packages / "fp_library.py").write_text("")
    (told / "top_level.txt").write_text("fp_library\n")
    (own / "fp_user.py").write_text("import os, numpy\nimport fp_library\nfrom fp_helper import width\n")
    (helpers / "fp_helper.py").write_text("width = 3\n")
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "fp_user")
    part = {"factory": "fp_user:make"}
    job = JobConfig(job_id="a", run_dir="b", dataset=DatasetRef(uri="c", dataset_id="d"), model=part)
    marks = []
    for version in ("1.0+cpu", "1.0+cu12", "1.1"):
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fp-library\nVersion: {version}\n")
        marks.append(fingerprint(job, 1, 1))
    (helpers / "fp_helper.py").write_text("width = 4\n")
    marks.append(fingerprint(job, 1, 1))
    assert (marks[0], len(set(marks))) == (marks[1], 3)
    assert not [name for name in digest_user_code("fp_user:make").split()[1:] if name.startswith("numpy")]
    staged = stage_for_nodes(tmp_path / "staged", ["fp_user:make"])
    assert [name for name in staged if not name.startswith("trainer/")] == ["fp_helper.py", "fp_user.py"]
