"""The tutorial, followed to the letter: every block of commands in order, in one shell, in an empty home."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Part, script_of
from tests.docs.checkout import environment_in, make_checkout

TUTORIAL = Part("docs/tutorial.md")


def printed_lines(text: str) -> list[str]:
    """What the tutorial says that its commands print."""
    return [line for block in re.findall(r"^```text\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]


def form_of(line: str) -> str:
    """A printed line without what differs from run to run: names, times, numbers, and how a loss was noticed."""
    line = re.sub(r"(after [\d.]+ s) \(.*", r"\1", line.strip())
    line = re.sub(r"train-[0-9a-f]{8}-[0-9a-f]{8}", "JOB", line)
    line = re.sub(r"(\d+ min )?\d[\d.]* s\b", "TIME", line)
    return re.sub(r"-?\d[\d,.]*", "N", line)


def test_a_form_is_the_same_for_the_same_words_only():
    one, other = "took        20 s; 0.0163 node-hours", "took        1 min 17 s; 0.0637 node-hours"
    assert form_of(one) == form_of(other)
    assert form_of(one) != form_of(one.replace("node-hours", "hours"))


@pytest.mark.long  # five to ten minutes; each of its commands is parsed in the quick run (`test_commands`)
@pytest.mark.timeout(1800)
def test_the_tutorial_is_followed_to_the_letter(tmp_path: Path):
    checkout = make_checkout(tmp_path / "dtrain")
    done = subprocess.run(
        ["bash", "-c", script_of(TUTORIAL.read())],
        cwd=checkout, env=environment_in(checkout), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = done.stdout
    assert done.returncode == 0, said[-5000:]
    for promised in (
        "registered  stock-return-distribution version 1, alias champion",
        "did you mean training.learning_rate?",
        "lost node(s)",
        "took in node(s)",
        "lost to a failure",
        "resumed from checkpoints/",
        "over 2 launches",
        "job       mine",
        "test accuracy",
    ):
        assert promised in said, f"{promised!r} is not in\n{said[-8000:]}"
    forms = {form_of(line) for line in said.splitlines()}
    assert [line for line in printed_lines((ROOT / TUTORIAL.document).read_text()) if form_of(line) not in forms] == []
    assert not (checkout / ".dtrain" / "storage").exists(), "the last step cleans up"
    assert not (checkout / "my_model.py").exists()
