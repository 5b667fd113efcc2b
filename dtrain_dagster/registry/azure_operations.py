"""Long operations on an endpoint: done, waited for, recorded, and their refusals in words for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from dtrain_dagster.clusters.azure_ml.client import request_id_of, request_note
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.support.secrets import redact

if TYPE_CHECKING:
    from azure.ai.ml import MLClient


class DeploymentError(ClusterError):
    """The model was not deployed. The message says what went wrong, what is left, and what to do."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """The service's word for it, where it has one."""


class Audit(Protocol):
    """Records an operation that creates, changes, deletes or spends, and how it ended;
    `dtrain_dagster.support.audit.AuditLog` is one."""

    def operation(self, operation: str, target: str, **details: Any) -> AbstractContextManager[Any]: ...


def finish(
    begin: Callable[[], Any], deadline_seconds: float, operation: str, target: str, audit: Audit | None, **details: Any
) -> None:
    """Do a long operation and wait for its end. `DeploymentError` if it fails or takes too long; what is not there is
    left to the caller."""
    from azure.core.exceptions import AzureError, ResourceNotFoundError

    with audit.operation(operation, target, **details) if audit else nullcontext():
        try:
            poller = begin()
            poller.wait(deadline_seconds)
            if not poller.done():
                raise DeploymentError(
                    f"{operation} {target}: no end after {deadline_seconds:.0f} s; look at it in the studio", "Timeout"
                )
            poller.result()
        except ResourceNotFoundError:
            raise
        except AzureError as error:
            code = str(
                getattr(getattr(error, "error", None), "code", None) or getattr(error, "status_code", None) or ""
            )
            words = redact(str(getattr(error, "message", "") or error)).strip()
            note = request_note(request_id_of(error))
            raise DeploymentError(
                f"{operation} {target} failed ({code}): {words[:1000]}{_hint(words)}{note}", code
            ) from None


def _hint(words: str) -> str:
    """The remedy for what is refused most often."""
    lower = words.lower()
    if "quota" in lower:
        return " (ask for quota of this instance type for the endpoint's region, or choose a smaller one)"
    if "authorization" in lower or "forbidden" in lower:
        return " (the identity needs the roles in deploy/azure/README.md)"
    return ""


def usd_per_hour(client: MLClient, instance_type: str) -> float | None:
    """The list price of an instance, Linux and not preemptible, as the workspace's region states it; None if it does
    not. A managed endpoint costs its instances and nothing else."""
    for size in client.compute.list_sizes():
        if str(size.name).lower() != instance_type.lower():
            continue
        prices = getattr(size, "estimated_vm_prices", None) or getattr(size, "estimatedVMPrices", None) or {}
        rows = _get(prices, "values_property", "values") or ()
        for row in () if callable(rows) else rows:
            if (
                str(_get(row, "os_type", "osType")).lower() == "linux"
                and str(_get(row, "vm_tier", "vmTier")).lower() == "standard"
            ):
                return float(_get(row, "retail_price", "retailPrice"))
    return None


def _get(value: Any, *names: str) -> Any:
    """The first of several spellings: the client gives some answers as objects and some as they came."""
    for name in names:
        found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if found is not None:
            return found
    return None
