"""Every block of commands in the documentation is run by one test, or is listed here with the reason why none can.

The tests name the blocks that they run (`tests.docs.blocks.Part`), in the tables from which they take the commands.
"""

from __future__ import annotations

import subprocess
from collections import Counter
from typing import NamedTuple

import pytest

from tests.docs import test_azure_page, test_laptop_pages, test_reference_commands, test_tutorial
from tests.docs.blocks import DOCUMENTS, ROOT, Part, read_blocks
from tests.docs.page import Page
from tests.engines import test_pages_on_engines
from tests.examples import test_examples
from tests.frameworks import test_pages

ON_ENGINES = [page.part for pages in test_pages_on_engines.PAGES.values() for page in pages]
"""A page may be run on several engines: that counts once."""
PAGES = [*test_laptop_pages.PAGES, *test_azure_page.PAGES, *test_reference_commands.PAGES, *test_pages.PAGES,
         *(page for pages in test_pages_on_engines.PAGES.values() for page in pages),
         test_pages_on_engines.ADMINISTRATOR]  # fmt: skip
RUN: list[Part] = [
    *(part for number, part in enumerate(ON_ENGINES) if part not in ON_ENGINES[:number]),
    test_pages_on_engines.ADMINISTRATOR.part,
    test_tutorial.TUTORIAL,
    *(page.part for page in test_laptop_pages.PAGES),
    *test_azure_page.PARTS,
    *test_reference_commands.PARTS,
    *test_pages.PARTS,
    test_examples.TABLE,
    test_examples.LANGUAGE_MODEL,
    test_examples.LANGUAGE_MODEL_GRAPH,
]


class NotRun(NamedTuple):
    """A block that no test can run."""

    document: str
    begins: str
    """Its first words."""
    why: str


SUBSCRIPTION = "needs a subscription: the commands are Azure's own, or give it the addresses of one's own"
DOCKER = "builds and pushes images: needs Docker and a registry"
NOT_RUN = [
    NotRun("docs/installing.md", "pip install 'dtrain[kubernetes]'", "asks a package index"),
    NotRun("docs/proofs.md", "make test", "runs the tests that this one belongs to"),
    NotRun("docs/azure.md", "export DTRAIN_CLUSTER=azure_ml", SUBSCRIPTION),
    NotRun("deploy/azure/README.md", "az login", SUBSCRIPTION),
    NotRun("deploy/azure/README.md", "az deployment sub create", SUBSCRIPTION),
    NotRun("deploy/azure/README.md", "az group create", SUBSCRIPTION),
    NotRun("deploy/azure/README.md", "docker buildx", DOCKER),
    NotRun("deploy/azure/README.md", "az keyvault secret set", SUBSCRIPTION),
]

Blocks = dict[tuple[str, int], str]


def written() -> Blocks:
    """Return all blocks of all documents, by document and number."""
    return {
        (document.relative_to(ROOT).as_posix(), number): block.script
        for document in DOCUMENTS
        for number, block in enumerate(read_blocks(document.read_text()))
    }


def unclaimed(blocks: Blocks, run: list[Part], not_run: list[NotRun]) -> list[str]:
    """Return what is wrong: blocks without a test, or with two, and rows without a block."""
    claims = Counter((part.document, number) for part in run for number in part.numbers())
    wrong = [f"{part.document} {part.blocks}: has no such block" for part in run if not part.numbers()]
    for row in not_run:
        found = [key for key, script in blocks.items() if key[0] == row.document and script.startswith(row.begins)]
        claims.update(found)
        if len(found) != 1:
            wrong.append(f"{row.document}: {len(found)} blocks begin with {row.begins!r}")
    wrong += [
        f"{name} block {number} is run by no test:\n{blocks[name, number]}" for name, number in blocks.keys() - claims
    ]
    return wrong + [f"{name} block {number} is claimed {n} times" for (name, number), n in claims.items() if n > 1]


def test_every_block_is_run_by_one_test():
    assert unclaimed(written(), RUN, NOT_RUN) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.document}-{page.blocks.start}")
def test_what_is_run_of_a_page_is_still_in_it_and_is_shell(page: Page):
    """What a table fills in or leaves out of a page has to be there, long before the page is run."""
    done = subprocess.run(["bash", "-n", "-c", page.script()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_new_block_is_found():
    blocks = {("README.md", 0): "make run\n", ("README.md", 1): "dtrain jobs\n"}
    wrong = unclaimed(blocks, [Part("README.md", slice(0, 1))], [])
    assert wrong == ["README.md block 1 is run by no test:\ndtrain jobs\n"]


def test_a_block_with_two_claims_and_claims_without_a_block_are_found():
    run = [Part("README.md"), Part("README.md", slice(0, 1)), Part("README.md", slice(7, 8))]
    wrong = unclaimed({("README.md", 0): "make run\n"}, run, [NotRun("README.md", "az login", SUBSCRIPTION)])
    assert wrong == [
        "README.md slice(7, 8, None): has no such block",
        "README.md: 0 blocks begin with 'az login'",
        "README.md block 0 is claimed 2 times",
    ]
