"""The lock of a run directory, and which processes count as left."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from dtrain_dagster.clusters.supervision.launch import is_supervisor, supervisor_of
from dtrain_dagster.support.job_lock import LOCK, acquire, is_held
from trainer.errors import DamagedError
from trainer.node.processes import group_alive, signal_group


def test_a_link_in_the_place_of_the_lock_is_damage_in_words(tmp_path: Path):
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    for ask in (is_held, acquire):
        with pytest.raises(DamagedError, match=r"it is a link.*remove it once nothing"):
            ask(tmp_path)


def test_a_command_line_alone_makes_no_supervisor(tmp_path: Path):
    command = [
        sys.executable,
        "-c",
        "import sys; sys.stdin.read()",
        "dtrain_dagster.clusters.supervise",
        str(tmp_path),
    ]
    lock = acquire(tmp_path)
    assert lock is not None
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE) as pretender,
        subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[lock]) as holder,
    ):
        while not is_supervisor(holder.pid, tmp_path):  # for a moment a new process has no command line yet
            assert holder.poll() is None
            time.sleep(0.01)
        assert not is_supervisor(pretender.pid, tmp_path)
        assert supervisor_of(tmp_path, pretender.pid) == holder.pid
    os.close(lock)


def test_one_holds_it_until_every_copy_is_closed(tmp_path: Path):
    assert not is_held(tmp_path)
    assert not is_held(tmp_path / "nowhere")
    lock = acquire(tmp_path)
    assert lock is not None
    assert is_held(tmp_path)
    assert acquire(tmp_path) is None
    copy = os.dup(lock)
    os.close(lock)
    assert is_held(tmp_path)
    os.close(copy)
    assert not is_held(tmp_path)


def test_an_asker_is_not_taken_for_a_holder(tmp_path: Path):
    asker = os.open(tmp_path / LOCK, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(asker, fcntl.LOCK_SH)
    assert not is_held(tmp_path)
    timer = threading.Timer(0.1, os.close, [asker])
    timer.start()
    lock = acquire(tmp_path)  # waits for the asker, who is done in a moment
    timer.join()
    assert lock is not None
    os.close(lock)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_has_ended_and_was_not_waited_for_does_not_count_as_left():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0)
    assert process.stdin
    assert group_alive(process.pid)
    process.stdin.close()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert signal_group(process.pid, 0)
    assert not group_alive(process.pid)
    process.wait()
    assert not signal_group(process.pid, 0)
