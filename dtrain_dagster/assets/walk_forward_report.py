"""The asset `walk_forward_report`: all test years that there are, judged together, and what they have cost."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

from dtrain_dagster.assets.common import best_rows, charts, head_of_page, links, page_of, sentences, table_file
from dtrain_dagster.assets.pipeline import STUDIES, Pipeline, code_version_of
from dtrain_dagster.assets.walk_forward import TrainedYear
from dtrain_dagster.assets.walk_forward_gate import REPORT, flat, report_path
from dtrain_dagster.resources import ProjectResource, project_resource
from dtrain_dagster.support.formatting import dollars
from dtrain_dagster.support.graph_names import GraphNames
from dtrain_dagster.support.page_entries import fit_page
from trainer.evaluation.gate import is_beyond_chance
from trainer.storage.open import open_storage

SHOWN = ("ridge", "har_x", "ewma")
"""The baselines in tables and pictures, the hardest to beat first; the JSON has all of them."""
COLUMNS = ("year", "nll", "over ridge", "over HAR-X", "coverage", "cost")
"""The columns of the table on the page; the file has all."""
REGIME_WORDS = (
    "A day is turbulent where the index's volatility over the 22 days up to it is above the median of all days before."
)


def build_walk_forward_report(pipeline: Pipeline, partitions: dg.PartitionsDefinition) -> dg.AssetsDefinition:
    """Return the asset `walk_forward_report` of a graph. It is made of the years that are there."""
    names, walk = pipeline.names, pipeline.names.walk_forward

    @dg.asset(
        key=names.key(REPORT),
        group_name=names.unique(STUDIES),
        owners=list(pipeline.owners),
        code_version=code_version_of(REPORT),
        kinds={"python"},
        required_resource_keys={names.project},
        ins={
            "years": dg.AssetIn(
                key=walk.key("year_scores"),
                partition_mapping=dg.AllPartitionMapping(),
                metadata={"allow_missing_partitions": True},
            )
        },
        description="All test years together: the model against every baseline that was fitted as often, with "
        "Newey-West t-statistics, by year and by regime; and the dollars of each year. Missing years are named.",
        check_specs=[
            dg.AssetCheckSpec(
                "walk_forward_gate",
                asset=names.key(REPORT),
                description="Over all years no baseline is better beyond chance, EWMA and HAR-X are worse beyond "
                "chance, and the 90 % interval covers 87 to 93 %. DTRAIN_GATE=walk_forward requires this of a "
                "champion.",
            )
        ],
    )
    def walk_forward_report(context: dg.AssetExecutionContext, years: Any) -> dg.MaterializeResult:
        """Judge all years that are there together."""
        # Dagster gives one value where there is one partition, and else a value for each.
        found = list(years.values()) if isinstance(years, dict) else [years]
        keys = [int(key) for key in partitions.get_partition_keys()]
        return report_years(context, found, keys, project_resource(context, names), names)

    return walk_forward_report


def report_years(
    context: dg.AssetExecutionContext, years: Sequence[TrainedYear], wanted: Sequence[int], project: ProjectResource,
    names: GraphNames,
) -> dg.MaterializeResult:  # fmt: skip
    """Return the report of these years, of all that are ``wanted``. Its JSON is kept on this machine: a gate may rest
    on it. Raise `dagster.Failure` where there is no year yet."""
    from dtrain_dagster.dashboard.job_groups import group_page

    if not years:
        raise dg.Failure(
            f"no test year was made yet: launch a backfill of {names.walk_forward.key('year_scores')}, or of "
            f"the job {names.walk_forward.pipeline}",
            allow_retries=False,
        )
    document = report_document(years, wanted)
    path = report_path(Path(project.storage_uri), names)
    open_storage(str(path.parent)).write(path.name, json.dumps(document, indent=1, allow_nan=False).encode())
    for sentence in document["notes"]:
        context.log.info(sentence)
    gate = document["gate"]
    address = group_page(project.dashboard_url, names.walk_forward.pipeline)
    return dg.MaterializeResult(
        metadata=fit_page(report_page(years, document, path, {"dashboard": address})),
        check_results=[
            dg.AssetCheckResult(
                check_name="walk_forward_gate",
                passed=gate["passed"],
                severity=dg.AssetCheckSeverity.WARN,
                metadata={"reasons": sentences(gate["reasons"])},
            )
        ],
    )


def report_page(
    years: Sequence[TrainedYear], document: Mapping[str, Any], path: Path, addresses: Mapping[str, str]
) -> dict[str, Any]:
    """Return the page of a report, after its table of all years was written beside the JSON at ``path``.
    ``addresses``: the pages of the web about it, by their names."""
    from dtrain_dagster.reports.small_pictures import small_curves
    from dtrain_dagster.reports.walk_forward_charts import NAMES, summed_gains, walk_forward_chart

    scores, best, together = [item.scores for item in years], document["best_baseline"], document["all"]
    shown = [name for name in SHOWN if all(name in item.baselines for item in scores)]
    words = [f"over {NAMES[name]}" for name in shown]
    if words:
        words[0] = f"nats gained {words[0]}"
    gained = {word: summed_gains(scores, name) for word, name in zip(words, shown, strict=True)}
    rows, title = year_rows(document), "Gain over each baseline, year by year"
    head = head_of_page(
        document["notes"][0],
        small_curves(gained),
        {
            "nll": round(together["nll"], 6),
            f"gain_over_{best}": round(together["gains"][best]["nats"], 6) if best else None,
            "total_usd": round(document["usd"]["total"], 6),
        },
    )
    rest: dict[str, Any] = {
        "by_year": best_rows([rows[-1], *reversed(rows[:-1])], COLUMNS),
        **links(**addresses),
        **({"charts": charts({title: walk_forward_chart(scores, shown)})} if shown else {}),
        "all_years": dg.MarkdownMetadataValue(gain_table(document)),
        "by_year_file": table_file(str(path.parent), f"{path.stem}.csv", rows),
        "report": dg.MetadataValue.path(str(path)),
        "notes": dg.MarkdownMetadataValue("\n".join(f"- {note}" for note in document["notes"])),
        "years": len(document["years"]),
        "missing_years": dg.JsonMetadataValue(document["missing_years"]),
        "coverage_90": round(together["coverage_90"], 4),
        **{
            f"{kind}_over_{name}": round(gain[part], digits)
            for name, gain in together["gains"].items()
            for kind, part, digits in (("gain", "nats", 6), ("t", "t", 2))
            if gain[part] is not None
        },
    }
    return page_of(head, rest)


def report_document(years: Sequence[TrainedYear], wanted: Sequence[int]) -> dict[str, Any]:
    """Return the content of a report's JSON: what `trainer.evaluation.walk_forward.judge_years` says, with the dollars,
    the jobs, the missing years, the settings, and the gate's verdict. Pure."""
    from trainer.evaluation.walk_forward import judge_years, walk_forward_gate

    ordered = sorted(years, key=lambda item: item.scores.year)
    document = judge_years([item.scores for item in ordered])
    gate = walk_forward_gate(document)
    reasons = [*gate.reasons, *(f"the years differ: {words}" for words in differences(ordered))]
    document["missing_years"] = [year for year in wanted if year not in document["years"]]
    document["usd"] = {
        "total": sum(item.usd for item in ordered),
        "words": ordered[0].price_words,
        "by_year": {str(item.scores.year): item.usd for item in ordered},
    }
    document["seconds"] = {str(item.scores.year): item.seconds for item in ordered}
    document["jobs"] = {str(item.scores.year): item.job_id for item in ordered}
    document["settings"] = dict(ordered[-1].settings)
    document["differences"] = differences(ordered)
    document["gate"] = {"passed": not reasons, "reasons": reasons}
    document["notes"] = notes(document)
    return document


def differences(years: Sequence[TrainedYear]) -> list[str]:
    """Return for each year that was made with other settings than the last one the first that differs. Pure. That the
    first year of warm starts has no year before it is no difference."""
    reference, found = flat(years[-1].settings), []
    for item in years[:-1]:
        own = flat(item.settings)
        if item is years[0]:
            own["warm_start"] = reference["warm_start"]
        for name in sorted(own.keys() | reference.keys()):
            if own.get(name) != reference.get(name):
                found.append(f"{item.scores.year} has {name} = {own.get(name)}, not {reference.get(name)}")
                break
    return found


def notes(document: Mapping[str, Any]) -> list[str]:
    """Return sentences about a report; each is computed from its figures, the verdict first. Pure."""
    together, best = document["all"], document["best_baseline"]
    years = document["years"]
    said = []
    if best is None:
        said.append(f"NLL {together['nll']:.4f} over {len(years)} test year(s); no baseline could be judged beside it.")
    else:
        gain = together["gains"][best]
        t = "" if gain["t"] is None else f", Newey-West t = {gain['t']:.1f}"
        certain = is_beyond_chance(gain["t"])
        verdict = ("better" if gain["nats"] > 0 else "worse") if certain else "no better and no worse, beyond chance,"
        said.append(
            f"Over {len(years)} test year(s) the model is {verdict} than the best baseline, {best}: "
            f"{gain['nats']:+.4f} nats{t}; it won {document['years_won'][best]} of them."
        )
    usd = document["usd"]
    said.append(f"All years together cost {dollars(usd['total'])} ({usd['words']}).")
    for name, part in document["by_regime"].items():
        against = part["gains"].get(best)
        if against:
            t = "" if against["t"] is None else f" (t = {against['t']:.1f})"
            said.append(f"On {part['days']:,} {name} days: {against['nats']:+.4f} nats over {best}{t}.")
    said += [REGIME_WORDS] if document["by_regime"] else []
    if document["missing_years"]:
        said.append(f"Missing: {', '.join(map(str, document['missing_years']))}.")
    return [*said, *(f"The years differ: {words}." for words in document["differences"])]


def year_rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each year, and a last one for all of them. Pure."""
    from dtrain_dagster.reports.walk_forward_charts import NAMES

    rows = []
    for year, part in [*document["by_year"].items(), ("all", document["all"])]:
        row: dict[str, Any] = {"year": year, "windows": part["windows"], "nll": round(part["nll"], 4)}
        for name in SHOWN:
            gain = part["gains"].get(name)
            row[f"over {NAMES[name]}"] = "–" if gain is None else in_words(gain)
        usd = document["usd"]["total"] if year == "all" else document["usd"]["by_year"][year]
        row |= {"coverage": f"{part['coverage_90']:.1%}", "cost": dollars(usd)}
        rows.append(row | {"job": document["jobs"].get(year, "")})
    return rows


def in_words(gain: Mapping[str, Any]) -> str:
    """Return ``+0.0042 (t 1.3)``. Pure."""
    return f"{gain['nats']:+.4f}" + ("" if gain["t"] is None else f" (t {gain['t']:.1f})")


def gain_table(document: Mapping[str, Any]) -> str:
    """Return the gains over every baseline as a Markdown table: over all days, and by regime. Pure."""
    columns = {"all days": document["all"], **{f"{name} days": part for name, part in document["by_regime"].items()}}
    rows = [f"| baseline | its NLL | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, nll in sorted(document["all"]["baselines"].items(), key=lambda item: item[1]):
        cells = [in_words(part["gains"][name]) for part in columns.values()]
        rows.append(f"| {name} | {nll:.4f} | {' | '.join(cells)} |")
    return "\n".join(rows)
