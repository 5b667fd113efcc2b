"""`dtrain completion`: the script with which a shell completes commands, options, and names of jobs."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_DTRAIN_COMPLETE"
"""The variable by which the script asks this program for what is possible."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands in a shell.

    Commands, options and names of jobs, fleets and searches are completed. bash has to be 4.4 or newer.

    \b
    Examples:
      eval "$(dtrain completion bash)"     (in ~/.bashrc, to keep it)
      eval "$(dtrain completion zsh)"      (in ~/.zshrc, after compinit)
      dtrain completion fish > ~/.config/fish/completions/dtrain.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # click brings one for each of `SHELLS`
    root = click.get_current_context().find_root().command
    click.echo(made(root, {}, "dtrain", VARIABLE).source())
