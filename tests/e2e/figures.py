"""Every figure of one job that is shown in more than one place, with the places: they have to agree."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dtrain_dagster.cli.main import main
from dtrain_dagster.costs.money import USD, digits_of

Figures = dict[str, dict[str, float]]
"""The name of a figure → the place → the value there."""
TOLERANCE = {
    "seconds": 0.051,  # shown with one digit after the point
    "goodput": 0.00051,
    "test_nll": 5e-7,
    "node_hours": 1.1e-6,
    "and_probe_usd": 2.1e-6,
}
"""The largest difference that rounding for display makes, where it is not that of dollars."""
DOLLARS = 5.1e-7
LAST_DIGITS = {"probe_usd": 2.1, "total_usd": 1.1}
"""The same of figures that stand in a bill's tables, in units of its last digit: the larger the bill, the fewer digits
it has (`digits_of`). Its rows share their rounding, so that they sum to it: each of the two nodes of a probe may stand
a last digit beside its own value. The sum of a training and its probe is one of two rounded values."""


def figures_of(run_dir: Path, assets: Mapping[str, Mapping[str, Any]]) -> Figures:
    """Read all places of a finished job. ``assets``: each asset's metadata."""
    found: Figures = defaultdict(dict)
    _of_assets(found, assets)
    _of_files(found, run_dir)
    _of_command_line(found, run_dir.name)
    return found


def disagreements(found: Figures) -> list[str]:
    """Return a sentence for each figure whose places differ by more than rounding."""
    said = []
    limits = TOLERANCE | {
        name: digits * 10.0 ** -digits_of(round(max(found["total_usd"].values()) * USD))
        for name, digits in LAST_DIGITS.items()
    }
    for name, places in found.items():
        limit = limits.get(name) or next(
            (limits[key] for key in TOLERANCE if name.endswith(key)), DOLLARS if "usd" in name else 0.0
        )
        if max(places.values()) - min(places.values()) > limit:
            said.append(f"{name}: {places}")
    return said


def _of_assets(found: Figures, assets: Mapping[str, Mapping[str, Any]]) -> None:
    plan, cost, report, model, checkpoint = (
        assets[name]
        for name in ("cost_estimate", "cost_breakdown", "performance_report", "registered_model", "trained_checkpoint")
    )
    [row] = [row for row in plan["choices"] if "this plan" in row["mark"]]
    found["estimated_usd"] |= {"plan": plan["estimated_usd"], "choices": row["usd"], "cost": cost["estimated_usd"]}
    found["estimated_seconds"] |= {"plan": plan["estimated_seconds"], "cost": cost["estimated_seconds"]}
    found["probe_usd"] |= {"plan": plan["probe_usd"], "cost": cost["probe_usd"]}
    found["probe_usd"]["cost's ledger"] = _probe_in(cost["ledger"])
    found["probe_usd"]["cost's nodes"] = sum(item["usd"] for item in cost["by_node"] if item["purpose"] == "probe")
    found["total_usd"] |= {"cost": cost["total_usd"], "parts": cost["training_usd"] + cost["probe_usd"]}
    found["total_usd"]["model's tags"] = float(model["tags"]["cost_usd_total"])
    found["node_hours"] |= {"cost": cost["node_hours"], "model's tags": float(model["tags"]["node_hours"])}
    found["wall_seconds"] |= {"cost": cost["wall_seconds"], "report": report["wall_seconds"]}
    found["goodput"] |= {"cost": cost["goodput_percent"] / 100, "report": report["goodput_percent"] / 100}
    found["steps"] |= {"checkpoint": checkpoint["steps"], "model's tags": int(model["tags"]["steps"])}
    found["test_nll"] |= {"checkpoint": checkpoint["test_nll"], "report": report["test"]["nll"]}
    found["test_nll"]["model's tags"] = float(model["tags"]["test_nll"])
    _same_words(found, "cost in the card", model["model_card"], rf"\$({cost['total_usd']:.4f}) ", cost["total_usd"])


def _of_files(found: Figures, run_dir: Path) -> None:
    plan, cost, report, result = (
        json.loads((run_dir / name).read_text())
        for name in ("plan.json", "reports/cost_breakdown.json", "reports/performance_report.json", "result.json")
    )
    estimate = plan["estimate"]
    found["estimated_usd"]["plan.json"] = estimate["usd"]["expected"]
    found["estimated_seconds"]["plan.json"] = estimate["seconds"]["expected"]
    stays = [stay for probe in plan["probes"] for stay in probe["usage"]]
    paid = sum(stay["ended_at"] - stay["started_at"] for stay in stays) / 3600 * estimate["usd_per_node_hour"]
    found["probe_usd"] |= {"plan.json": paid, "cost_breakdown.json": cost["probe_usd"]}
    found["probe_usd"]["cost_breakdown.json, ledger"] = _probe_in(cost["ledger"])
    found["total_usd"] |= {"cost_breakdown.json": cost["total_usd"], "metrics": cost["metrics"]["total_cost_usd"]}
    found["estimated_and_probe_usd"] |= {
        "metrics": cost["metrics"]["estimated_total_cost"],
        "plan.json": estimate["usd"]["expected"] + paid,
    }
    found["goodput"] |= {
        "cost_breakdown.json": cost["goodput"],
        "performance_report.json": report["goodput"]["share"],
    }
    found["steps"] |= {"result.json": result["steps"], "plan.json": plan["work"]["steps"]}
    found["test_nll"]["result.json"] = result["test"]["nll"]
    page = (run_dir / "reports" / "performance_report.html").read_text()
    shown = re.search(r'id="snapshot-data">(.*?)</script>', page, re.DOTALL)
    assert shown is not None
    headline = {item["label"]: item["value"] for item in json.loads(shown[1])["headline"]}
    found["steps"]["page"] = int(headline["step"].replace(",", ""))
    _same_words(found, "cost on the page", headline["cost"], r"\$([\d.]+)", cost["total_usd"])


def _of_command_line(found: Figures, job_id: str) -> None:
    told = CliRunner().invoke(main, ["cost", job_id, "--json"], catch_exceptions=False)
    cost = json.loads(told.stdout)
    for name in ("total_usd", "probe_usd"):
        found[name]["dtrain cost --json"] = cost[name]
    found["estimated_and_probe_usd"]["dtrain cost --json"] = cost["metrics"]["estimated_total_cost"]
    found["goodput"]["dtrain cost --json"] = cost["goodput"]
    summary = CliRunner().invoke(main, ["status", job_id], catch_exceptions=False).stdout
    _same_words(found, "cost in the summary", summary, r"with its probe \$([\d.]+)", cost["total_usd"])
    _same_words(found, "steps in the summary", summary, r"(\d+) steps", found["steps"]["result.json"])


def _same_words(found: Figures, name: str, text: str, pattern: str, value: float) -> None:
    """Note a figure within a text, to as many digits as it has there."""
    match = re.search(pattern, text)
    assert match is not None, f"{name}: no {pattern} in {text}"
    digits = len(match[1].partition(".")[2])
    found[name] |= {"text": float(match[1]), "figure": round(value, digits)}


def _probe_in(rows: Any) -> float:
    """Return the dollars of the cause «probe» in a ledger's rows."""
    [usd] = [float(row["usd"]) for row in rows if row["cause"] == "probe"]
    return usd
