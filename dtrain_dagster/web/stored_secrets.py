"""Secrets in the texts that Dagster stores before this project sees them: a run's configuration and tags, asset
metadata.

Pure, except for the files that a command line names. It finds the secrets that `trainer.secrets.addresses.secret_in`
knows, wherever they are in nested documents, also in YAML or JSON that is given as a text. Messages name the place, and
repeat nothing of the secret.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dtrain_dagster.support.notify import refuse_inline_secret
from dtrain_dagster.support.secrets import SecretError, secret_in
from trainer.printable import visible

REMEDY = (
    "what is given here would be stored, so it was refused: put the whole address into an environment variable "
    "of dtrain or into a vault, and write env:NAME or keyvault://VAULT/SECRET in its place"
)
_RUN_CONFIG = "runConfigData"
"""GraphQL's name of a run's configuration; paths in it are named from there on."""
_MOST_NESTED = 4
"""The most levels of texts within texts that are parsed as documents; a text further in is read literally."""
_LONGEST_DOCUMENT = 2**20
"""The longest text that is parsed; a longer one is read literally: YAML is slow."""
_LONGEST_NAME = 60
_TOO_DEEP = "the request is nested too deeply to be looked through for secrets"


def secret_within(value: object, where: str = "", nested: int = 0) -> str | None:
    """Return where in a document is a secret, and of what kind; None for none. ``where``: its name in words."""
    seen: dict[int, object] = {}  # aliases of YAML lead to one thing often, or round in a ring
    left = [(where, value)]
    while left:
        at, item = left.pop()
        if isinstance(item, str):
            inside = document(item) if nested < _MOST_NESTED else None
            if found := (secret_within(inside, at, nested + 1) if inside is not None else None) or _of_text(at, item):
                return found
        elif isinstance(item, Mapping | list | tuple) and id(item) not in seen:
            seen[id(item)] = item
            if isinstance(item, Mapping):
                for name in item:
                    if what := secret_in(str(name)):
                        return f"a name in {at or 'what was given'} carries {what}"
            pairs = item.items() if isinstance(item, Mapping) else enumerate(item)
            left += reversed([(_below(at, str(name)), child) for name, child in pairs])
    return None


def _of_text(at: str, text: str) -> str | None:
    if what := secret_in(text):
        return f"{at or 'what was given'} carries {what}"
    if at.endswith(".config.notify"):
        for part in text.split():
            try:
                refuse_inline_secret(at, part)
            except SecretError as error:
                return str(error)
    return None


def _below(at: str, name: str) -> str:
    if name == _RUN_CONFIG:
        return ""
    name = visible(name)[:_LONGEST_NAME]
    return f"{at}.{name}" if at else name


def document(text: str) -> Any:
    """Return the mapping or list that a text is as JSON or YAML, every YAML scalar as its text; None for others."""
    import yaml

    if len(text) > _LONGEST_DOCUMENT or not any(sign in text for sign in ":{["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = yaml.load(text, Loader=yaml.BaseLoader)  # not the one in C: deep nests end the process there
        except (yaml.YAMLError, ValueError):
            return None
    return found if isinstance(found, Mapping | list) else None


def secret_posted(path: str, query: str, body: bytes) -> str | None:
    """Return why a POST to Dagster's web server is refused, or None where it may pass. The reason is a secret in a
    GraphQL mutation, its variables or its literals, or in an asset's reported metadata.

    Queries pass, since they store nothing: the launchpad asks whether a configuration is valid while it is typed. An
    unreadable request passes as well, since Dagster reads it the same way and refuses it.
    """
    try:
        found = secret_in(path) and "the address of the request carries a secret"
        found = found or secret_within(dict(parse_qsl(query)))
        try:
            data = json.loads(body)
        except ValueError:
            data = None
        if path.rstrip("/") == "/graphql" and isinstance(data, dict) and isinstance(data.get("query"), str):
            found = found or _secret_in_graphql(data["query"], data.get("variables"))
        else:
            found = found or secret_within(data)
    except RecursionError:
        return _TOO_DEEP
    return found and f"{found}; {REMEDY}"


def _secret_in_graphql(query: str, variables: object) -> str | None:
    from graphql import GraphQLError, Visitor, parse, value_from_ast_untyped, visit
    from graphql.language.ast import ArgumentNode, ValueNode, VariableDefinitionNode

    if "mutation" not in query:  # the word cannot be written otherwise
        return None
    try:
        parsed = parse(query, no_location=True)
    except GraphQLError:
        return None
    given: list[tuple[str, ValueNode]] = []

    class Literals(Visitor):
        def enter_argument(self, node: ArgumentNode, *_: object) -> None:
            given.append((_below("", node.name.value), node.value))

        def enter_variable_definition(self, node: VariableDefinitionNode, *_: object) -> None:
            if node.default_value is not None:
                given.append((_below("", node.variable.name.value), node.default_value))

    if found := secret_within(variables):
        return found
    visit(parsed, Literals())
    return next(filter(None, (secret_within(value_from_ast_untyped(node), at) for at, node in given)), None)


def refuse_secret_on_command_line(command: Sequence[str]) -> None:
    """Raise `SecretError` where arguments, or files that they name by ``--config`` or ``-c``, carry a secret."""
    previous = ""
    for given in command:
        name, equals, value = given.partition("=")
        if not (equals and name.startswith("--")):
            name, value = (given[:2], given[2:]) if given[:2] == "-c" and given != "-c" else (previous, given)
        source = name if name and not secret_in(name) else "an argument of the command"
        _refuse(source, value)
        _refuse(source, given)
        for path in sorted(glob.glob(value)) if name in ("--config", "-c") else ():
            if Path(path).is_file():
                text = Path(path).read_text(encoding="utf-8", errors="replace")
                _refuse(f"{name} {path}", text, of_file=True)
        previous = given if given.startswith("-") and not equals else ""


def _refuse(source: str, text: str, of_file: bool = False) -> None:
    try:
        parsed = document(text) if of_file else None  # a file's text outside its document is not stored
        found = secret_within(text if parsed is None else parsed)
    except RecursionError:
        found = _TOO_DEEP
    if found:
        raise SecretError(f"{source}: {found}; {REMEDY}")
