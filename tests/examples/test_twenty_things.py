"""Twenty things in five tools: the table of docs/comparison.md has the lines of each snippet of examples/twenty_things,
and the snippets run, where their tool is there."""

from __future__ import annotations

import ast
import importlib
import math
import re
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch

from examples.twenty_things import with_dtrain

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "twenty_things"
TOOLS = ("dtrain", "lightning", "ray_train", "composer", "torchft")
"""In the order of the table's columns."""
WIDTH = 120
_HEADING = re.compile(r"^# (\d+) (\w+): (.*)$", re.MULTILINE)
_ROW = re.compile(r"^\| (\d+) (.+?) \| (.+) \|$", re.MULTILINE)


def blocks_of(tool: str) -> dict[str, str]:
    """The code below each heading of a tool's file, by the word in the heading."""
    text = (FOLDER / f"with_{tool}.py").read_text()
    found = list(_HEADING.finditer(text))
    assert [int(heading[1]) for heading in found] == list(range(1, 21)), tool
    ends = [heading.start() for heading in found[1:]] + [len(text)]
    return {heading[2]: text[heading.end() : end] for heading, end in zip(found, ends, strict=True)}


def statements(name: str, code: str) -> Counter[str]:
    """The statements of a snippet, each on one line without comments; without the line that names its function."""
    lines = [line.strip() for line in ast.unparse(ast.parse(code)).splitlines()]
    return Counter(line for line in lines if line and line != f"def {name}() -> Any:")


def count_lines(blocks: dict[str, str], name: str) -> int | None:
    """The lines of `plain`; of others, those that it does not have, and of `stopping` those that `measure` does not
    have either. A statement is as many lines as its characters need. None where a tool has no snippet."""
    own = statements(name, blocks[name])
    before = {"plain": (), "stopping": ("plain", "measure")}.get(name, ("plain",))
    known = Counter[str]()
    for each in before:
        known |= statements(each, blocks[each])
    return sum(math.ceil(len(line) / WIDTH) * times for line, times in (own - known).items()) if own else None


def table() -> dict[int, list[str]]:
    """The cells of the page's table, by the number of the thing."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    return {int(number): cells.split(" | ") for number, _, cells in _ROW.findall(text)}


def test_the_table_has_the_lines_of_each_snippet() -> None:
    rows = table()
    assert sorted(rows) == list(range(1, 21))
    names = [list(blocks_of(tool)) for tool in TOOLS]
    assert all(each == names[0] for each in names), "the files have the same headings"
    for place, tool in enumerate(TOOLS):
        blocks = blocks_of(tool)
        for number, name in enumerate(blocks, 1):
            cell, lines = rows[number][place], count_lines(blocks, name)
            found = re.match(r"(\d+)(?!\d)", cell)
            assert (int(found[1]) if found else None) == lines, f"{number} {name}, {tool}: {cell!r}, and it is {lines}"


def test_a_wrapped_statement_is_as_long_as_its_characters() -> None:
    blocks = {
        "plain": "def plain() -> Any:\n    a(1)\n",
        "other": "def other() -> Any:\n    a(1)\n    b(\n        2,\n    )  # two\n",
    }
    assert count_lines(blocks, "plain") == 1
    assert count_lines(blocks, "other") == 1
    blocks["other"] += f"    c({'x' * WIDTH})\n    a(1)\n"
    assert count_lines(blocks, "other") == 4, "a line that is there twice is new once"
    assert count_lines(blocks | {"other": "\n"}, "other") is None


@pytest.mark.parametrize("tool", TOOLS)
def test_each_snippet_compiles(tool: str) -> None:
    """Nobody else runs those of tools that are not installed."""
    names = {heading[2] for heading in _HEADING.finditer((FOLDER / f"with_{tool}.py").read_text())}
    tree = ast.parse((FOLDER / f"with_{tool}.py").read_text())
    compile(tree, f"with_{tool}.py", "exec")
    defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    assert {name for name, code in blocks_of(tool).items() if statements(name, code)} == defined & names


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tools write into the present folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


NAMES = tuple(blocks_of("dtrain"))


@pytest.mark.parametrize("name", NAMES)
def test_dtrain(name: str) -> None:
    """Two passes over 256 samples, in batches of 32."""
    result = getattr(with_dtrain, name)()
    if name == "stopping":
        assert result.steps < 20 * 8, "it stopped early"
        assert 0 < result.best_score <= 1
        return
    assert result.samples_seen == 2 * 256
    assert result.steps == (4 if name == "accumulation" else 16)
    assert all(math.isfinite(figure) for figure in result.test.values())
    if name == "measure":
        assert 0 < result.test["f1"] <= 1
    if name == "resume":
        again = with_dtrain.resume()
        assert (again.run_dir, again.steps) == (result.run_dir, 16)


@pytest.mark.slow
def test_lightning() -> None:
    for package in ("lightning", "torchmetrics", "torchdata"):
        pytest.importorskip(package)
    module = importlib.import_module("examples.twenty_things.with_lightning")
    for name in NAMES[:-2]:
        trainer = getattr(module, name)()
        if name not in ("gan", "stopping"):
            assert trainer.global_step == (4 if name == "accumulation" else 16), name


@pytest.fixture
def in_local_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables with which Ray's local mode makes a group of one rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("in_local_mode")
def test_ray_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without workers, all in this process."""
    config = pytest.importorskip("ray.train").ScalingConfig(num_workers=0)
    module = importlib.import_module("examples.twenty_things.with_ray_train")
    monkeypatch.setattr(module, "WORKERS", config)
    for name in NAMES[:-2]:
        result = getattr(module, name)()
        assert result.error is None
        assert name in ("gan", "contrastive") or math.isfinite(result.metrics["loss"]), name


if __name__ == "__main__":
    every = {tool: blocks_of(tool) for tool in TOOLS}
    for number, name in enumerate(every["dtrain"], 1):
        print(number, name, *(count_lines(blocks, name) for blocks in every.values()), sep="\t")
