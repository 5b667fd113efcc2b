"""The reference of the command line as Markdown, made from the commands themselves: name, purpose, usage, every option
with its default and meaning, the fields of ``--json``, and the exit codes.

    python -m dtrain_dagster.cli.reference > commands.md
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import click

from dtrain_dagster.cli.json_output import JsonOption
from dtrain_dagster.cli.main import EXIT_CODES, SECTIONS, main

PROGRAM = "dtrain"


def describe_commands() -> str:
    """Return the reference: one section per command, in the order of ``dtrain --help``."""
    parts = [_introduction()]
    for words, command in walk_commands():
        parts.append(describe_command(words, command))
    return "\n".join(parts)


def walk_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield each command with its words, such as ``dtrain jobs``."""
    for command in (command for commands in SECTIONS.values() for command in commands):
        yield f"{PROGRAM} {command.name}", command


def describe_command(words: str, command: click.Command) -> str:
    """Return the section of one command. Pure."""
    text, examples = split_help(command)
    context = click.Context(command, info_name=words)
    lines = [
        f"## {words}",
        "",
        text,
        "",
        "```text",
        " ".join([words, *command.collect_usage_pieces(context)]),
        "```",
        "",
    ]
    options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
    rows = [describe_option(option, context) for option in options if not option.hidden and "--help" not in option.opts]
    if rows:
        lines += ["| option | default | meaning |", "|---|---|---|", *rows, ""]
    for title, block in examples:
        lines += [f"{title}:", "", "```sh" if title == "Examples" else "```text", block, "```", ""]
    for option in options:
        if isinstance(option, JsonOption):
            lines += ["Fields of `--json`:", "", "| field | meaning |", "|---|---|"]
            lines += [f"| `{name}` | {_cell(meaning)} |" for name, meaning in option.fields.items()] + [""]
    return "\n".join(lines)


def split_help(command: click.Command) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of a command's help as paragraphs, and its blocks, such as the examples, as (title, text).
    Pure."""
    paragraphs, blocks = [], []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(command.help or "")):
        if part.startswith("\b\n"):
            title, _, block = part.removeprefix("\b\n").partition("\n")
            blocks.append((title.rstrip(":"), textwrap.dedent(block).rstrip()))
        else:
            paragraphs.append(" ".join(part.split()))
    return "\n\n".join(paragraphs), blocks


def describe_option(option: click.Option, context: click.Context) -> str:
    """Return a row of the table of options. Pure."""
    name = ", ".join(sorted((*option.opts, *option.secondary_opts), key=len, reverse=True))
    metavar = "" if option.is_flag or option.count else f" {_code(option.make_metavar(context))}"
    said, stated = split_default(option)
    default = _cell(stated)
    if not default and option.required:
        default = "required"
    elif not default and option.show_default and not option.is_flag:
        default = f"`{_code(str(option.get_default(context)))}`"
    bounds = _bounds(option)
    return f"| `{name}{metavar}` | {default} | {_cell(said)}{bounds} |"


def split_default(option: click.Option) -> tuple[str, str]:
    """Return the meaning of an option, and the default that its help states in words, "" for none. Pure."""
    found = re.search(r"\s*\[default: (.*)\]$", option.help or "")
    return ((option.help or "")[: found.start()], found[1]) if found else (option.help or "", "")


def _bounds(option: click.Option) -> str:
    kind = option.type
    if not isinstance(kind, click.IntRange | click.FloatRange):
        return ""
    if kind.min is not None and kind.max is not None:
        return f" From {kind.min:g} to {kind.max:g}."
    return f" At least {kind.min:g}." if kind.min is not None else f" At most {kind.max:g}."


def _cell(text: str) -> str:
    """Return a text for a cell of a table of Markdown."""
    return _code(text).replace("*", "\\*").replace("<", "&lt;")


def _code(text: str) -> str:
    """Return a text for code within a cell of a table of Markdown."""
    return " ".join(text.split()).replace("|", "\\|")


def _introduction() -> str:
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items())
    listed = "\n\n".join(
        f"{title}: " + ", ".join(f"[`{PROGRAM} {each.name}`](#{PROGRAM}-{each.name})" for each in commands)
        for title, commands in SECTIONS.items()
    )
    return (
        f"{split_help(main)[0]}\n\n{listed}\n\n| exit code | meaning |\n|---|---|\n{codes}\n\n"
        "`train` and `launch` end with the code of the process that failed first. Of what `--json` prints, times are "
        "Unix seconds, durations seconds, and dollars US dollars at list price, where a field does not say otherwise; "
        "what is not known is null. `nodes[].node` is a field of each item of the list `nodes`, and `causes.*` any "
        "entry of the object `causes`, whose names are data. Names of fields stay; new ones may be added.\n"
    )


if __name__ == "__main__":
    click.echo(describe_commands(), nl=False)
