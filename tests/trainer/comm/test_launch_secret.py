"""How the secret of a launch is kept and read, and what is said where there is none."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from trainer.comm.launch_secret import (
    SECRET_FILE,
    LaunchSecret,
    read_launch_secret,
    warn_if_unauthenticated,
    write_launch_secret,
)
from trainer.errors import ConfigError
from trainer.runtime.launch import Launch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secrets" / "job"
    write_launch_secret(path)
    return path


def test_a_fresh_secret_is_for_this_user_alone_and_replaces_the_one_before(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    first = read_launch_secret({SECRET_FILE: str(file)})
    assert len(first.value) == 32
    file.parent.chmod(0o755)
    write_launch_secret(file)
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert read_launch_secret({SECRET_FILE: str(file)}) != first
    assert [path.name for path in file.parent.iterdir()] == ["job"]


def test_without_a_variable_there_is_none() -> None:
    assert not read_launch_secret({}).is_given
    assert not read_launch_secret({SECRET_FILE: ""}).is_given


def test_it_is_not_shown_by_mistake(file: Path) -> None:
    secret = read_launch_secret({SECRET_FILE: str(file)})
    assert secret.value.hex() not in repr(secret)
    assert repr(secret.value) not in repr([secret])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_change_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"can be read or changed by others: .*chmod 600"):
        read_launch_secret({SECRET_FILE: str(file)})


def test_a_file_of_another_user_is_refused(file: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(file, 65534, 65534)
    with pytest.raises(ConfigError, match="can be read or changed by others"):
        read_launch_secret({SECRET_FILE: str(file)})


@pytest.mark.parametrize("content", ["", "ab" * 31, "ab" * 33, "xy" * 32, "é" * 32, "\0" * 64])
def test_something_else_in_it_is_refused_and_not_repeated(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"{SECRET_FILE}=.* must hold 64 hexadecimal digits") as refused:
        read_launch_secret({SECRET_FILE: str(file)})
    assert not content.strip("\0\n") or content not in str(refused.value)


def test_what_is_no_file_is_refused_at_once(file: Path) -> None:
    file.unlink()
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        read_launch_secret({SECRET_FILE: str(file)})
    os.mkfifo(file, 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_launch_secret({SECRET_FILE: str(file)})
    link = file.with_name("link")
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_launch_secret({SECRET_FILE: str(link)})


def test_where_nodes_share_no_disk_it_is_read_from_storage(tmp_path: Path) -> None:
    (tmp_path / "launch").write_text("ab" * 32)
    assert read_launch_secret(Launch(secret_uri=f"{tmp_path}/launch").variables()) == LaunchSecret(b"\xab" * 32)
    with pytest.raises(ConfigError, match=r"the secret of this launch.*there is no such file"):
        read_launch_secret(Launch(secret_uri=f"{tmp_path}/other").variables())


def test_what_strangers_can_do_is_said_once_at_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    given = LaunchSecret(b"x" * 32)
    with caplog.at_level(logging.WARNING):
        warn_if_unauthenticated(given, 0)
        warn_if_unauthenticated(LaunchSecret(), 1)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        warn_if_unauthenticated(LaunchSecret(), 0)
    [message] = (record.getMessage() for record in caplog.records)
    assert "NOT authenticated" in message
    assert SECRET_FILE in message
