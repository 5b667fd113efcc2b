"""What clients PUT, held against a schema of our own, and against Microsoft's ARM schemas where a folder of them is at
hand (`schemas_folder`).

Ours (own_schema.json) was written by hand from Azure's public reference, for the parts that our clients send, and is
the same for each api-version; it always applies. Microsoft's are not part of this repository. The schemas find wrong
types, wrong words and missing fields; keys that they do not know pass them, so those are looked for besides.
Microsoft's need two repairs: what all variants of a thing have in common forbids whatever each has of its own, and a
code's ``hash_version`` is sent as a number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FILE = "Microsoft.MachineLearningServices.json"
OWN = Path(__file__).with_name("own_schema.json")
COMMON = "https://schema.management.azure.com/schemas/common/definitions.json"
TYPES = {
    "compute.put": "workspaces_computes",
    "codes.put": "workspaces_codes_versions",
    "environments.put": "workspaces_environments_versions",
    "models.put": "workspaces_models_versions",
    "job.put": "workspaces_jobs",
}
"""The schema's name of what each operation of the emulator takes."""


def schemas_folder() -> Path | None:
    """``DTRAIN_ARM_SCHEMAS``, or the folder beside the project where its reference material lies; None if absent."""
    beside = Path(__file__).resolve().parents[4] / "shared" / "azure" / "arm-schemas"
    folder = Path(os.environ.get("DTRAIN_ARM_SCHEMAS") or beside)
    return folder if folder.is_dir() else None


def violations(requests: list[dict[str, Any]], folder: Path | None) -> list[str]:
    """What is wrong with the PUT bodies among these requests (as `control("requests")` gives them); empty: nothing.
    ``folder`` holds Microsoft's schemas; None: by our own."""
    found = []
    for request in requests:
        if request["method"] != "PUT" or request["operation"] not in TYPES:
            continue
        version, kind = request["query"]["api-version"], TYPES[request["operation"]]
        schema, registry = _schema(folder, version)
        if kind not in schema["resourceDefinitions"]:
            found.append(f"{request['operation']}: version {version} has no {kind}")
            continue
        resource = {
            **request["body"],
            "name": request["path"].rpartition("/")[2],
            "apiVersion": version,
            "type": "Microsoft.MachineLearningServices/" + kind.replace("_", "/"),
        }
        checker = _Checker(schema, registry)
        definition = schema["resourceDefinitions"][kind]
        found += [f"{request['operation']} {version}: {why}" for why in checker.all(definition, resource)]
    return found


@cache
def _schema(folder: Path | None, version: str) -> tuple[dict[str, Any], Any]:
    from referencing import Registry
    from referencing.jsonschema import DRAFT4

    if folder is None:
        return json.loads(OWN.read_text()), Registry()
    schema = json.loads((folder / version / FILE).read_text())
    for definition in schema["definitions"].values():
        for part in definition.get("allOf", []):
            part.pop("additionalProperties", None)
    codes = schema["definitions"].get("CodeVersionProperties") or schema["definitions"].get("CodeVersionDetails") or {}
    if "properties" in codes.get("properties", {}):
        codes["properties"]["properties"] = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
    common = DRAFT4.create_resource(json.loads((folder / "common" / "definitions.json").read_text()))
    return schema, Registry().with_resource(COMMON, common)


class _Checker:
    def __init__(self, schema: dict[str, Any], registry: Any) -> None:
        self._schema, self._registry = schema, registry

    def all(self, definition: dict[str, Any], value: Any) -> Iterator[str]:
        for error in self._validator(definition).iter_errors(value):
            yield _explain(error)
        for path in self._unknown(definition, value, ""):
            yield f"unknown key {path}"

    def _validator(self, definition: dict[str, Any]) -> Any:
        import jsonschema

        whole = {**definition, "definitions": self._schema["definitions"]}
        return jsonschema.Draft4Validator(whole, registry=self._registry)

    def _parts(self, definition: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
        """The definition, and whatever it refers to that this value fits."""
        if "$ref" in definition:
            found = definition["$ref"]
            if found.startswith("#/definitions/"):
                yield from self._parts(self._schema["definitions"][found.rpartition("/")[2]], value)
            return
        yield definition
        for part in definition.get("allOf", []):
            yield from self._parts(part, value)
        for part in (*definition.get("oneOf", []), *definition.get("anyOf", [])):
            if self._validator(part).is_valid(value):
                yield from self._parts(part, value)

    def _unknown(self, definition: dict[str, Any], value: Any, path: str) -> Iterator[str]:
        parts = list(self._parts(definition, value))
        if isinstance(value, list):
            for part in parts:
                for item in value if "items" in part else ():
                    yield from self._unknown(part["items"], item, f"{path}[]")
            return
        if not isinstance(value, dict):
            return
        for name, inner in value.items():
            known = [part["properties"][name] for part in parts if name in part.get("properties", {})]
            known += [
                part["additionalProperties"]
                for part in parts
                if isinstance(part.get("additionalProperties"), dict) and name not in part.get("properties", {})
            ]
            # An object of which nothing is said may hold anything.
            free = not any(part.get("properties") or part.get("additionalProperties") for part in parts)
            if not known and not free:
                yield f"{path}.{name}"
            for one in known:
                yield from self._unknown(one, inner, f"{path}.{name}")


def _explain(error: Any) -> str:
    """An error of a choice says only that nothing fits; this is what is wrong with the variant that was meant."""
    while error.context:
        variants: dict[Any, list[Any]] = {}
        for inner in error.context:
            if inner.validator != "type" or inner.path:  # a template's expression, which nobody meant
                variants.setdefault(inner.schema_path[0], []).append(inner)
        if not variants:
            break

        def other_kind(errors: list[Any]) -> bool:
            """Is it another variant, by the field that names the kind?"""
            return any(str(inner.path[-1] if inner.path else "").endswith("Type") for inner in errors)

        meant = [errors for errors in variants.values() if not other_kind(errors)] or list(variants.values())
        error = max((inner for errors in meant for inner in errors), key=lambda inner: len(inner.absolute_path))
    return f"{'.'.join(map(str, error.absolute_path)) or 'body'}: {error.message}"[:400]
