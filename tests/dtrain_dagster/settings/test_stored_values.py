"""Values of assets: where Dagster keeps them, and what another version has stored."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest

from dtrain_dagster.resources import build_resources, value_files
from dtrain_dagster.settings.environment import Settings

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Bare:
    """A value whose file has none of its fields."""

    dollars: float


def test_nobody_chooses_the_store_in_a_launchpad(tmp_path):
    assert build_resources(Settings(home=tmp_path))["io_manager"] is value_files
    assert not value_files.config_schema.config_type.fields


def test_values_are_where_dagster_keeps_them_and_named_by_less_than_their_path(tmp_path: Path):
    @dg.asset(io_manager_key="values")
    def numbers() -> list[int]:
        return [1, 2]

    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        made = dg.materialize([numbers], instance=instance, resources={"values": value_files})
        [event] = made.get_asset_materialization_events()
        assert event.materialization.metadata["path"].value == "numbers in Dagster's storage"
        store = dg.FilesystemIOManager(base_dir=instance.storage_directory())
        assert dg.materialize(
            [numbers, dg.asset(lambda numbers: numbers.copy(), name="copied", io_manager_key="values")],
            instance=instance, resources={"values": store}, selection="copied",
        ).output_for_node("copied") == [1, 2]  # fmt: skip


@pytest.mark.parametrize(
    "stored", [b"cno.such.module\nPlan\n.", pickle.dumps(Bare.__new__(Bare))], ids=["moved", "bare"]
)
def test_a_value_of_another_version_is_refused_with_the_remedy(tmp_path: Path, stored: bytes):
    """Of a class that is elsewhere now, and of one that had fewer fields."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        path = Path(instance.storage_directory(), "plan")
        path.parent.mkdir()
        path.write_bytes(stored)
        key = dg.AssetKey("plan")
        # Each of these enters an instance, which Dagster would else take for the present one after this test.
        with (
            dg.build_init_resource_context(instance=instance) as context,
            dg.build_output_context(asset_key=key) as upstream,
            dg.build_input_context(asset_key=key, upstream_output=upstream) as where,
            pytest.raises(dg.Failure, match=r"another version \(.+\): materialize plan again"),
        ):
            value_files.resource_fn(context).load_input(where)


def test_the_section_of_the_documentation_sends_outputs_of_runs_to_blob(tmp_path: Path):
    section = re.search(r"```yaml\n(compute_logs:.*?)```", (ROOT / "docs/azure.md").read_text(), re.DOTALL)
    assert section is not None
    (tmp_path / "dagster.yaml").write_text(section[1].replace("<account>", "values"))
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert type(instance.compute_log_manager).__name__ == "AzureBlobComputeLogManager"
