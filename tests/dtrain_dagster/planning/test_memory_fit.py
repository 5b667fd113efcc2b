"""Whether a model fits into the memory of the nodes is said before they are bought, with what would fit."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from types import SimpleNamespace
from typing import Any

import pytest

from dtrain_dagster.costs.prices import price_of
from dtrain_dagster.planning.build_plan import Choices, Limits, compare_choices
from dtrain_dagster.planning.check_job import (
    Checked,
    MemoryRoom,
    judge_memory,
    memory_of,
    room_of,
    room_of_sku,
    why_too_small,
)
from dtrain_dagster.settings.cluster_kinds import KINDS
from tests.dtrain_dagster.planning.planned_nodes import planned_on
from tests.dtrain_dagster.planning.test_choices import Amdahl
from trainer.config import ConfigError, DistributedTrainingConfig
from trainer.performance.memory import GIB, ModelBytes

A100, V100, T4 = "Standard_NC24ads_A100_v4", "Standard_NC6s_v3", "Standard_NC4as_T4_v3"
MODEL = ModelBytes(parameters=5 * GIB, trained=5 * GIB, block=GIB // 10, rest=GIB // 10, sample=GIB / 64)
"""20 GiB with gradients and moments."""


def config(**fields: Any) -> DistributedTrainingConfig:
    return DistributedTrainingConfig(**{"batch_size_per_gpu": 64, **fields})


def room(nodes: int = 1, sku: str = T4, ranks: int = 1) -> MemoryRoom:
    return room_of_sku(price_of(sku, "eastus"), nodes, ranks)


def refusal(model: ModelBytes, training: DistributedTrainingConfig, *there: Any) -> str:
    with pytest.raises(ConfigError, match=r"^the model does not fit") as found:
        judge_memory(model, training, *there)
    return str(found.value)


def test_what_cannot_fit_is_refused_with_the_fewest_ranks_that_suffice() -> None:
    said = refusal(MODEL, config(), room())
    assert "does not fit: 20 GiB a rank with training.strategy = 'ddp'" in said
    assert f"{T4} has 16 GiB for each GPU" in said
    assert "20 GiB a rank" in said
    assert 'training.strategy = "fsdp" on 2 ranks would, 10.5 GiB each' in said
    assert "(DTRAIN_NODES = 2)" in said
    here = refusal(MODEL, config(), room(nodes=3))
    assert 'training.strategy = "fsdp" on 3 ranks would' in here
    assert "DTRAIN_NODES" not in here, "no more nodes than are planned"
    larger = refusal(MODEL, config(), room(), [price_of(A100, "eastus")])
    assert f"a SKU with 20 GiB would, as {A100} (80 GiB for each GPU" in larger


def test_a_shared_model_is_refused_where_its_ranks_are_too_few() -> None:
    large = replace(MODEL, parameters=20 * GIB, trained=20 * GIB)
    said = refusal(large, config(strategy="fsdp"), room(nodes=4))
    assert "512 MiB of it gathered" in said
    assert 'training.strategy = "fsdp" on 6 ranks would' in said
    own = refusal(MODEL, config(strategy="hsdp"), room(nodes=4))
    assert "with training.strategy = 'hsdp'" in own, "each node of one rank holds all of it"
    assert 'training.strategy = "fsdp" on 4 ranks would' in own
    assert judge_memory(MODEL, config(strategy="fsdp"), room(nodes=4)) == judge_memory(MODEL, config(), room(sku=A100))


def test_where_a_node_has_several_gpus_a_copy_on_each_node_comes_first() -> None:
    price = replace(price_of(T4, "eastus"), sku="Standard_of_4", gpus=4)
    said = refusal(MODEL, config(), room_of_sku(price, 2, 4))
    assert 'training.strategy = "hsdp" would, 5.5 GiB each' in said
    assert "fsdp" not in said


def test_the_largest_micro_batch_that_fits_is_told() -> None:
    model = replace(MODEL, parameters=2 * GIB, trained=2 * GIB)  # 8 GiB
    assert judge_memory(model, config(), room(nodes=4)) == "", "1 GiB of activations"
    said = judge_memory(model, config(batch_size_per_gpu=700), room(nodes=4))
    assert "memory is short: 18.9 GiB a rank with 700 samples at once" in said
    assert "At most about 409 fit (training.batch_size_per_gpu)" in said
    assert "training.activation_checkpointing = true" in said
    assert '"fsdp" on 4 ranks would, 2.5 GiB each' in said
    many = judge_memory(model, config(batch_size_per_gpu=1000), room(nodes=4))
    assert "would" not in many, "with no number of ranks do so many samples fit"
    half = judge_memory(model, config(batch_size_per_gpu=700, precision="bf16"), room(nodes=4))
    assert half == "", "activations of half the size"


def test_with_offloading_a_gpu_has_to_hold_what_is_gathered_alone() -> None:
    offloaded = config(strategy="fsdp", cpu_offload=True)
    large = replace(MODEL, parameters=40 * GIB, trained=40 * GIB)
    assert why_too_small(large, config(strategy="fsdp"), room(nodes=4))
    assert not why_too_small(large, offloaded, room(nodes=4))


def test_ranks_of_one_machine_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtrain_dagster.planning.check_job.machine_bytes", lambda: 32 * GIB)
    monkeypatch.setattr("trainer.node.gpus._gpu_count", lambda: 0)
    found = room_of(KINDS["local"], price_of(T4), 4, 1)
    assert found is not None
    assert found.bytes == 8 * GIB
    assert found.on_nodes(2).bytes == 16 * GIB
    said = refusal(MODEL, config(), found)
    assert "this machine has 32 GiB for 4 ranks" in said
    assert 'training.strategy = "fsdp" on 4 ranks would, 5.5 GiB each' in said
    assert room_of(KINDS["slurm"], price_of(T4), 4, 1) is None, "the site knows"


def test_a_plan_compares_no_nodes_that_are_too_small() -> None:
    price = price_of(T4)
    planned: Any = SimpleNamespace(
        price=price, tier="dedicated", node_count=3, kind=KINDS["azure_ml"], script=None,
        sizes=SimpleNamespace(processes_per_node=1), job=SimpleNamespace(training=config(strategy="fsdp")),
    )  # fmt: skip
    too_small, sentences = memory_of(planned, Checked(("unsure",), MODEL))
    assert sentences == ("unsure",)

    def table_of(skus: list[str], counts: list[int]) -> Choices:
        return compare_choices(
            planned_on(price, 3), Amdahl(), Limits(), too_small, prices=map(price_of, skus), node_counts=counts,  # type: ignore[arg-type]
            tiers=["dedicated"], today=date(2025, 9, 1),
        )  # fmt: skip

    table = table_of([T4, A100], [1, 2, 3])
    found = {(row.price.sku, row.node_count) for row in table.rows}
    assert found == {(T4, 2), (T4, 3), (A100, 1), (A100, 2), (A100, 3)}
    assert not table_of([T4], [1]).rows
    with pytest.raises(ConfigError, match="the model does not fit"):
        memory_of(planned, Checked((), replace(MODEL, parameters=40 * GIB, trained=40 * GIB)))
    known, _ = memory_of(planned, Checked())
    assert not known(price, 1), "of a model whose bytes are not known nothing is refused"
