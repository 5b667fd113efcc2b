"""The exit codes are a contract with clusters and launchers: the numbers stay, and each has its words."""

from __future__ import annotations

from trainer import exit_codes


def test_the_numbers_stay() -> None:
    named = {name: value for name, value in vars(exit_codes).items() if isinstance(value, int)}
    assert named == {"DONE": 0, "FAILED": 1, "UNUSABLE": 2, "LOST": 75, "BUDGET": 77, "EVICTED": 143}


def test_each_code_has_its_words_and_its_line_of_help() -> None:
    assert len(set(exit_codes.MEANINGS.values())) == len(exit_codes.MEANINGS) == 6
    lines = exit_codes.describe_exit_codes().splitlines()
    assert [int(line.split()[0]) for line in lines] == list(exit_codes.MEANINGS)
