"""`python -m dtrain_dagster setup`, `work` and `clean`: the folder that everything is written to."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click

from dtrain_dagster.cli.common import EXIT_UNUSABLE, read_settings, refuses
from dtrain_dagster.cli.start import say_after_work
from dtrain_dagster.jobs.spending import jobs_noted_since
from dtrain_dagster.settings.environment import Settings
from dtrain_dagster.settings.home import HomeError, hold_home, make_home, plan_removal, remove, unwritable
from dtrain_dagster.web.stored_secrets import refuse_secret_on_command_line

ROOT = Path(__file__).parents[1]
DAGSTER_SETTINGS = Path(__file__).parent / "settings" / "dagster.yaml"
SHOWN = 12


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Make the home of dtrain (DTRAIN_HOME), work on it, and remove it."""


@main.command()
@refuses
def setup() -> None:
    """Make the folder that everything is written to.

    It is DTRAIN_HOME, marked as dtrain's. Dagster's settings are written to DAGSTER_HOME.

    \b
    Examples:
      python -m dtrain_dagster setup
      DTRAIN_HOME=/data/dtrain python -m dtrain_dagster setup
    """
    prepare_dagster_home(read_settings())


def prepare_dagster_home(settings: Settings) -> Path:
    """Make and mark the home; write Dagster's settings into DAGSTER_HOME, or into `dagster` in the home where that is
    unset, once: they are the user's to edit. Return that folder. Raise `HomeError` where it cannot be
    written."""
    home = make_home(settings.home)
    dagster_home = Path(os.environ.get("DAGSTER_HOME") or home / "dagster")
    target = dagster_home / "dagster.yaml"
    try:
        dagster_home.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copyfile(DAGSTER_SETTINGS, target)
    except OSError as error:
        raise HomeError(unwritable(dagster_home, error).replace("DTRAIN_HOME", "DAGSTER_HOME")) from error
    return dagster_home


@main.command()
@click.option("--yes", is_flag=True, help="Remove without asking (where nobody can be asked, nothing is removed).")
@refuses
def clean(yes: bool) -> None:
    """Remove what was made here: runs, datasets, models.

    It shows what, and asks.

    Only what dtrain itself has written into DTRAIN_HOME is removed, and only where the folder is marked as dtrain's and
    nothing runs there.

    \b
    Examples:
      python -m dtrain_dagster clean
    """
    home = read_settings().home
    protected = [ROOT, Path.home(), Path(pwd.getpwuid(os.getuid()).pw_dir)]
    if not plan_removal(home, protected).ours:
        click.echo(f"{home}: there is nothing to remove")
        return
    with hold_home(home, "`dtrain_dagster clean`"):
        plan = plan_removal(home, protected)
        shown = ", ".join(plan.ours[:SHOWN]) + (" …" if len(plan.ours) > SHOWN else "")
        click.echo(f"removing from {home}: {shown}")
        if plan.others:
            click.echo(f"kept, since dtrain did not write it: {', '.join(plan.others[:SHOWN])}")
        if not yes:
            click.confirm("remove it?", abort=True)
        remove(plan_removal(home, protected))  # once more: a job may have started while the question stood there


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--go-on-with", "go_on", metavar="COMMAND", help="The command to suggest after Ctrl-C.  [default: the same command]"
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@refuses
def work(command: tuple[str, ...], go_on: str | None) -> None:
    """Run a command while no other command uses the home.

    It exits with the command's code; `make run` is started by this. A second one at the same time is refused, in words.
    The command holds the home even if this process is killed. One that carries a password or key is refused as well,
    also in files that it names by --config: Dagster would store it. After Ctrl-C it says what became of the jobs that
    the command had begun, what they cost, and how to go on.

    Where DAGSTER_HOME is not set, the command gets the folder dagster of the home, in which `dtrain ui` looks, too.

    \b
    Examples:
      python -m dtrain_dagster work dagster asset materialize \\
        -m dtrain_dagster.definitions --select 'not group:studies'
    """
    refuse_secret_on_command_line(command)
    settings = read_settings()
    home = make_home(settings.home)
    if not os.environ.get("DAGSTER_HOME"):  # without one, Dagster would forget what the command has made
        os.environ["DAGSTER_HOME"] = str(prepare_dagster_home(settings))
    what = f"`{Path(command[0]).name} {' '.join(command[1:3])}`".replace("\n", " ")
    began = time.time()
    with hold_home(home, what) as descriptor:
        try:
            process = subprocess.Popen(command, pass_fds=[descriptor])
        except OSError as error:
            click.echo(f"Error: {command[0]} cannot be started: {error.strerror or error}", err=True)
            sys.exit(EXIT_UNUSABLE)
        interrupts: list[int] = []  # Ctrl-C reaches the command too, whose end is waited for
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        code = process.wait()
    if interrupts:
        jobs = jobs_noted_since(home, began)
        say_after_work(read_settings(), jobs, go_on or shlex.join(["python", "-m", "dtrain_dagster", "work", *command]))
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main(prog_name="python -m dtrain_dagster")
