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

    Commands, options, files, and names of jobs, datasets, fleets and searches are completed. bash has to be 4.4 or
    newer.

    \b
    Examples:
      eval "$(dtrain completion bash)"     # in ~/.bashrc, to keep it
      eval "$(dtrain completion zsh)"      # in ~/.zshrc, after compinit
      dtrain completion fish > ~/.config/fish/completions/dtrain.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None  # click brings one for each of `SHELLS`
    root = click.get_current_context().find_root().command
    script = made(root, {}, "dtrain", VARIABLE).source()
    click.echo(whole_descriptions(script) if shell == "fish" else script)


def whole_descriptions(script: str) -> str:
    """Return click's script for fish with descriptions that may have commas: it takes what stands before the first one.
    Pure."""
    return script.replace('string split ","', 'string split -m 1 ","')
