"""An Azure ML workspace on loopback, that the real clients of Azure talk to over real TLS.

`Emulator` starts it for a test; ``python -m harness.azure.emulator --folder DIR`` starts it for a person. It speaks the
shapes that were recorded of the real service, has a clock that can be moved, and lets things go wrong by a script.
It proves how the product deals with what the service says; that the service says it is another matter. Not recorded,
but assumed here:

- the same PUT of a compute once more, while it is being created, gets the same operation; another one gets 409;
- a second PUT of a job's name is 200 where nothing but tags, names and new properties differ, else 400 UserError;
- a job for more nodes than its cluster may have fails instead of waiting;
- the codes and words of refusals of jobs, and of preemption; those of computes are as seen, see `refused`;
- that quotas are refused with low priority, too (some saw it), and when ``errors`` of a compute tell that it never gets
  a node;
- for how long something is 404 that exists, and that lists lag (see `faults`, ``hide``); which of the reported words
  a job's 404 has today, and those of a compute's;
- a scoring URI takes ``input_data`` only, and answers with the bare predictions;
- every answer has an ``x-ms-request-id`` of its own, a GUID;
- how long anything takes. Times in answers are those of the emulator's clock, tokens live by the real one.
"""

from __future__ import annotations

import json
import runpy
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from harness.azure.emulator.state import Addresses

ROOT = Path(__file__).parents[3]
CLOUD = "EmulatedCloud"
START_SECONDS = 90.0
STOP_SECONDS = 30.0


class Emulator:
    """The emulator in a thread of this process, as a context manager. What it starts ends with this process, however
    that ends.

    ``folder``: where its files go. ``faults``: its script. ``environment``: the variables that lead clients to it;
    `ENVIRONMENT_OF_OTHERS` has to be absent beside them (see `use`).
    """

    def __init__(self, folder: Path, faults: list[dict[str, Any]] | None = None) -> None:
        self.folder, self._faults = folder, faults or []
        self.environment: dict[str, str] = {}

    def __enter__(self) -> Emulator:
        from harness.azure.emulator.faults import Faults
        from harness.azure.emulator.serving import Serving

        self.folder.mkdir(parents=True, exist_ok=True)
        faults, answers = Faults(), threading.Event()
        for spec in self._faults:
            faults.add(spec, time.time())
        self._serving = Serving(self.folder, faults)

        def announce(variables: dict[str, str]) -> None:
            self.environment = variables
            answers.set()

        def run() -> None:
            try:
                self._serving.run(announce)
            finally:
                answers.set()

        self._thread = threading.Thread(target=run, name="azure-emulator", daemon=True)
        self._thread.start()
        if not answers.wait(START_SECONDS) or not self.environment:
            self.stop()
            raise RuntimeError("the emulator did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def storage_pid(self) -> int:
        """The process of its storage account."""
        return self._serving.storage_pid

    def stop(self) -> None:
        """End it and all it started; again without harm."""
        self._serving.stop()
        self._thread.join(STOP_SECONDS)

    def control(self, verb: str, **asked: Any) -> Any:
        """Tell it something, or ask: see `harness.azure.emulator.control`. Its refusal is a ValueError."""
        request = urllib.request.Request(
            f"{self.environment['AZURE_EMULATOR_CONTROL']}/{verb}",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["result"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from None

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this very process take the emulator for Azure, for as long as the test lasts."""
        for name in ENVIRONMENT_OF_OTHERS:
            monkeypatch.delenv(name, raising=False)
        # The SDK writes it into the environment; like this it is taken back afterwards.
        monkeypatch.setenv("AZUREML_CURRENT_CLOUD", CLOUD)
        for name, value in self.environment.items():
            if name != "PYTHONPATH":
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(socket, "getaddrinfo", socket.getaddrinfo)
        from azure.core.polling.base_polling import LROBasePolling

        monkeypatch.setattr(LROBasePolling, "_sleep", LROBasePolling._sleep)
        runpy.run_path(str(ROOT / "harness/azure/resolver/sitecustomize.py"))
        from azure.ai.ml import _azure_environments as environments

        from trainer.secrets import azure_token
        from trainer.storage import azure_account

        # This process may have used another emulator, whose tokens this one does not take.
        azure_token.credential.cache_clear()
        azure_account._service.cache_clear()

        # Of a cloud that the SDK does not know by itself it asks the addresses several times for each request.
        monkeypatch.setitem(environments._environments, CLOUD, environments._get_cloud(CLOUD))


ENVIRONMENT_OF_OTHERS = (
    "AZURE_CLIENT_ID",
    "AZURE_CLIENT_SECRET",
    "AZURE_TENANT_ID",
    "AZURE_STORAGE_CONNECTION_STRING",
    "AZUREML_CURRENT_CLOUD",
    "MSI_ENDPOINT",
    "MSI_SECRET",
)
"""Variables that would lead elsewhere."""


def environment(addresses: Addresses, ca: Path, resolver: Path, identity_header: str) -> dict[str, str]:
    """What a process needs in order to take the emulator for Azure."""
    from harness.azure.emulator.state import CONTAINER, RESOURCE_GROUP, SUBSCRIPTION, WORKSPACE

    return {
        "ARM_CLOUD_METADATA_URL": f"{addresses.base}/metadata/endpoints?api-version=2019-05-01",
        "REQUESTS_CA_BUNDLE": str(ca),
        "SSL_CERT_FILE": str(ca),
        "NO_PROXY": "127.0.0.1,localhost,.localhost",
        "IDENTITY_ENDPOINT": f"{addresses.control}/identity/app-service",
        "IDENTITY_HEADER": identity_header,
        "AZURE_STORAGE_ACCOUNT_URL": addresses.storage,
        "AZUREML_RUN_POLLING_INTERVAL_MIN": "1",
        "DTRAIN_AZURE_SUBSCRIPTION_ID": SUBSCRIPTION,
        "DTRAIN_AZURE_RESOURCE_GROUP": RESOURCE_GROUP,
        "DTRAIN_AZURE_WORKSPACE": WORKSPACE,
        "DTRAIN_STORAGE": f"az://{CONTAINER}",
        "AZURE_EMULATOR_CONTROL": f"{addresses.control}/control",
        "PYTHONPATH": str(resolver),
    }
