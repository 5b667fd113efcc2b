"""Every command and option has a help that fits into 80 columns, an example, and a place in the reference."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dtrain_dagster.cli.main import EXIT_CODES, SECTIONS, load_command, main

TOLD = {name: text for commands in SECTIONS.values() for name, text in commands.items()}
COMMANDS = {f"dtrain {name}": load_command(name) for name in TOLD}
spec = importlib.util.spec_from_file_location("made", Path(__file__).parents[3] / "docs" / "generate_reference.py")
assert spec is not None
assert spec.loader is not None
made = importlib.util.module_from_spec(spec)
spec.loader.exec_module(made)


def options_of(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def shown_help(words: str) -> str:
    done = CliRunner().invoke(main, [*words.split()[1:], "--help"], prog_name="dtrain", terminal_width=80)
    assert done.exit_code == 0
    return done.output


def test_the_reference_has_every_command_and_option():
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", made.describe_commands(), re.MULTILINE | re.DOTALL))
    assert list(sections) == list(COMMANDS)
    assert len(sections) == 14
    for words, command in COMMANDS.items():
        section = sections[words]
        text, blocks = made.split_help(command)
        assert text.splitlines()[0] in section
        assert command.get_short_help_str(200) == TOLD[words.removeprefix("dtrain ")], "as in the list of all"
        assert f"```text\n{words} " in section, "its usage"
        for option in options_of(command):
            [row] = [line for line in section.splitlines() if re.match(rf"\| `[^`]*{option.opts[0]}(?![\w-])", line)]
            assert row.count("|") - row.count("\\|") == 4, row
        for _, block in blocks:
            assert block in section


@pytest.mark.parametrize("words", COMMANDS)
def test_each_help_says_what_each_option_means_and_fits(words: str):
    command, shown = COMMANDS[words], shown_help(words)
    for option in options_of(command):
        meaning, _ = made.split_default(option)
        assert meaning, f"{words} {option.opts[0]} has no help"
        kind = option.make_metavar(click.Context(command))
        assert option.is_flag or isinstance(option.type, click.Choice) or kind.isupper() or option.metavar, (
            f"{words} {option.opts[0]} {kind}: name what it takes"
        )
    wide = [line for line in shown.splitlines() if len(line) > 80]
    assert not wide, "lines of help are for 80 columns"
    cut = [line for line in shown.splitlines() if line.endswith("...") and not line.startswith("Usage:")]
    assert not cut, "the first sentence of a help fits into a line"
    assert [title for title, _ in made.split_help(command)[1]][-1:] == ["Examples"], f"{words} has no example"


def test_each_example_is_of_a_command_with_options_that_exist():
    for command in COMMANDS.values():
        for block in (block for title, block in made.split_help(command)[1] if title == "Examples"):
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                own = re.split(r" -- | \| | > |\s{2,}\(", line)[0]
                found = re.search(r"(?<![\w/])dtrain ((?:[a-z-]+ ?)+)", own)
                assert found, line
                named = max((name for name in COMMANDS if f"{found[0]} ".startswith(f"{name} ")), key=len, default=None)
                assert named, f"{line}: no such command"
                known = {
                    name for option in options_of(COMMANDS[named]) for name in (*option.opts, *option.secondary_opts)
                }
                if named != "dtrain launch":  # what follows is another program's
                    assert set(re.findall(r" (--[a-z-]+)", own)) <= known, line


def test_exit_codes_are_told():
    shown = " ".join(shown_help("dtrain").split())
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in shown
        assert f"| {code} | {meaning} |" in made.describe_commands()


def test_dtrain_alone_prints_the_help_and_its_version():
    assert CliRunner().invoke(main, [], prog_name="dtrain", terminal_width=80).output == shown_help("dtrain")
    said = CliRunner().invoke(main, ["--version"], prog_name="dtrain")
    assert said.output == f"dtrain {version('dtrain')}\n"
