"""The engine against emulated commands of SLURM: what it does where the queue has forgotten a job, and through ssh. A
real SLURM is in ``tests/engines``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.clusters.slurm.commands import COLUMNS
from dtrain_dagster.clusters.slurm.engine import SlurmEngine
from dtrain_dagster.clusters.supervision.engine import EngineError, EngineUnreachableError, name_job
from dtrain_dagster.settings.slurm import SlurmSettings

LAUNCH = {"token": "0123456789abcdef" * 3, "launch": 2}
NAME = name_job(LAUNCH, 0, 1)
Emulate = Callable[[str, str], None]


@pytest.fixture
def emulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulate:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")

    def write(name: str, shell: str) -> None:
        (programs / name).write_text(f"#!/bin/sh\n{shell}\n")
        (programs / name).chmod(0o755)

    write("squeue", "")
    write("sbatch", f"cat > {tmp_path}/script; echo x >> {tmp_path}/bought; echo 41")
    return write


def engine(tmp_path: Path, **options: Any) -> SlurmEngine:
    return SlurmEngine(SlurmSettings(**options), str(tmp_path), lambda *_: ["agent"])


def bought(tmp_path: Path) -> int:
    path = tmp_path / "bought"
    return len(path.read_text().split()) if path.exists() else 0


def row(**changes: str) -> str:
    values = {
        "JobID": "41", "Name": NAME, "State": "RUNNING", "exit_code": "0", "Reason": "None", "NodeList": "n2",
        "SubmitTime": "1795521094", "StartTime": "1795521095", "EndTime": "N/A", "TimeLimit": "5:00",
    } | changes  # fmt: skip
    return "".join(values[name].ljust(width) for name, width in COLUMNS.items())


def test_a_job_that_has_run_is_not_bought_again_when_the_queue_has_forgotten_it(
    tmp_path: Path, emulate: Emulate
) -> None:
    assert engine(tmp_path).submit(LAUNCH, 0, 1) == "41"
    (tmp_path / "logs" / f"slurm-{NAME}-41.out").write_text("said\n")
    (tmp_path / "logs" / f"slurm-{name_job(LAUNCH, 0, 11)}-9.out").write_text("another's\n")
    later = engine(tmp_path)
    assert later.submit(LAUNCH, 0, 1) == "41"
    assert bought(tmp_path) == 1
    assert later.read_log("41") == "said\n"
    assert later.list_jobs(LAUNCH) == [], "nothing is made up"
    assert later.submit(LAUNCH, 0, 2) == "41"
    assert bought(tmp_path) == 2, "another incarnation is another job"


def test_an_id_that_was_given_again_ends_and_tells_nothing(tmp_path: Path, emulate: Emulate) -> None:
    emulate("squeue", f"echo '{row()}'")
    emulate("scancel", f'echo "$@" >> {tmp_path}/ended')
    asking = engine(tmp_path)
    asking.list_jobs(LAUNCH)
    other = name_job(LAUNCH | {"token": "f" * 48}, 0, 1)
    emulate("squeue", f"echo '{row(Name=other)}'; echo '{row(JobID='42', Name='a-persons')}'")
    assert asking.list_jobs(LAUNCH) == []
    asking.cancel(["41", "42"], force=True)
    assert not (tmp_path / "ended").exists()
    emulate("squeue", f"echo '{row()}'")
    asking.cancel(["41", "42"], force=True)
    assert (tmp_path / "ended").read_text() == "--signal=KILL --full 41\n41\n"


def test_commands_go_through_ssh_with_their_words_and_their_input(tmp_path: Path, emulate: Emulate) -> None:
    # An emulated login node: it runs the line as sshd has a shell run it.
    emulate("ssh", f'for line; do :; done; echo "$@" > {tmp_path}/asked; exec sh -c "$line"')
    remote = engine(tmp_path, host="me@login", setup="module load 'a b'")
    assert remote.submit(LAUNCH, 0, 1) == "41"
    assert (tmp_path / "script").read_text() == "#!/bin/sh\nmodule load 'a b'\nexec agent\n"
    asked = (tmp_path / "asked").read_text()
    assert "BatchMode=yes" in asked
    assert "me@login sh -c " in asked
    assert " sh env SLURM_TIME_FORMAT=%s sbatch" in asked
    emulate("ssh", "echo 'Permission denied (publickey)' >&2; exit 255")
    with pytest.raises(EngineUnreachableError, match=r"me@login cannot be reached \(Permission denied"):
        remote.submit(LAUNCH, 0, 1)
    emulate("ssh", "echo 'env: sbatch: No such file' >&2; exit 127")
    with pytest.raises(EngineError, match="must be on the PATH there"):
        remote.submit(LAUNCH, 0, 1)
