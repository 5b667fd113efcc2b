"""The tutorial, followed to the letter: every block of commands in order, in one shell, in an empty home."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.docs.blocks import Part, script_of
from tests.docs.checkout import environment_in, make_checkout

TUTORIAL = Part("docs/tutorial.md")


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
    assert not (checkout / ".dtrain" / "storage").exists(), "the last step cleans up"
    assert not (checkout / "my_model.py").exists()
