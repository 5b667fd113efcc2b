"""What is typed is completed in bash, zsh and fish: the shells run in a pseudo-terminal, as a person has them."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from told_home import JOBS, write_home

from dtrain_dagster.cli.main import main

DTRAIN = str(Path(sys.executable).parent / "dtrain")
STARTS = {
    "bash": (("bash", "--norc", "--noprofile", "-i"), 'eval "$(_DTRAIN_COMPLETE=bash_source dtrain)"'),
    "zsh": (("zsh", "-f", "-i"), 'autoload -Uz compinit; compinit -u -D; eval "$(_DTRAIN_COMPLETE=zsh_source dtrain)"'),
    "fish": (("fish", "--no-config", "-i"), "_DTRAIN_COMPLETE=fish_source dtrain | source"),
}
"""Shell → how it is started without a person's own settings, and the line that begins to complete."""
KILL_LINE, TAB = "\x15", "\t"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\x00\x07]")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_home(tmp_path / "home")
    (tmp_path / "home" / "storage" / "datasets" / "6f9b3c").mkdir(parents=True)
    (tmp_path / "job.json").write_text("{}")
    return tmp_path / "home"


class Terminal:
    """A shell in a pseudo-terminal."""

    def __init__(self, command: tuple[str, ...], folder: Path, env: dict[str, str]) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], command, env)
        self.ready = select.poll()
        self.ready.register(self.descriptor, select.POLLIN)

    def type(self, text: str, until: str, seconds: float = 60.0) -> str:
        """Type, and return what is shown from then on, up to ``until``."""
        os.write(self.descriptor, text.encode())
        shown, deadline = "", time.monotonic() + seconds
        while until not in (plain := _CONTROL.sub("", shown)):
            assert time.monotonic() < deadline, f"{text!r} shows {plain!r}, without {until!r}"
            if self.ready.poll(200):
                shown += os.read(self.descriptor, 1 << 16).decode(errors="replace")
        return plain

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.descriptor)


@pytest.mark.slow
@pytest.mark.parametrize("shell", STARTS)
def test_a_shell_completes_what_is_typed(shell: str, home: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine: install the package {shell} to run this test")
    command, line = STARTS[shell]
    own = {name: value for name, value in os.environ.items() if not name.startswith("DTRAIN_")}
    env = own | {
        "PATH": f"{Path(DTRAIN).parent}:{own['PATH']}", "HOME": str(home.parent), "DTRAIN_HOME": str(home),
        "TERM": "dumb", "XDG_CONFIG_HOME": str(home.parent), "XDG_DATA_HOME": str(home.parent),
    }  # fmt: skip
    terminal = Terminal(command, home.parent, env)
    try:
        terminal.type(f"{line}; echo rea''dy\n", "ready\r")
        for typed, completed in (
            ("dtrain sta", "dtrain status "),
            ("dtrain status nightl", "dtrain status nightly "),
            ("dtrain train --config jo", "dtrain train --config job.json "),
            ("dtrain train --dataset 6f", "dtrain train --dataset 6f9b3c "),
        ):
            terminal.type(f"{KILL_LINE}{typed}{TAB}", completed.removeprefix(typed) if shell == "bash" else completed)
    finally:
        terminal.close()


@pytest.mark.slow
def test_fish_shows_whole_descriptions(home: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("there is no fish on this machine: install the package fish to run this test")
    env = {**os.environ, "PATH": f"{Path(DTRAIN).parent}:{os.environ['PATH']}", "HOME": str(home.parent)}
    program = '_DTRAIN_COMPLETE=fish_source dtrain | source; complete -C "dtrain logs --no"'
    done = subprocess.run(
        ["fish", "--no-config", "-c", program], capture_output=True, text=True, env=env, check=True, timeout=120
    )
    assert done.stdout == "--node\tOnly this node, counted from 0.\n"


def test_commands_options_jobs_and_datasets_are_offered(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_HOME", str(home))
    complete = ShellComplete(main, {}, "dtrain", "_DTRAIN_COMPLETE")

    def offered(*words: str) -> set[str]:
        return {item.value for item in complete.get_completions(list(words[:-1]), words[-1])}

    assert offered("l") == {"launch", "logs"}
    assert offered("status", "nig") == {"night", "nightly"}
    assert offered("status", "lat") == {"latest"}
    assert offered("status", "") >= {"latest", *JOBS}
    assert "--follow" in offered("logs", "--f")
    assert offered("cost", "w") == {"weekend"}
    [file] = complete.get_completions(["train", "--dataset"], "jo")
    assert (file.type, file.value) == ("file", "jo"), "no dataset: the shell looks among files"
