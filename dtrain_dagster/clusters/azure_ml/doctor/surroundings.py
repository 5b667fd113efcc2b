"""Decisions about what lies around the workspace: storage, images, addresses, the subnet, the nodes' identity. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dtrain_dagster.clusters.azure_ml.doctor.access import assignment_command, missing_operations, role_of_scope
from dtrain_dagster.clusters.azure_ml.doctor.lines import DoctorLine
from dtrain_dagster.clusters.azure_ml.options import AzureMLOptions
from trainer.runtime.network_refusal import NETWORK_REMEDY, is_network_refusal

JOIN = "Microsoft.Network/virtualNetworks/subnets/join/action"
RESERVED_ADDRESSES = 5
"""Addresses of each subnet that Azure keeps for itself."""
_IMAGE = re.compile(
    r"(?P<host>[a-z0-9.-]+\.[a-z0-9-]+(?::\d+)?|localhost:\d+)/(?P<repository>[a-z0-9._/-]+?)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]*)|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_ENVIRONMENT = re.compile(r"azureml:(?P<name>[^:@/]+)(?::(?P<version>[^:]+)|@latest)")


@dataclass(frozen=True, slots=True)
class ImageName:
    """An image in a registry. ``reference``: its tag or digest."""

    host: str
    repository: str
    reference: str


def parse_image(text: str) -> ImageName | None:
    """Return an image's parts; None for what names no registry."""
    match = _IMAGE.fullmatch(text)
    return ImageName(match["host"], match["repository"], match["tag"] or match["digest"] or "latest") if match else None


def parse_environment(text: str) -> tuple[str, str | None] | None:
    """Return name and version (None: the latest) of an environment of the workspace; None for anything else."""
    match = _ENVIRONMENT.fullmatch(text)
    return (match["name"], match["version"]) if match else None


def judge_image(image: ImageName, status: int, said: str, principal: str) -> DoctorLine:
    """Return what a registry's answer to a question for an image means. ``status``: of HTTP, 0 where there was none;
    ``said``: its words, or why there is no answer; ``principal``: who asked."""
    registry = image.host.partition(".")[0]
    seen = f"{image.host}/{image.repository}:{image.reference}".replace(":sha256:", "@sha256:")
    shown = f"az acr repository show-tags --name {registry} --repository {image.repository} --output table"
    if status == 200:
        return DoctorLine(check="images", verdict="ok", seen=f"{seen} is there")
    if is_network_refusal("", said):
        return DoctorLine(
            check="images",
            verdict="missing",
            seen=f"{seen}: refused by a network rule ({status})",
            remedy=NETWORK_REMEDY,
            command=f"nslookup {image.host.partition(':')[0]}",
        )
    if status == 404:
        return DoctorLine(
            check="images",
            verdict="missing",
            seen=f"{seen}: the registry has no such image",
            remedy="build it and push it (deploy/azure/README.md), or correct DTRAIN_AZURE_IMAGE",
            command=shown,
        )
    if status in (401, 403):
        return DoctorLine(
            check="images",
            verdict="warning",
            seen=f"{seen}: the registry denies access ({status})",
            remedy="the nodes' identity needs AcrPull on it; give it to this one too, and the tag can be looked for",
            command=assignment_command(
                principal, "AcrPull", f"$(az acr show --name {registry} --query id --output tsv)"
            ),
        )
    return DoctorLine(
        check="images",
        verdict="missing",
        seen=f"{seen}: the registry does not answer: {status or ''} {said}".rstrip(),
        remedy="check the host in DTRAIN_AZURE_IMAGE, and that this machine may reach it",
        command=f"az acr check-health --name {registry}",
    )


def judge_unreadable_image(text: str) -> DoctorLine:
    """Return that an image's name is not understood."""
    return DoctorLine(
        check="images",
        verdict="missing",
        seen=f"DTRAIN_AZURE_IMAGE={text!r} names no registry and no environment",
        remedy="name an image with its registry (registry.azurecr.io/dtrain-nodes:1), or azureml:<name>:<version>",
    )


def judge_storage_error(error: OSError, step: str, uri: str, account_url: str, principal: str) -> DoctorLine:
    """Return why the container cannot be read or written; the error says what to do. ``step``: what was tried;
    ``principal``: who did."""
    container, said = uri.removeprefix("az://").partition("/")[0], str(error)
    host = urlsplit(account_url).hostname or "<account>"
    account = host.partition(".")[0]
    scope = f"$(az storage account show --name {account} --query id --output tsv)/blobServices/default/containers/"
    command = (
        f"az storage container create --auth-mode login --account-name {account} --name {container}"
        if "no such container" in said
        else assignment_command(principal, "Storage Blob Data Contributor", f"{scope}{container}")
    )
    by_network = NETWORK_REMEDY in said
    return DoctorLine(
        check="storage",
        verdict="missing",
        seen=f"{step}: {said}",
        remedy="see the line itself" if by_network else "as it says",
        command=f"nslookup {host}" if by_network else command,
    )


def judge_no_account(connection_string: bool) -> DoctorLine:
    """Return that no account is named by its address, which is the one thing about storage that nodes are told."""
    opened = "; this machine opens it by AZURE_STORAGE_CONNECTION_STRING, but nodes cannot" if connection_string else ""
    return DoctorLine(
        check="storage",
        verdict="missing",
        seen=f"AZURE_STORAGE_ACCOUNT_URL is not set{opened}",
        remedy="set it: nodes are told it, and open the account by their identity",
        command="export AZURE_STORAGE_ACCOUNT_URL=https://<account>.blob.core.windows.net",
    )


def judge_address(host: str, addresses: Sequence[str], is_private: bool) -> DoctorLine:
    """Return whether a host's addresses are those that this machine should see. ``is_private``: whether the workspace
    is closed to the internet, so that only private addresses lead to it."""
    if not addresses:
        return DoctorLine(
            check="network",
            verdict="missing",
            seen=f"{host} has no address here",
            remedy="correct the name; in a private network its DNS zone (privatelink…) must be linked to the network",
            command=f"nslookup {host}",
        )
    public = [address for address in addresses if not ipaddress.ip_address(address).is_private]
    seen = f"{host} is {', '.join(addresses)}"
    if is_private and public:
        return DoctorLine(
            check="network",
            verdict="missing",
            seen=f"{seen}, a public address, and the workspace is closed to the internet",
            remedy="run from inside the virtual network, or through a VPN whose DNS answers with the private endpoint",
            command=f"nslookup {host}",
        )
    kind = "public" if public else "private"
    return DoctorLine(check="network", verdict="ok", seen=f"{seen} ({kind})")


def hosts_to_resolve(workspace: Mapping[str, Any], account_url: str, image: ImageName | None) -> list[str]:
    """Return the hosts whose addresses matter: storage, images, and a private workspace's own one."""
    own: Mapping[str, Any] = workspace.get("properties") or {}
    discovery, identifier = urlsplit(str(own.get("discoveryUrl") or "")).hostname, own.get("workspaceId")
    found = [urlsplit(account_url).hostname, image.host.partition(":")[0] if image else None]
    if is_closed(workspace) and discovery and identifier:
        found.append(f"{identifier}.workspace.{discovery}")
    return [host for host in dict.fromkeys(found) if host]


def is_closed(workspace: Mapping[str, Any]) -> bool:
    """Return whether a workspace is closed to the internet."""
    return str((workspace.get("properties") or {}).get("publicNetworkAccess")) == "Disabled"


def judge_no_subnet(workspace: Mapping[str, Any], options: AzureMLOptions) -> DoctorLine:
    """Return what it means that no subnet is named for the nodes."""
    managed = ((workspace.get("properties") or {}).get("managedNetwork") or {}).get("isolationMode")
    if managed and managed != "Disabled":
        return DoctorLine(
            check="network", verdict="ok", seen=f"nodes are in the workspace's managed network ({managed})"
        )
    if options.public_ip and not is_closed(workspace):
        return DoctorLine(check="network", verdict="ok", seen="nodes are in no network of yours, with public addresses")
    return DoctorLine(
        check="network",
        verdict="missing",
        seen="nodes must have no public addresses, but no subnet is named: Azure does not make such a compute"
        if not options.public_ip
        else "the workspace is closed to the internet, and nodes are in no network that reaches it",
        remedy="set DTRAIN_AZURE_SUBNET (output nodesSubnetId of deploy/azure), or use a managed network",
        command='az network vnet subnet list --resource-group <group> --vnet-name <network> --query "[].id"',
    )


def subnet_id_of(options: AzureMLOptions) -> str | None:
    """Return the resource id of the nodes' subnet; None where none is named."""
    if options.subnet is None or options.subnet.startswith("/subscriptions/"):
        return options.subnet
    return (
        f"/subscriptions/{options.subscription_id}/resourceGroups/{options.resource_group}/providers/"
        f"Microsoft.Network/virtualNetworks/{options.vnet}/subnets/{options.subnet}"
    )


def judge_subnet(
    subnet: Mapping[str, Any],
    permissions: Sequence[Mapping[str, Any]] | None,
    node_count: int,
    scope: str,
    principal: str,
) -> list[DoctorLine]:
    """Return whether nodes fit into their subnet, and may be put there. ``permissions``: those of the caller on it;
    None where they cannot be read; ``principal``: the caller."""
    own: Mapping[str, Any] = subnet.get("properties") or {}
    prefixes = [str(text) for text in (own.get("addressPrefixes") or [own.get("addressPrefix")]) if text]
    room = sum(ipaddress.ip_network(prefix).num_addresses - RESERVED_ADDRESSES for prefix in prefixes)
    seen = f"subnet {subnet.get('name')} ({', '.join(prefixes)})"
    lines = [DoctorLine(check="network", verdict="ok", seen=f"{seen} has room for {room} nodes")]
    if room < node_count:
        lines = [
            DoctorLine(
                check="network",
                verdict="missing",
                seen=f"{seen} has room for {max(room, 0)} nodes, not for {node_count}",
                remedy="choose a larger subnet, or ask for fewer nodes",
            )
        ]
    if permissions is not None and missing_operations([JOIN], permissions):
        lines.append(
            DoctorLine(
                check="network",
                verdict="missing",
                seen=f"{JOIN} is not granted on it",
                remedy="only an identity that may join the subnet can make a compute in it: assign the role of "
                "deploy/azure",
                command=assignment_command(principal, role_of_scope(scope), scope),
            )
        )
    return lines


def judge_nodes_identity(identity: Mapping[str, Any], client_id: str | None) -> DoctorLine:
    """Return whether the identity of the nodes is the one whose client id they are given."""
    found = str((identity.get("properties") or {}).get("clientId") or "")
    seen = f"nodes are {identity.get('name')}, client id {found}"
    if (client_id or "").casefold() == found.casefold():
        return DoctorLine(check="identity", verdict="ok", seen=seen)
    return DoctorLine(
        check="identity",
        verdict="missing",
        seen=f"{seen}, and DTRAIN_AZURE_IDENTITY_CLIENT_ID is {client_id or 'not set'}",
        remedy="nodes choose their identity by it",
        command=f"export DTRAIN_AZURE_IDENTITY_CLIENT_ID={found}",
    )


def judge_no_nodes_identity() -> DoctorLine:
    """Return what it means that no identity is named for the nodes."""
    return DoctorLine(
        check="identity",
        verdict="warning",
        seen="nodes get the identity of their compute, which has no roles",
        remedy="set DTRAIN_AZURE_IDENTITY and DTRAIN_AZURE_IDENTITY_CLIENT_ID (outputs nodesIdentityId and "
        "nodesClientId of deploy/azure); else give the compute's identity its roles once it is made",
    )
