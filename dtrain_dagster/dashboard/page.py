"""The dashboard as a page: served live by `dashboard.server`, or saved as a report that needs no network at all."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from dataclasses import asdict
from functools import cache
from importlib import resources
from string import Template
from typing import Any

from dtrain_dagster.costs.prices import Tier
from dtrain_dagster.dashboard.job_board import OpenJob
from dtrain_dagster.dashboard.panels import PANELS
from trainer.rundir import RunDir

REPORT = "reports/performance_report.html"
BASE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
"""The page's Content-Security-Policy: plotly.js writes its own style sheet; no other server may be asked."""
LIVE_POLICY = (
    BASE_POLICY.replace("style-src", "style-src 'self'")
    + "; script-src 'self'; connect-src 'self'; frame-ancestors 'none'"
)


@cache
def static(name: str) -> str:
    """Return a file of the page: ``dashboard.html``, ``dashboard.css`` or ``dashboard.js``."""
    return resources.files("dtrain_dagster.dashboard").joinpath("static", name).read_text()


@cache
def plotly_js() -> str:
    """Return plotly.js from the package plotly."""
    return resources.files("plotly").joinpath("package_data", "plotly.min.js").read_text()


def live_page() -> str:
    """Return the page that asks its server for jobs and figures."""
    return Template(static("dashboard.html")).substitute(
        head='<link rel="stylesheet" href="dashboard.css">',
        nav='<a href="fleets">fleets</a>',
        data=data_block("panels-data", [asdict(panel) for panel in PANELS]),
        scripts='<script src="plotly.js"></script>\n<script src="dashboard.js"></script>',
    )


def saved_page(snapshot: dict[str, Any]) -> str:
    """Return the page with a job's figures, scripts and styles in it. Only its own two scripts may run."""
    scripts = (plotly_js(), static("dashboard.js"))
    hashes = " ".join(f"'sha256-{script_hash(script)}'" for script in scripts)
    policy = f'<meta http-equiv="Content-Security-Policy" content="{BASE_POLICY}; script-src {hashes}">'
    return Template(static("dashboard.html")).substitute(
        head=f"{policy}\n<style>{static('dashboard.css')}</style>",
        nav="",
        data=data_block("panels-data", [asdict(panel) for panel in PANELS]) + data_block("snapshot-data", snapshot),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def data_block(name: str, value: Any) -> str:
    """Return data as an HTML block that the page's script reads; a browser never runs it, whatever it contains."""
    text = json.dumps(value, allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def script_hash(script: str) -> str:
    """Return a script's sha256 as a Content-Security-Policy states it; browsers read line ends of any kind as a
    newline."""
    unified = script.replace("\r\n", "\n").replace("\r", "\n")
    return base64.b64encode(hashlib.sha256(unified.encode()).digest()).decode()


def report_page(rundir: RunDir, tier: Tier) -> str:
    """Return a job's present state as a page of its own (about 5 MB, most of it plotly.js). ``tier`` sets the price of
    a job without a plan."""
    now = time.time()
    job = OpenJob(rundir, tier).refresh(now)
    while job.is_behind:
        job.read_more()
    return saved_page(job.snapshot(0, "", now))


def write_report(rundir: RunDir, tier: Tier) -> str:
    """Write `report_page` into the run directory; return its address."""
    rundir.storage.write(REPORT, report_page(rundir, tier).encode())
    return f"{rundir.uri}/{REPORT}"
