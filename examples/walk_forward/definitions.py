"""Walking forward: the model is trained anew for each test year, on what came before it, and all years are judged
together. A code location of plain assets; the README beside this file says how to start it.
"""

import hashlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import Field

from dtrain_dagster.data.prices import PricesRef, write_prices
from dtrain_dagster.data.sharding import DatasetParams
from dtrain_dagster.data.sources import price_source
from dtrain_dagster.settings.environment import load_settings
from examples.walk_forward.report import judge_years, verdict, year_figures, years_table
from examples.walk_forward.years import YearSplit, build_year
from trainer.rundir import RunDir

DTRAIN = Path(sys.executable).with_name("dtrain")
YEARS = dg.StaticPartitionsDefinition([str(year) for year in range(2000, 2023)])


class WalkForward(dg.ConfigurableResource):
    """What all years have in common."""

    prices: str = Field(default="sp500_panel", description="sp500_panel, or the address of a file")
    window: int = DatasetParams().window
    horizon: int = DatasetParams().horizon
    valid_years: int = Field(default=2, description="Years before the test year in which the epoch is chosen")
    nodes: int = 1
    options: list[str] = Field(
        default=[], description="More options of `dtrain train`, such as --model, my_models:make_model, --epochs, 12"
    )

    @property
    def digest(self) -> str:
        """Return six digits over what all years have in common."""
        common = json.dumps([self.window, self.horizon, self.valid_years, self.nodes, self.options])
        return hashlib.sha256(common.encode()).hexdigest()[:6]

    def train(self, context: dg.AssetExecutionContext, job_id: str, dataset: str) -> None:
        """Train on the cluster of the environment (``DTRAIN_CLUSTER``, …), or go on with a job that failed. Raise
        `dagster.Failure` if it fails; it is cancelled with its Dagster run."""
        command = [str(DTRAIN), "train", "--dataset", dataset, "--nodes", str(self.nodes), "--name", job_id]
        # A session of its own: Ctrl-C reaches it once, from here.
        process = subprocess.Popen(
            [*command, *self.options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        said = ""
        try:
            for line in process.stdout:
                said = line.strip() or said
                context.log.info(line.rstrip())
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # dtrain then cancels the job
            process.wait()
            raise
        if code:
            raise dg.Failure(f"job {job_id} ended with exit code {code}: {said}", allow_retries=False)


@dg.asset
def prices(walk: WalkForward) -> dg.MaterializeResult[PricesRef]:
    """The prices of which all years are made."""
    written = write_prices(price_source(walk.prices), load_settings().storage_uri)
    return dg.MaterializeResult(value=written, metadata={"last_date": written.last_date, "rows": written.rows})


@dg.asset(partitions_def=YEARS)
def year_dataset(context: dg.AssetExecutionContext, walk: WalkForward, prices: PricesRef) -> dg.MaterializeResult[str]:
    """The dataset of a test year: earlier days are for training and validation. Prices after the year are not read."""
    settings, split = load_settings(), YearSplit(year=int(context.partition_key), valid_years=walk.valid_years)
    shape = DatasetParams(window=walk.window, horizon=walk.horizon)
    built = build_year(prices, settings.storage_uri, split, shape, settings.calendar)
    return dg.MaterializeResult(value=built.uri, metadata={"dataset_id": built.dataset_id, **built.samples})


@dg.asset(partitions_def=YEARS)
def trained_year(
    context: dg.AssetExecutionContext, walk: WalkForward, year_dataset: str
) -> dg.MaterializeResult[dict[str, Any]]:
    """The training of a test year, judged on the year beside baselines that were fitted on the same days."""
    # The same settings and data are the same job, which is not bought twice.
    job_id = f"walk-{walk.digest}-{context.partition_key}-{Path(year_dataset).name[:8]}"
    rundir = RunDir(f"{load_settings().jobs_uri}/{job_id}")
    if (rundir.read_json("result.json") or {}).get("status") != "succeeded":
        walk.train(context, job_id, year_dataset)
    cost = subprocess.run([str(DTRAIN), "cost", job_id, "--json"], stdout=subprocess.PIPE, check=True)
    evaluation = rundir.read_json("evaluation.json") or {}
    figures = year_figures(int(context.partition_key), evaluation, json.loads(cost.stdout))
    figures |= {"settings": walk.digest, "job_id": job_id}
    shown = {name: figures[name] for name in ("nll", "coverage_90", "usd", "job_id")}
    return dg.MaterializeResult(value=figures, metadata=shown | {"notes": "\n".join(evaluation["notes"])})


@dg.asset(
    ins={
        "years": dg.AssetIn(
            "trained_year",
            partition_mapping=dg.AllPartitionMapping(),
            metadata={"allow_missing_partitions": True},
        )
    },
    check_specs=[dg.AssetCheckSpec("model_stands_all_years", asset="walk_forward_report")],
)
def walk_forward_report(years: dict[str, Any]) -> dg.MaterializeResult:
    """All test years that there are, judged together, and what they have cost."""
    # Dagster gives one value where there is one partition, and else a value for each.
    found = [years] if "year" in years else list(years.values())
    report = judge_years(found, [int(year) for year in YEARS.get_partition_keys()])
    return dg.MaterializeResult(
        metadata={
            "verdict": verdict(report),
            "years": dg.MetadataValue.md(years_table(report)),
            "total_usd": report["total_usd"],
            "missing_years": dg.MetadataValue.json(report["missing_years"]),
            "report": dg.MetadataValue.json(report),
        },
        check_results=[
            dg.AssetCheckResult(
                check_name="model_stands_all_years",
                passed=not report["reasons"],
                severity=dg.AssetCheckSeverity.WARN,
                metadata={"reasons": dg.MetadataValue.json(report["reasons"])},
            )
        ],
    )


walk_forward = dg.define_asset_job(
    "walk_forward",
    selection=[year_dataset, trained_year, walk_forward_report],
    description="One test year, and the report of all years that there are. A backfill makes many years.",
    executor_def=dg.in_process_executor,
)

defs = dg.Definitions(
    assets=[prices, year_dataset, trained_year, walk_forward_report],
    jobs=[walk_forward],
    resources={"walk": WalkForward()},
)
