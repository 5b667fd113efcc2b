"""A job's page: served live by `dashboard.server`, or saved as a report that needs no network at all."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import asdict
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from dtrain_dagster.dashboard.job_board import OpenJob
from dtrain_dagster.dashboard.job_facts import NOWHERE, Places
from dtrain_dagster.settings.cluster_kinds import Tier
from trainer.rundir import RunDir

REPORT = "reports/performance_report.html"
BASE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
"""The page's Content-Security-Policy: plotly.js writes its own style sheet; no other server may be asked."""
LIVE_POLICY = (
    BASE_POLICY.replace("style-src", "style-src 'self'").replace("form-action 'none'", "form-action 'self'")
    + "; script-src 'self'; connect-src 'self'; frame-ancestors 'none'"
)
STYLES = ("dashboard.css", "job.css")
SCRIPTS = ("common.js", "job_charts.js", "job_parts.js")
"""The scripts of a job's page, saved or live."""
LIVE_SCRIPTS = ("job_logs.js", "job_orders.js")
"""Those that ask the server for more, which a saved page has not."""
LAST_SCRIPT = "job.js"
"""The one that starts the others."""
STATIC = Path(__file__).parent / "static"


def find_plotly_js() -> Path:
    """Return the file of plotly.js in the package plotly."""
    return Path(str(resources.files("plotly"))) / "package_data" / "plotly.min.js"


@cache
def static(name: str) -> str:
    """Return a file of the pages, such as ``job.html``."""
    return (STATIC / name).read_text()


def live_job_page(gives_orders: bool = False) -> str:
    """Return the page of one job that asks its server for what it shows. ``gives_orders``: whether it has buttons."""
    styles = "".join(f'<link rel="stylesheet" href="../{name}">\n' for name in STYLES)
    scripts = ("plotly.js", *SCRIPTS, *LIVE_SCRIPTS, LAST_SCRIPT)
    return Template(static("job.html")).substitute(
        head=styles,
        nav='<nav aria-label="pages"><a href="../">jobs</a></nav>',
        data=data_block("page-data", {"live": True, "orders": gives_orders}),
        scripts="\n".join(f'<script src="../{name}"></script>' for name in scripts),
    )


def saved_page(snapshot: dict[str, Any], facts: dict[str, Any], account: dict[str, Any]) -> str:
    """Return the page with a job's figures, scripts and styles in it. Only its own scripts may run."""
    scripts = (find_plotly_js().read_text(), *map(static, (*SCRIPTS, LAST_SCRIPT)))
    hashes = " ".join(f"'sha256-{script_hash(script)}'" for script in scripts)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{BASE_POLICY}; script-src {hashes}">'
    styles = "\n".join(map(static, STYLES))
    return Template(static("job.html")).substitute(
        head=f"{policy}\n<style>{styles}</style>",
        nav="",
        data=data_block("page-data", {"live": False, "orders": False})
        + data_block("snapshot-data", snapshot)
        + data_block("facts-data", facts)
        + data_block("account-data", account),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def data_block(name: str, value: Any) -> str:
    """Return data as an HTML block that the page's script reads; a browser never runs it, whatever it contains."""
    text = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def script_hash(script: str) -> str:
    """Return a script's sha256 as a Content-Security-Policy states it; browsers unify line ends before."""
    unified = script.replace("\r\n", "\n").replace("\r", "\n")
    return base64.b64encode(hashlib.sha256(unified.encode()).digest()).decode()


def report_page(rundir: RunDir, tier: Tier, places: Places = NOWHERE) -> str:
    """Return a job's present state as a page of its own, about 5 MB. ``tier``: of a job without a plan."""
    now = time.time()
    job = OpenJob(rundir, tier).refresh(now)
    while job.is_behind:
        job.read_more()
    job.refresh(now)
    return saved_page(job.snapshot(0, "", now), job.facts(places), asdict(job.account(now)))


def write_report(rundir: RunDir, tier: Tier) -> str:
    """Write `report_page` into the run directory; return its address."""
    rundir.storage.write(REPORT, report_page(rundir, tier).encode())
    return f"{rundir.uri}/{REPORT}"
