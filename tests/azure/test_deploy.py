"""The templates of `deploy/azure`, as far as they can be read without Azure and without its compiler: what they open,
whom they trust, and whether the table that explains it says the same. That Azure takes them is not tested here."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AZURE = ROOT / "deploy" / "azure"
FILES = sorted(AZURE.rglob("*.bicep"))
TOO_MUCH = {
    "8e3af657-a8ff-443c-a75c-2fe8c4bcb635": "Owner",
    "b24988ac-6180-42a0-ab88-20f7382dd24c": "Contributor",
    "18d7d88d-d35e-4fb5-a5c3-7773c20a72d9": "User Access Administrator",
    "f58310d9-a9f6-439a-9e8d-f62e7b41a168": "Role Based Access Control Administrator",
}
CLOSED: dict[str, dict[str, Any]] = {
    "Microsoft.Storage/storageAccounts": {
        "publicNetworkAccess": "ofWorkspace ? Enabled : Disabled",
        "allowBlobPublicAccess": False,
        "allowSharedKeyAccess": False,
        "allowCrossTenantReplication": False,
        "minimumTlsVersion": "TLS1_2",
        "supportsHttpsTrafficOnly": True,
        "networkAcls": {"bypass": "AzureServices", "defaultAction": "Deny"},
    },
    "Microsoft.Storage/storageAccounts/blobServices/containers": {"publicAccess": "None"},
    "Microsoft.KeyVault/vaults": {
        "publicNetworkAccess": "ofWorkspace ? Enabled : Disabled",
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
    "Microsoft.Insights/components": {"publicNetworkAccessForQuery": "Disabled"},
    "Microsoft.OperationalInsights/workspaces": {"publicNetworkAccessForQuery": "Disabled"},
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

DOCUMENTED = (
    "*/read",
    "environments/write",
    "jobs/*",
    "metadata/artifacts/write",
    "metadata/codes/*/write",
    "environments/build/action",
    "environments/readSecrets/action",
)
"""What Microsoft documents as the least for submitting jobs (azure-docs, machine-learning/how-to-assign-roles.md, the
row «Submitting any type of run (V2)»), below Microsoft.MachineLearningServices/workspaces/."""
parsed = pytest.mark.skipif(
    importlib.util.find_spec("pycep") is None or importlib.util.find_spec("regex") is None,
    reason="pycep-parser, which reads Bicep, is not installed",
)


@pytest.fixture(scope="module")
def templates() -> dict[str, dict[str, Any]]:
    from pycep import BicepParser

    parser = BicepParser()
    found = {str(file.relative_to(AZURE)): parser.parse(file_path=file) for file in FILES}
    for template in found.values():
        for module in template.get("modules", {}).values():
            if "condition" in module["config"]:
                module["config"] = module["config"]["config"]
    return found


def resources(templates: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(symbol, type, body) of everything that the templates make, loops and conditions unwrapped."""
    for template in templates.values():
        for symbol, item in template.get("resources", {}).items():
            if not item["existing"]:
                body = item["config"]
                yield symbol, item["type"], body.get("config", body) if isinstance(body, dict) else body


def words_of(value: Any) -> Any:
    """A choice (``condition ? one : other``) in words; all else as it is."""
    operator = value.get("operator", {}) if isinstance(value, dict) else {}
    if operator.get("type") == "conditional":
        return "{condition} ? {true_value} : {false_value}".format(**operator["operands"])
    return value


@parsed
def test_nothing_is_hidden_by_a_parser_that_skips_what_it_does_not_understand(
    templates: dict[str, dict[str, Any]],
) -> None:
    for name, template in templates.items():
        text = (AZURE / name).read_text()
        assert set(re.findall(r"^resource (\w+) ", text, re.M)) == set(template.get("resources", {})), name
        assert set(re.findall(r"^module (\w+) ", text, re.M)) == set(template.get("modules", {})), name


@parsed
def test_whatever_can_be_open_is_closed(templates: dict[str, dict[str, Any]]) -> None:
    seen = set()
    for symbol, kind, body in resources(templates):
        seen.add(kind)
        expected = CLOSED.get(kind, {})
        found = {name: words_of(body["properties"].get(name)) for name in expected}
        assert found == expected, symbol
    assert seen == set(CLOSED) | OPEN_TYPES, "a kind of resource that nobody has thought about"


@parsed
def test_only_what_the_workspace_is_made_with_answers_azures_own_services(templates: dict[str, dict[str, Any]]) -> None:
    """A workspace is not made where its storage or vault has no public access at all; denied by rule, with the bypass,
    it is (Azure's quickstart machine-learning-end-to-end-secure does the same)."""
    modules = templates["main.bicep"]["modules"]
    given = {
        symbol: module["config"]["params"]["ofWorkspace"]
        for symbol, module in modules.items()
        if "ofWorkspace" in module["config"]["params"]
    }
    of_workspace = {"workspaceStorage": True, "workspaceVault": True}
    assert given == {"dataStorage": False, "settingsVault": False, **of_workspace}
    params = modules["workspace"]["config"]["params"]
    used = (AZURE / "main.bicep").read_text()
    for name, symbol in {
        "storageId": "workspaceStorage",
        "vaultId": "workspaceVault",
        "insightsId": "insights",
    }.items():
        assert name in params
        assert f"{name}: {symbol}.outputs.id" in used


@parsed
def test_the_workspace_has_what_azure_makes_none_without(templates: dict[str, dict[str, Any]]) -> None:
    """Without Application Insights: 400 ValidationError, «Missing dependent resources in workspace json»
    (Azure/azure-service-operator issue 5696, 2026-09; Azure/azure-cli issue 28980)."""
    [workspace] = [body for _, kind, body in resources(templates) if kind.endswith("Services/workspaces")]
    needed = {"storageAccount", "keyVault", "applicationInsights"}
    assert needed <= workspace["properties"].keys()
    [insights] = [body for _, kind, body in resources(templates) if kind == "Microsoft.Insights/components"]
    assert "WorkspaceResourceId" in insights["properties"], "classic ones, without a workspace of logs, are not made"


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
    assert len(definitions) == 5
    documented = [f"Microsoft.MachineLearningServices/workspaces/{name}" for name in DOCUMENTED]
    for body in definitions:
        [permission] = body["properties"]["permissions"]
        operations = [*permission["actions"], *permission["dataActions"]]
        assert operations
        assert len(operations) == len({operation.lower() for operation in operations})
        orchestrates = "orchestrates" in body["properties"]["roleName"]
        assert set(documented) <= set(operations) or not orchestrates
        for operation in [name for name in operations if not (orchestrates and name in documented)]:
            assert re.fullmatch(r"Microsoft\.[A-Za-z]+(/[A-Za-z]+)+/(read|write|delete|action)", operation)
            own = operation == "Microsoft.Authorization/permissions/read"  # lists what the caller itself may do
            risky = r"Authorization|listKeys|readSecrets|connections|metadata/secrets"
            assert own or not re.search(risky, operation, re.I)
    text = "\n".join(file.read_text() for file in FILES)
    assert not [name for guid, name in TOO_MUCH.items() if guid in text]


@parsed
def test_the_roles_grant_what_the_doctor_asks_for(templates: dict[str, dict[str, Any]]) -> None:
    from dtrain_dagster.clusters.azure_ml.doctor import NEEDED_OPERATIONS, missing_operations

    bodies = {symbol: body for symbol, kind, body in resources(templates) if kind.endswith("/roleDefinitions")}
    on_workspace = bodies["orchestrates"]["properties"]["permissions"]
    assert missing_operations([*NEEDED_OPERATIONS, "Microsoft.Authorization/permissions/read"], on_workspace) == []
    assert missing_operations(NEEDED_OPERATIONS, bodies["reportsMetrics"]["properties"]["permissions"]), (
        "nodes may do less"
    )
    on_subscription = bodies["readsLocations"]["properties"]["permissions"]
    assert missing_operations(["Microsoft.Resources/subscriptions/providers/read"], on_subscription) == []


def test_the_providers_to_register_are_those_of_the_templates_and_of_endpoints() -> None:
    text = "\n".join(file.read_text() for file in FILES)
    used = set(re.findall(r"^resource \w+ '(Microsoft\.\w+)/", text, re.M)) - {"Microsoft.Authorization"}
    loop = re.search(r"^for namespace in (.*?); do$", (AZURE / "README.md").read_text(), re.M | re.S)
    assert loop is not None
    assert set(loop[1].replace("\\", " ").split()) == used | {"Microsoft.PolicyInsights", "Microsoft.Cdn"}


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
        if not re.search("blobContributor|writesBlobs", str(properties.get("roleDefinitionId"))):
            continue
        if kind.endswith("/roleAssignments") and properties["principalId"] != "orchestratorPrincipalId":
            assert "writesBlobs" in str(properties["roleDefinitionId"]), "the built-in role may delete containers"
            assert properties["conditionVersion"] == "2.0"
            definition = re.search(rf"^var {properties['condition']} = '(.*)'$", text, re.M)
            assert definition is not None
            [folders[symbol]] = re.findall(r"StringLike \\'([^']*)\\'", definition[1])
    assert folders == {"nodesOnContainer": "jobs/*", "nodesOnWorkspaceStorage": "ExperimentRun/*"}
    logs = re.search(r"^var changesLogs = '(.*)'$", text, re.M)
    assert logs is not None
    assert "containers:name] StringEquals \\'azureml\\' AND @Resource" in logs[1], "logs are in this container only"
    [role] = [body for symbol, _, body in resources(templates) if symbol == "writesBlobs"]
    [permission] = role["properties"]["permissions"]
    on_containers = {name for name in permission["actions"] if "/containers/" in name}
    assert on_containers == {"Microsoft.Storage/storageAccounts/blobServices/containers/read"}
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
    [pins["torch"]] = re.findall(r"^torch(==[\d.]+)", (ROOT / "requirements-torch.lock").read_text(), re.M)
    for line in (AZURE / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, range_ = re.fullmatch(r"([A-Za-z0-9-]+)(.*)", line).groups()  # type: ignore[union-attr]
            assert range_ == pins.get(package, range_ if package.startswith("azure-") else None), package


@pytest.mark.parametrize("image", ["Dockerfile", "serving.Dockerfile"])
def test_images_install_nothing_without_a_hash(image: str) -> None:
    """Neither torch nor what it brings, by whatever arguments they are built."""
    commands = re.sub(r"\\\n", " ", (AZURE / image).read_text())
    installs = re.findall(r"pip3? install [^&\n]*", commands)
    assert len(installs) == 2, "the tool that writes the bill of materials, and the image's packages"
    for install in installs:
        assert {"--require-hashes", "--no-deps"} <= set(install.split())
    assert "--requirement /tmp/supply.lock" in installs[0]
    [lock] = set(re.findall(r"^COPY deploy/azure/(\S+\.lock) /tmp/requirements\.lock$", commands, re.M))
    assert "--requirement /tmp/requirements.lock" in installs[1]
    locked = re.split(r"^(?=[A-Za-z0-9])", (AZURE / lock).read_text(), flags=re.M)[1:]
    assert len(locked) > 50
    assert [block for block in locked if not re.match(r"\S+==\S+ \\\n +--hash=sha256:[0-9a-f]{64}", block)] == []
    assert [block for block in locked if block.startswith("torch==")]


def test_the_nodes_image_holds_what_trainer_imports() -> None:
    named = {
        "pynvml": "nvidia-ml-py",
        "azure": "azure-storage-blob",
        "requests": "mlflow",
        "urllib3": "mlflow",
        "pydantic_core": "pydantic",
    }
    frameworks = {"horovod", "deepspeed", "ray", "tensorflow", "keras"}  # who trains with one adds it to the image
    held = frameworks | set(re.findall(r"^([A-Za-z0-9-]+)", (AZURE / "requirements-nodes.txt").read_text(), re.M))
    import ast
    import sys

    for file in (ROOT / "trainer").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for top in {name.partition(".")[0] for name in names}:
                if top not in sys.stdlib_module_names and top != "trainer":
                    is_late = node.col_offset > 0 or file.name == "keras_module.py"
                    assert top not in frameworks or is_late, f"{file.name} imports {top} whenever it is imported"
                    assert named.get(top, top) in held, f"{file.name} imports {top}"


def test_the_serving_image_holds_what_a_model_needs() -> None:
    from dtrain_dagster.support.user_sources import SERVING_REQUIREMENTS

    held = re.findall(r"^([A-Za-z0-9-]+)", (AZURE / "requirements-serving.txt").read_text(), re.M)
    assert sorted(held) == sorted(SERVING_REQUIREMENTS)
    assert ":-5001" in (AZURE / "serve.sh").read_text()
    assert "EXPOSE 5001" in (AZURE / "serving.Dockerfile").read_text()
