"""The place of Dagster's own files on the Azure path: the outputs of runs and the values of assets, in ADLS Gen2.

The address, and its section of `dagster.yaml`, belong here; pure, no service is asked. The clients are dagster-azure's,
and take this machine's identity: no key, token or other secret is taken here, so none can be written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import yaml

UPLOAD_SECONDS = 30
"""The seconds between two uploads of the output of a step that still runs."""
_ADDRESS = re.compile(
    r"abfss://(?P<file_system>[a-z0-9](?:-?[a-z0-9]){2,62})@(?P<account>[a-z0-9]{3,24})\.dfs\."
    r"(?P<suffix>[a-z0-9.-]+(?::\d+)?)(?:/(?P<prefix>[\w./-]*))?"
)
_BEGIN, _END = "# begin of what `dtrain setup` writes", "# end of what `dtrain setup` writes"
_BLOCK = re.compile(rf"\n*{_BEGIN}\n.*?{_END}\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DataLakeFolder:
    """A folder of an account of ADLS Gen2; ``suffix`` is what follows ``<account>.dfs.`` in the host's name."""

    account: str
    file_system: str
    suffix: str
    prefix: str

    @classmethod
    def parse(cls, address: str) -> DataLakeFolder:
        """Return the folder at ``abfss://<file system>@<account>.dfs.<suffix>[/<path>]``. Raise `ValueError` for other
        text."""
        found = _ADDRESS.fullmatch(address)
        if not found:
            raise ValueError(
                "write abfss://<file system>@<account>.dfs.core.windows.net, and a path behind it where one is wanted"
            )
        parts = [part for part in (found["prefix"] or "").split("/") if part]
        if any(part in (".", "..") for part in parts):
            raise ValueError("its path may not have '.' or '..' in it")
        return cls(found["account"], found["file_system"], found["suffix"], "/".join(parts) or "dagster")


def refuse_folder_of_nodes(folder: DataLakeFolder, storage: str, account_url: str) -> None:
    """Raise `ValueError` where the nodes of trainings write into the folder's file system as well.

    Values of assets are pickles, which run code where they are read. Nodes may write into the container of ``storage``
    (``az://container/path``) on the account at ``account_url``; where that is "", any account counts as this one.
    """
    container = storage.partition("://")[2].partition("/")[0]
    same_account = not account_url or folder.account in re.split(r"[/.:]+", account_url)
    if container == folder.file_system and same_account:
        raise ValueError(
            f"nodes of trainings write into container {container}, and what Dagster reads there would run their code; "
            "name another file system, which only this machine's identity may write"
        )


def compute_log_section(folder: DataLakeFolder, local_dir: Path) -> str:
    """Return ``compute_logs`` of `dagster.yaml`, as YAML: outputs of runs go to the folder. In ``local_dir`` they are
    written while a step runs, and older ones are read."""
    config = {
        "storage_account": folder.account,
        "container": folder.file_system,
        "endpoint_suffix": folder.suffix,
        "prefix": folder.prefix,
        "default_azure_credential": {},
        "local_dir": str(local_dir),
        "upload_interval": UPLOAD_SECONDS,
    }
    section = {
        "module": "dagster_azure.blob.compute_log_manager",
        "class": "AzureBlobComputeLogManager",
        "config": config,
    }
    return yaml.safe_dump({"compute_logs": section}, sort_keys=False)


def with_compute_logs(text: str, section: str) -> str:
    """Return the text of `dagster.yaml` with this section, between two comments that mark it, and no earlier one; with
    an empty section, without it. Other parts of the text are kept.

    Raise `ValueError` where the text has a ``compute_logs`` that the user wrote.
    """
    own = _BLOCK.sub("\n", text)
    if not section:
        return own
    if re.search(r"^compute_logs\s*:", own, re.MULTILINE):
        raise ValueError("it has compute_logs of its own: remove them, or unset DTRAIN_AZURE_DAGSTER_STORAGE")
    return f"{own.rstrip()}\n\n{_BEGIN}\n{section}{_END}\n"
