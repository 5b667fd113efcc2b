"""The templates of `deploy/azure`, as far as they can be read without Azure and without its compiler: what they open,
whom they trust, and whether the table that explains it says the same. That Azure takes them is not tested here."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AZURE = ROOT / "deploy" / "azure"
FILES = sorted(AZURE.rglob("*.bicep"))
SCHEMA = ROOT.parent / "shared/azure/arm-schemas/2024-10-01-preview/Microsoft.MachineLearningServices.json"
TOO_MUCH = {
    "8e3af657-a8ff-443c-a75c-2fe8c4bcb635": "Owner",
    "b24988ac-6180-42a0-ab88-20f7382dd24c": "Contributor",
    "18d7d88d-d35e-4fb5-a5c3-7773c20a72d9": "User Access Administrator",
    "f58310d9-a9f6-439a-9e8d-f62e7b41a168": "Role Based Access Control Administrator",
}
CLOSED: dict[str, dict[str, Any]] = {
    "Microsoft.Storage/storageAccounts": {
        "publicNetworkAccess": "Disabled",
        "allowBlobPublicAccess": False,
        "allowSharedKeyAccess": False,
        "allowCrossTenantReplication": False,
        "minimumTlsVersion": "TLS1_2",
        "supportsHttpsTrafficOnly": True,
        "networkAcls": {"bypass": "AzureServices", "defaultAction": "Deny"},
    },
    "Microsoft.Storage/storageAccounts/blobServices/containers": {"publicAccess": "None"},
    "Microsoft.KeyVault/vaults": {
        "publicNetworkAccess": "Disabled",
        "enableRbacAuthorization": True,
        "enableSoftDelete": True,
        "enablePurgeProtection": True,
        "networkAcls": {"bypass": "AzureServices", "defaultAction": "Deny"},
    },
    "Microsoft.ContainerRegistry/registries": {
        "publicNetworkAccess": "Disabled",
        "adminUserEnabled": False,
        "anonymousPullEnabled": False,
    },
    "Microsoft.MachineLearningServices/workspaces": {
        "publicNetworkAccess": "Disabled",
        "allowPublicAccessWhenBehindVnet": False,
        "systemDatastoresAuthMode": "Identity",
        "hbiWorkspace": True,
    },
}
OPEN_TYPES = {  # which nobody can call, or which only explain, name or restrict
    "Microsoft.Authorization/roleAssignments",
    "Microsoft.Authorization/roleDefinitions",
    "Microsoft.Consumption/budgets",
    "Microsoft.ManagedIdentity/userAssignedIdentities",
    "Microsoft.Network/natGateways",
    "Microsoft.Network/networkSecurityGroups",
    "Microsoft.Network/privateDnsZones",
    "Microsoft.Network/privateDnsZones/virtualNetworkLinks",
    "Microsoft.Network/privateEndpoints",
    "Microsoft.Network/privateEndpoints/privateDnsZoneGroups",
    "Microsoft.Network/publicIPAddresses",
    "Microsoft.Network/virtualNetworks",
    "Microsoft.Storage/storageAccounts/blobServices",
    "Microsoft.Storage/storageAccounts/managementPolicies",
}

parsed = pytest.mark.skipif(
    importlib.util.find_spec("pycep") is None or importlib.util.find_spec("regex") is None,
    reason="pycep-parser, which reads Bicep, is not installed",
)


@pytest.fixture(scope="module")
def templates() -> dict[str, dict[str, Any]]:
    from pycep import BicepParser

    parser = BicepParser()
    return {str(file.relative_to(AZURE)): parser.parse(file_path=file) for file in FILES}


def resources(templates: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(symbol, type, body) of everything that the templates make, loops and conditions unwrapped."""
    for template in templates.values():
        for symbol, item in template.get("resources", {}).items():
            if not item["existing"]:
                body = item["config"]
                yield symbol, item["type"], body.get("config", body) if isinstance(body, dict) else body


def test_they_are_there() -> None:
    assert {file.name for file in FILES} == {
        *("main.bicep", "budget.bicep", "identities.bicep", "images.bicep", "location_role.bicep", "network.bicep"),
        *("private_endpoints.bicep", "roles.bicep", "storage.bicep", "vault.bicep", "workspace.bicep"),
    }


@parsed
def test_whatever_can_be_open_is_closed(templates: dict[str, dict[str, Any]]) -> None:
    seen = set()
    for symbol, kind, body in resources(templates):
        seen.add(kind)
        expected = CLOSED.get(kind, {})
        found = {name: body["properties"].get(name) for name in expected}
        assert found == expected, symbol
    assert seen == set(CLOSED) | OPEN_TYPES, "a kind of resource that nobody has thought about"


@parsed
def test_data_is_kept_when_it_is_overwritten_or_deleted(templates: dict[str, dict[str, Any]]) -> None:
    [blobs] = [body for _, kind, body in resources(templates) if kind.endswith("/blobServices")]
    properties = blobs["properties"]
    assert properties["isVersioningEnabled"] == "versioning"
    assert properties["deleteRetentionPolicy"]["enabled"] is True
    assert properties["containerDeleteRetentionPolicy"]["enabled"] is True
    modules = templates["main.bicep"]["modules"]
    assert modules["dataStorage"]["config"]["params"]["versioning"] is True


@parsed
def test_roles_name_each_operation_and_none_is_too_much(templates: dict[str, dict[str, Any]]) -> None:
    definitions = [body for _, kind, body in resources(templates) if kind.endswith("/roleDefinitions")]
    assert len(definitions) == 4
    for body in definitions:
        [permission] = body["properties"]["permissions"]
        operations = [*permission["actions"], *permission["dataActions"]]
        assert operations
        assert len(operations) == len({operation.lower() for operation in operations})
        for operation in operations:
            assert re.fullmatch(r"Microsoft\.[A-Za-z]+(/[A-Za-z]+)+/(read|write|delete|action)", operation)
            assert not re.search(r"Authorization|listKeys|readSecrets|connections|metadata/secrets", operation, re.I)
    text = "\n".join(file.read_text() for file in FILES)
    assert not [name for guid, name in TOO_MUCH.items() if guid in text]


@parsed
def test_the_table_explains_every_assignment_and_no_other(templates: dict[str, dict[str, Any]]) -> None:
    assigned = {}
    for symbol, kind, body in resources(templates):
        if kind.endswith("/roleAssignments"):
            properties = body["properties"]
            assert properties["principalType"] == "ServicePrincipal"
            assert "scope" in body or symbol == "orchestratorReadsLocations", f"{symbol} is on the whole resource group"
            assigned[symbol] = properties["principalId"].removesuffix("PrincipalId")
    rows = re.findall(
        r"^\| `(\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", (AZURE / "README.md").read_text(), re.M
    )
    assert {name: identity for name, identity, *_ in rows} == assigned
    assert all(why.strip() for *_, why in rows)


@parsed
def test_nodes_change_run_directories_and_logs_and_nothing_else(templates: dict[str, dict[str, Any]]) -> None:
    """By a condition on each assignment that could change a blob. That Azure takes it is not tested here."""
    text = (AZURE / "modules/roles.bicep").read_text()
    folders = {}
    for symbol, kind, body in resources(templates):
        properties = body.get("properties", {})
        if "blobContributor" not in str(properties.get("roleDefinitionId")):
            continue
        if kind.endswith("/roleAssignments") and properties["principalId"] != "orchestratorPrincipalId":
            assert properties["conditionVersion"] == "2.0"
            definition = re.search(rf"^var {properties['condition']} = '(.*)'$", text, re.M)
            assert definition is not None
            [folders[symbol]] = re.findall(r"StringLike \\'([^']*)\\'", definition[1])
    assert folders == {"nodesOnContainer": "jobs/*", "nodesOnWorkspaceStorage": "ExperimentRun/*"}
    nothing = re.search(r"^var changesNothing = '(.*)'$", text, re.M)
    assert nothing is not None
    assert set(re.findall(r"\$\{blobs\}/([a-z/]+)", nothing[1])) == {"write", "add/action", "delete", "move/action"}


@parsed
def test_the_network_lets_in_nodes_among_themselves_and_nobody_else(templates: dict[str, dict[str, Any]]) -> None:
    groups = {symbol: body for symbol, kind, body in resources(templates) if kind.endswith("/networkSecurityGroups")}
    assert set(groups) == {"nodesRules", "endpointsRules", "orchestratorRules"}
    for symbol, group in groups.items():
        rules = [rule["properties"] for rule in group["properties"]["securityRules"]]
        inbound = [rule for rule in rules if rule["direction"] == "Inbound"]
        last = max(inbound, key=lambda rule: rule["priority"])
        assert (last["access"], last["priority"], last["sourceAddressPrefix"]) == ("Deny", 4096, "*"), symbol
        for rule in rules:
            assert len(rule.get("description", "")) <= 140
            if rule["access"] == "Allow":
                places = [
                    value
                    for name, value in rule.items()
                    if "Prefix" in name or name in ("protocol", "destinationPortRange")
                ]
                assert "*" not in places, rule
                assert "Internet" not in str(places), rule
        priorities = [(rule["direction"], rule["priority"]) for rule in rules]
        assert len(priorities) == len(set(priorities))
    outbound = [
        rule["properties"]
        for rule in groups["nodesRules"]["properties"]["securityRules"]
        if rule["properties"]["direction"] == "Outbound"
    ]
    assert max(outbound, key=lambda rule: rule["priority"])["access"] == "Deny"
    [network] = [body for _, kind, body in resources(templates) if kind.endswith("/virtualNetworks")]
    for subnet in network["properties"]["subnets"]:
        assert subnet["properties"]["networkSecurityGroup"]
        assert subnet["properties"]["defaultOutboundAccess"] is False


@parsed
def test_modules_get_the_parameters_that_they_have(templates: dict[str, dict[str, Any]]) -> None:
    for symbol, module in templates["main.bicep"]["modules"].items():
        target = templates[module["detail"]["path"]]
        wanted = {name for name, item in target["parameters"].items() if item["default"] is None}
        given = set(module["config"]["params"])
        assert wanted <= given <= set(target["parameters"]), symbol
    for match in re.finditer(r"(\w+)\.outputs\.(\w+)", (AZURE / "main.bicep").read_text()):
        module = templates["main.bicep"]["modules"][match[1]]
        assert match[2] in templates[module["detail"]["path"]]["outputs"], match[0]


@parsed
def test_names_are_short_enough(templates: dict[str, dict[str, Any]]) -> None:
    decorators = templates["main.bicep"]["parameters"]["prefix"]["decorators"]
    [longest] = [item["argument"] for item in decorators if item["type"] == "max_length"]
    for symbol, module in templates["main.bicep"]["modules"].items():
        name = str(module["config"]["params"].get("name", ""))
        limits = templates[module["detail"]["path"]]["parameters"].get("name", {}).get("decorators", [])
        for item in limits:
            if item["type"] == "max_length":
                filled = name.replace("${prefix}", "p" * longest).replace(
                    "${uniqueString(resourceGroup().id)}", "u" * 13
                )
                assert "$" not in filled
                assert len(filled) <= item["argument"], f"{symbol}: {filled}"


@parsed
@pytest.mark.skipif(not SCHEMA.exists(), reason="Azure's JSON schemas are not here")
def test_the_workspace_is_one_that_azures_schema_knows(templates: dict[str, dict[str, Any]]) -> None:
    schema = json.loads(SCHEMA.read_text())
    [body] = [body for _, kind, body in resources(templates) if kind == "Microsoft.MachineLearningServices/workspaces"]
    known = schema["definitions"]["WorkspaceProperties"]["properties"]
    assert body["properties"].keys() <= known.keys()
    for name, value in body["properties"].items():
        kinds = [option.get("enum") or option.get("type") for option in known[name].get("oneOf", [known[name]])]
        if isinstance(value, bool):
            assert "boolean" in kinds, name
        elif any(isinstance(kind, list) for kind in kinds):
            assert any(isinstance(kind, list) and value in kind for kind in kinds), name


def test_there_is_no_compute_no_secret_and_no_key_in_them() -> None:
    text = "\n".join(file.read_text() for file in FILES)
    assert "workspaces/computes@" not in text
    assert not re.search(r"listKeys\(|listAccountSas|connectionString|adminPassword|@secure", text)
    assert not re.search(r"deny(Settings)?Mode: 'none'|0\.0\.0\.0/0", text)


@pytest.mark.parametrize("name", ["requirements-nodes.txt", "requirements-serving.txt"])
def test_images_hold_what_the_project_pins(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    pins = dict(re.fullmatch(r"([A-Za-z0-9-]+)(.*)", line).groups() for line in lines)  # type: ignore[union-attr]
    for line in (AZURE / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, range_ = re.fullmatch(r"([A-Za-z0-9-]+)(.*)", line).groups()  # type: ignore[union-attr]
            assert range_ == pins.get(package, range_ if package.startswith("azure-") else None), package


def test_the_nodes_image_holds_what_trainer_imports() -> None:
    named = {
        "pynvml": "nvidia-ml-py",
        "azure": "azure-storage-blob",
        "requests": "mlflow",
        "urllib3": "mlflow",
        "pydantic_core": "pydantic",
    }
    held = set(re.findall(r"^([A-Za-z0-9-]+)", (AZURE / "requirements-nodes.txt").read_text(), re.M))
    import ast
    import sys

    for file in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {name.partition(".")[0] for name in names}:
                if top not in sys.stdlib_module_names and top != "trainer":
                    assert named.get(top, top) in held, f"{file.name} imports {top}"


def test_the_serving_image_holds_what_a_model_needs() -> None:
    from dtrain_dagster.registry.azure_endpoint import SERVING_PORT
    from dtrain_dagster.support.user_sources import SERVING_REQUIREMENTS

    held = re.findall(r"^([A-Za-z0-9-]+)", (AZURE / "requirements-serving.txt").read_text(), re.M)
    assert sorted(held) == sorted(SERVING_REQUIREMENTS)
    assert f":-{SERVING_PORT}" in (AZURE / "serve.sh").read_text()
    assert f"EXPOSE {SERVING_PORT}" in (AZURE / "serving.Dockerfile").read_text()
