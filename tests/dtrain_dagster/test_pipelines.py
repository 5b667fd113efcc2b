"""Several training graphs in one code location: what each is named, and that none meets another."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from dtrain_dagster.assets.pipeline import Pipeline
from dtrain_dagster.assets.plan_options import TrainingOptions, job_on
from dtrain_dagster.automation.retraining import ask
from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.data.build_once import BuiltDataset
from dtrain_dagster.definitions import build_defs
from dtrain_dagster.pipelines import Cluster, PipelineError, Prices, build_program_asset, build_training_assets
from dtrain_dagster.planning.build_plan import size_up_job
from dtrain_dagster.resources import build_resources
from dtrain_dagster.sensors.watched_clusters import watched_clusters
from dtrain_dagster.settings.environment import Settings, SettingsError
from dtrain_dagster.support.graph_names import GraphNames
from trainer.config import ConfigError, OptimizerConfig

FEATURES = dg.AssetKey(["team", "features"])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('run when it is planned, not when it is defined')\n")
    return path


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> dg.Definitions:
    """A code location with the graph of the stock prices and four more, one on another cluster, and a program."""
    script = tmp_path_factory.mktemp("location") / "train.py"
    script.touch()

    @dg.asset(key=FEATURES)
    def features() -> str:
        return "a folder"

    return dg.Definitions.merge(
        build_defs(Settings()),
        dg.Definitions(assets=[features], resources={"team": dg.ResourceDefinition.none_resource()}),
        build_training_assets("quotes", Prices(source="prices.csv", window=20), training={"epochs": 2}),
        build_training_assets("features", features, model="lstm", owners=["team:research"]),
        build_training_assets("folder", "a-folder", model_name="Folder model", schedule="0 3 * * *"),
        build_training_assets("vision", script=script, cluster=Cluster(name="second", nodes=1), deps=[FEATURES]),
        build_program_asset("own", script, engine="ray"),
    )


def parents(defs: dg.Definitions) -> dict[str, set[str]]:
    graph = defs.resolve_asset_graph()
    return {node.key.to_user_string(): {key.to_user_string() for key in node.parent_keys} for node in graph.asset_nodes}


def test_each_graph_is_whole_under_its_own_prefix(location: dg.Definitions) -> None:
    found = parents(location)
    stock = parents(build_defs(Settings()))
    assert {key: found[key] for key in stock} == stock, "the graph of the stock prices is as it is alone"

    quotes = {f"quotes/{key}": {f"quotes/{parent}" for parent in above} for key, above in stock.items()}
    assert {key: above for key, above in found.items() if key.startswith("quotes")} == quotes
    assert found["features/sharded_dataset"] == {"team/features"}
    assert found["folder/sharded_dataset"] == set()
    assert {key: above for key, above in found.items() if key.startswith("vision/")} == {
        "vision/cost_estimate": {"team/features"},
        "vision/gpu_cluster": set(),
        "vision/trained_checkpoint": {"vision/cost_estimate", "vision/gpu_cluster"},
        "vision/cost_breakdown": {"vision/cost_estimate", "vision/trained_checkpoint"},
        "vision/performance_report": {"vision/cost_estimate", "vision/trained_checkpoint"},
    }


def test_a_script_whose_model_is_registered_has_the_asset_and_its_check(script: Path) -> None:
    defs = build_training_assets("vision", script=script, registry=True)
    dg.Definitions.validate_loadable(defs)
    assert parents(defs)["vision/registered_model"] == {"vision/cost_estimate", "vision/trained_checkpoint"}
    keys = defs.resolve_asset_graph().asset_check_keys
    assert {key.name for key in keys if key.asset_key.path[-1] == "registered_model"} == {"serving_endpoint_answers"}
    made = defs.resolve_job_def("vision_train").asset_layer.selected_asset_keys
    assert dg.AssetKey(["vision", "registered_model"]) in made


def test_no_name_of_a_graph_meets_another(location: dg.Definitions) -> None:
    dg.Definitions.validate_loadable(location)  # Dagster refuses two jobs, sensors, ops or keys of one name
    graph, repository = location.resolve_asset_graph(), location.get_repository_def()
    assert {"train", "quotes_train", "features_train", "folder_train", "vision_train"} <= set(repository.job_names)
    for kind in ("idle_cluster", "cost_overrun", "ceilings", "queue", "orphans", "retraining_failed"):
        for name in (kind, f"quotes_{kind}", f"vision_{kind}"):
            assert repository.has_sensor_def(name)
    assert repository.has_sensor_def("quotes_new_data")
    assert not repository.has_sensor_def("vision_new_data"), "it has no prices"
    for name in ("quotes", "features", "folder"):
        checks = {key.name for key in graph.asset_check_keys if key.asset_key.path[0] == name}
        assert {"weights_equal_on_all_ranks", "promotion_gate", "planted_leak_is_caught", "estimate_scored"} <= checks
    resources = location.resources or {}
    assert [resources[f"{name}_project"].model_name for name in ("quotes", "folder")] == ["quotes", "Folder model"]
    assert [resources[f"{name}_cluster"].node_count for name in ("quotes", "vision")] == [3, 1]
    assert resources["project"].model_name == "stock-return-distribution"
    assert location.resolve_schedule_def("folder_weekly_retraining").cron_schedule == "0 3 * * *"
    group = {node.key.path[-1] for node in graph.asset_nodes if node.group_name == "vision"}
    assert group == {"cost_estimate", "trained_checkpoint", "cost_breakdown", "performance_report"}
    assert graph.get(dg.AssetKey(["features", "cost_estimate"])).owners == ["team:research"]


def test_the_job_of_a_graph_makes_that_graph_only(location: dg.Definitions) -> None:
    made = location.resolve_job_def("quotes_train").asset_layer.selected_asset_keys
    assert {key.path[0] for key in made} == {"quotes"}
    assert not {dg.AssetKey(["quotes", name]) for name in ("hyperparameter_search", "gpu_cluster")} & made
    assert location.resolve_job_def("own_run").asset_layer.selected_asset_keys == {dg.AssetKey(["own", "program_run"])}
    stock = location.resolve_job_def("train").asset_layer.selected_asset_keys
    assert {len(key.path) for key in stock} == {1}


def test_a_launchpad_begins_with_what_the_graph_was_built_with(location: dg.Definitions) -> None:
    def launchpad(*path: str) -> dict[str, object]:
        fields = location.resolve_assets_def(dg.AssetKey(path)).op.config_schema.config_type.fields
        return {name: field.default_value for name, field in fields.items() if field.default_provided}

    plan = launchpad("quotes", "cost_estimate")
    assert (plan["epochs"], plan["model"]) == (2, "har_tcn")
    assert launchpad("quotes", "sharded_dataset")["window"] == 20
    assert launchpad("quotes", "stock_prices")["source"] == "prices.csv"
    assert launchpad("features", "cost_estimate")["model"] == "lstm"
    assert launchpad("folder", "sharded_dataset")["folder"] == "a-folder"
    assert launchpad("cost_estimate")["epochs"] == TrainingOptions().epochs


def test_jobs_of_two_graphs_that_train_the_same_have_other_ids(tmp_path: Path) -> None:
    resources = build_resources(Settings(home=tmp_path))
    dataset = BuiltDataset(
        uri=str(tmp_path), dataset_id="d", rows=1, samples={"train": 9, "valid": 1, "test": 1}, excluded={}, built=True,
        shared_uri=str(tmp_path),
    )  # fmt: skip
    cluster = resources["cluster"]
    job = job_on(1, TrainingOptions(), cluster, resources["project"], dataset)
    price = price_of(cluster.gpu_type)
    stock, one, two = (
        size_up_job(job, dataset.samples, price, "dedicated", 1, 1, cluster.traits, names=GraphNames(name))
        for name in ("", "one", "two")
    )
    assert one.fingerprint == f"one-{stock.fingerprint}"
    assert two.fingerprint == f"two-{stock.fingerprint}"
    assert len({stock.pace, one.pace, two.pace}) == 3, "nor do they share a probe, which one of them may end"
    options = TrainingOptions(optimizer="torch.optim:SGD", optimizer_args={"lr": 0.1}, lr_scheduler="")
    other = job_on(1, options, cluster, resources["project"], dataset)
    assert other.optimizer == OptimizerConfig(factory="torch.optim:SGD", args={"lr": 0.1})
    assert other.lr_scheduler is None
    with pytest.raises(ConfigError, match=r"optimizer_args = .* and none is named: set optimizer too"):
        job_on(1, TrainingOptions(optimizer_args={"lr": 0.1}), cluster, resources["project"], dataset)
    sized = size_up_job(other, dataset.samples, price, "dedicated", 1, 1, cluster.traits, names=GraphNames(""))
    assert sized.fingerprint != stock.fingerprint, "another optimizer is another training"


def test_where_a_graph_begins_counts_as_stated() -> None:
    """What `dtrain tune` has found does not take its place."""
    graph = Pipeline(defaults={"cost_estimate": {"learning_rate": 0.5}})
    begun = graph.options("cost_estimate", TrainingOptions)
    assert isinstance(begun(), TrainingOptions)
    assert begun().stated() == {"learning_rate"}
    assert begun(learning_rate=TrainingOptions().learning_rate, epochs=3).stated() == {"learning_rate", "epochs"}


def test_of_graphs_on_one_cluster_one_sensor_acts_and_reports_for_all(location: dg.Definitions) -> None:
    repository = location.get_repository_def()
    found = {}
    for name in ("", "features", "folder", "quotes", "vision"):
        with dg.build_sensor_context(repository_def=repository) as context:
            found[name] = [key.to_user_string() for key in watched_clusters(context, GraphNames(name))]
    assert found == {
        "": ["gpu_cluster", "features/gpu_cluster", "folder/gpu_cluster", "own/gpu_cluster", "quotes/gpu_cluster"],
        "features": [],
        "folder": [],
        "quotes": [],
        "vision": ["vision/gpu_cluster"],  # it has a cluster of its own
    }


def test_one_cause_starts_a_retraining_of_each_graph(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    graphs = [GraphNames(name) for name in ("", "one", "two")]
    resources = {key: made for names in graphs for key, made in build_resources(settings, names).items()}
    with (
        dg.DagsterInstance.ephemeral() as instance,
        dg.build_sensor_context(instance=instance, resources=resources) as context,
    ):
        asked = [ask(context, "weekly-1", 2.5, names) for names in graphs]
    assert [request.run_key for request in asked if isinstance(request, dg.RunRequest)] == [
        "weekly-1", "one-weekly-1", "two-weekly-1",
    ]  # fmt: skip
    assert isinstance(asked[1], dg.RunRequest)
    assert asked[1].run_config == {"ops": {"one__cost_estimate": {"config": {"budget_usd": 2.5}}}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "Two Words", "dataset": "d"}, "lower-case letters"),
        ({"name": "one"}, "give either dataset or script"),
        ({"name": "one", "script": "nowhere.py"}, "there is no file"),
        (
            {"name": "one", "dataset": "d", "training": {"epoch": 3}},
            "training.epoch is not a setting: did you mean epochs?",
        ),
        ({"name": "one", "dataset": "d", "training": {"epochs": 0}}, "epochs"),
        (
            {"name": "one", "dataset": "d", "limits": {"budget": 3}},
            "limits.budget is not a setting: did you mean budget_usd",
        ),
        ({"name": "one", "script": "x.py", "model": "tcn"}, "model cannot be combined with script"),
        ({"name": "one", "dataset": "d", "registry": True}, "registry is for a script"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises((PipelineError, ValueError), match=said) as found:
        build_training_assets(**arguments)  # type: ignore[arg-type]
    assert "pipeline " in str(found.value)


def test_a_cluster_that_cannot_be_used_is_named() -> None:
    with pytest.raises(SettingsError, match=r"pipeline one: DTRAIN_NODES=0"):
        build_training_assets("one", "d", cluster=Cluster(nodes=0))
