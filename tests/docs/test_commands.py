"""Each command in a document exists, and has the options that it is shown with. That they run is proved by other tests:
`test_every_block_is_run` adds them up."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import click
import pytest

from dtrain_dagster.__main__ import main as home
from dtrain_dagster.cli.main import main as dtrain
from tests.docs.blocks import DOCUMENTS, ROOT, read_blocks, read_commands

WITH_BLOCKS = [path for path in DOCUMENTS if read_blocks(path.read_text())]


def check_click(command: click.Command, words: list[str]) -> None:
    """Raise `click.UsageError` for a subcommand or an option that there is not."""
    context = click.Context(command, info_name=words[0])
    arguments = words[1:]
    while isinstance(command, click.Group):
        context.args = []
        names = [word for word in arguments if not word.startswith("-")]
        if not names:
            break
        found = command.get_command(context, names[0])
        if found is None:
            raise click.UsageError(f"no command {names[0]!r}")
        arguments = arguments[arguments.index(names[0]) + 1 :]
        command, context = found, click.Context(found, parent=context, info_name=names[0])
    command.make_parser(context).parse_args(list(arguments))


def check(words: list[str]) -> None:
    """Raise an error for a command of dtrain, Dagster, make or Python that cannot be given so."""
    name, *rest = words
    if name == "dtrain":
        check_click(dtrain, words)
    elif name == "dagster":
        from dagster._cli import create_dagster_cli

        check_click(create_dagster_cli(), words)
    elif name == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert {word for word in rest if "=" not in word and not word.startswith("-")} <= set(targets), rest
    elif rest[:2] == ["-m", "dtrain_dagster"]:
        assert rest[2] in home.commands, rest[2]
        check(rest[3:] or ["true"])
    elif name in ("python", "python3") and rest[:1] == ["-m"] and rest[1].split(".")[0] in OURS:
        assert importlib.util.find_spec(rest[1]), rest[1]
    elif name in ("python", "python3") and rest and rest[0].endswith(".py") and "/" in rest[0]:
        assert (ROOT / rest[0]).exists(), rest[0]


OURS = ("trainer", "dtrain_dagster", "benchmarks", "examples", "harness", "tests")
"""Packages of this repository, of which each module that is named has to exist."""


@pytest.mark.parametrize("document", WITH_BLOCKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_can_be_given_as_it_is_written(document: Path):
    for block in read_blocks(document.read_text()):
        for words in read_commands(block.script):
            try:
                check(words)
            except click.UsageError as error:
                if block.kind != "fails":
                    pytest.fail(f"{document.name}: {' '.join(words)}: {error.format_message()}")


def check_mention(words: list[str]) -> None:
    """Raise `click.UsageError` if a command of dtrain that prose mentions, or an option of it, does not exist. What it
    needs besides, prose leaves out."""
    command: click.Command = dtrain
    arguments = words[1:]
    while isinstance(command, click.Group) and arguments and re.fullmatch("[a-z][a-z-]*", arguments[0]):
        found = command.get_command(click.Context(command), arguments.pop(0))
        if found is None:
            raise click.UsageError(f"no command {' '.join(words)!r}")
        command = found
    named = {word for word in arguments if word.startswith("--") and word != "--"}
    has = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    if missing := named - has - {"--help"}:
        raise click.UsageError(f"{' '.join(words)!r} has no option {', '.join(sorted(missing))}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_prose_mentions_exists(document: Path):
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for mention in re.findall(r"`(dtrain [^`]+)`", prose):
        own = re.split(r" -- | \| | …", mention.replace("\n", " "))[0]
        check_mention(own.split())


@pytest.mark.parametrize("words", ["dtrain jog", "dtrain dashboard", "dtrain cost JOB --usage"])
def test_a_command_that_prose_should_not_mention_is_found(words: str):
    with pytest.raises(click.UsageError):
        check_mention(words.split())


@pytest.mark.parametrize(
    "words",
    [
        "dtrain job",
        "dtrain jobs --colour",
        "python -m dtrain_dagster work dagster asset wipe --al",
        "make tee",
        "python -m trainer.x",
    ],
)
def test_a_command_that_cannot_be_given_is_found(words: str):
    with pytest.raises((click.UsageError, AssertionError, ModuleNotFoundError)):
        check(words.split())
