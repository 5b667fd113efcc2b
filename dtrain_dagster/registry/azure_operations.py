"""Long operations on an endpoint: they are started, awaited and recorded, and refusals become words for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from dtrain_dagster.clusters.azure_ml.client import request_id_of, request_note
from dtrain_dagster.clusters.base import ClusterError
from dtrain_dagster.costs.meters import choose_size_price
from dtrain_dagster.support.secrets import redact

if TYPE_CHECKING:
    from azure.ai.ml import MLClient


class DeploymentError(ClusterError):
    """A failure to deploy a model. The message says what went wrong, what is left, and what to do."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """The service's code of the error; "" where it has none."""


class Audit(Protocol):
    """A log that records an operation which creates, changes, deletes or spends, and its end;
    `dtrain_dagster.support.audit.AuditLog` is one."""

    def operation(self, operation: str, target: str, **details: Any) -> AbstractContextManager[Any]:
        """Return a context that records the operation on ``target`` and how the block ended."""


def finish(
    begin: Callable[[], Any], deadline_seconds: float, operation: str, target: str, audit: Audit | None, **details: Any
) -> None:
    """Do a long operation and wait for its end. Raise `DeploymentError` if it fails or takes too long; a missing target
    is left to the caller."""
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
    """Return the remedy for the most frequent refusals."""
    lower = words.lower()
    if "quota" in lower:
        return " (ask for quota of this instance type for the endpoint's region, or choose a smaller one)"
    if "authorization" in lower or "forbidden" in lower:
        return " (the identity needs the roles in deploy/azure/README.md)"
    return ""


def usd_per_hour(client: MLClient, instance_type: str) -> float | None:
    """Return the list price in dollars per hour of an instance, Linux and not preemptible, as the workspace's region
    states it; None without one. A managed endpoint costs its instances and nothing else."""
    listed = []
    for size in client.compute.list_sizes():
        if str(size.name).lower() != instance_type.lower():
            continue
        prices = getattr(size, "estimated_vm_prices", None) or getattr(size, "estimatedVMPrices", None) or {}
        rows = _get(prices, "values_property", "values") or ()
        for row in () if callable(rows) else rows:
            system, tier, usd = (
                _get(row, *names)
                for names in (("os_type", "osType"), ("vm_tier", "vmTier"), ("retail_price", "retailPrice"))
            )
            listed.append((str(system), str(tier), float(usd or 0)))
    return choose_size_price(listed)


def _get(value: Any, *names: str) -> Any:
    """Return the first of several spellings: the client gives some answers as objects and some as the service sent
    them."""
    for name in names:
        found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if found is not None:
            return found
    return None
