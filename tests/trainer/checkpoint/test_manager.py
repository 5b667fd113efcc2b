from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_storage import Checkpoints, loaded_step, stalled, state

from trainer.checkpoint.async_writer import Stage
from trainer.checkpoint.manager import BEST, LATEST, CheckpointError, CheckpointManager, FencedError, check_fits
from trainer.config import ConfigError
from trainer.rundir import RunDir

Make = Callable[..., Checkpoints]


def folder_of(step: int, generation: int = 1) -> str:
    return f"checkpoints/g{generation:04d}-s{step:09d}"


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(str(tmp_path))


@pytest.fixture
def manager(rundir: RunDir) -> Iterator[Make]:
    """Makes managers of one run directory, which end with the test."""
    made: list[Checkpoints] = []

    def make(keep: int = 3, fingerprint: str = "this") -> Checkpoints:
        made.append(Checkpoints(rundir, keep, fingerprint))
        return made[-1]

    yield make
    for checkpoints in made:
        checkpoints.close(10)


def save(checkpoints: CheckpointManager, step: int, generation: int = 1, is_best: bool = False, **more: Any) -> str:
    """Save and wait; the folder."""
    assert checkpoints.save({**state(step), **more}, step, generation, is_best)
    assert checkpoints.wait(60)
    return folder_of(step, generation)


@pytest.mark.parametrize("where", ["local", "memory"])
def test_what_is_saved_is_loaded(rundir: RunDir, where: str) -> None:
    if where == "memory":
        rundir = RunDir(f"memory://{uuid.uuid4().hex}")
    checkpoints = Checkpoints(rundir)
    assert checkpoints.load_latest() is None
    assert checkpoints.committed_step() is None
    with pytest.raises(CheckpointError, match=r"BEST.json is gone"):
        checkpoints.load_best()
    folder = save(checkpoints, 7, is_best=True)
    for found in (checkpoints.load_latest(), checkpoints.load_best()):
        assert found is not None
        assert found[0] == folder
        assert torch.equal(found[1]["model"]["weight"], torch.full((100,), 7.0))
    assert rundir.read_json(LATEST) == rundir.read_json(BEST) == {"path": folder, "step": 7, "generation": 1}
    assert checkpoints.committed_step() == 7
    [report] = checkpoints.told
    assert {key: report[key] for key in ("kind", "step", "path", "is_best")} == {
        "kind": "checkpoint", "step": 7, "path": folder, "is_best": True,
    }  # fmt: skip
    assert report["bytes"] == rundir.storage.size(f"{folder}/state.pt")
    assert report["seconds"] > 0 < report["stall_seconds"]
    checkpoints.close(10)
    rundir.storage.delete("")


def test_the_newest_are_kept_and_the_best_besides(manager: Make) -> None:
    checkpoints = manager(keep=2)
    for step in range(1, 7):
        save(checkpoints, step, is_best=step == 2)
    assert checkpoints.folders() == [folder_of(6), folder_of(5), folder_of(2)]
    assert checkpoints.load_best()[1]["progress"]["step"] == 2
    save(checkpoints, 7, is_best=True)
    save(checkpoints, 8)
    assert checkpoints.folders() == [folder_of(8), folder_of(7)]


def test_one_step_is_written_once_though_it_is_best_and_regular(rundir: RunDir, manager: Make) -> None:
    checkpoints = manager()
    folder = save(checkpoints, 5)
    written = (Path(rundir.uri) / folder / "state.pt").stat().st_mtime_ns
    assert save(checkpoints, 5, is_best=True) == folder
    assert (Path(rundir.uri) / folder / "state.pt").stat().st_mtime_ns == written
    assert rundir.read_json(BEST) == rundir.read_json(LATEST)


def test_a_folder_is_never_written_by_a_second_writer(rundir: RunDir, manager: Make) -> None:
    save(manager(), 5)
    other = manager()
    save(other, 5, more=torch.zeros(3))
    assert [report["gives_up"] for report in other.told] == [True]
    assert f"{folder_of(5)} already exists" in other.told[0]["message"]
    assert "more" not in other.load(folder_of(5))


def test_a_later_generation_is_newer_even_at_an_earlier_step(manager: Make) -> None:
    """A start from scratch in a used folder: its checkpoints must neither lose to the old ones nor be pruned first."""
    checkpoints = manager(keep=2)
    for step in (100, 200, 300):
        save(checkpoints, step)
    save(checkpoints, 50, 2)
    assert loaded_step(checkpoints) == 50
    save(checkpoints, 60, 2)
    assert checkpoints.folders() == [folder_of(60, 2), folder_of(50, 2)]


def damage(folder: Path, how: str) -> None:
    if how == "a bit":
        data = bytearray((folder / "state.pt").read_bytes())
        data[len(data) // 2] ^= 1
        (folder / "state.pt").write_bytes(data)
    elif how == "cut short":
        (folder / "state.pt").write_bytes((folder / "state.pt").read_bytes()[:-10])
    elif how == "no state":
        (folder / "state.pt").unlink()
    elif how == "no manifest":  # what a process killed while saving leaves
        (folder / "manifest.json").unlink()
    elif how == "manifest cut short":
        (folder / "manifest.json").write_text("{")
    else:
        (folder / "manifest.json").write_text("[1]")


HOW = ["a bit", "cut short", "no state", "no manifest", "manifest cut short", "manifest of something else"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_one_is_named_and_the_one_before_is_used(
    rundir: RunDir, manager: Make, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    checkpoints = manager()
    save(checkpoints, 1)
    folder = save(checkpoints, 2, is_best=True)
    damage(Path(rundir.uri) / folder, how)
    with caplog.at_level(logging.WARNING):
        assert loaded_step(checkpoints) == 1
    assert f"the checkpoint {folder} is" in caplog.text
    with pytest.raises(CheckpointError, match=folder):
        checkpoints.load_best()


def test_a_foreign_one_is_named_and_the_one_before_is_used(
    rundir: RunDir, manager: Make, caplog: pytest.LogCaptureFixture
) -> None:
    save(manager(), 1)
    save(manager(fingerprint="other"), 2)
    assert loaded_step(manager()) == 1
    assert f"{folder_of(2)} belongs to another training" in caplog.text
    with pytest.raises(ConfigError, match=r"g0001-s000000002 belongs to another training.*training.resume=false"):
        manager(fingerprint="third").load_latest()
    damage(Path(rundir.uri) / folder_of(1), "a bit")  # then all that are whole are foreign
    with pytest.raises(ConfigError, match=folder_of(2)):
        manager().load_latest()


def test_whole_is_not_enough_where_latest_never_came_to_point_to_it(
    rundir: RunDir, manager: Make, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = manager()
    save(checkpoints, 1)
    pointer = rundir.storage.read(LATEST)
    save(checkpoints, 2)
    rundir.storage.write(LATEST, pointer)  # as if killed between the manifest and LATEST
    assert loaded_step(checkpoints) == 1
    assert f"{folder_of(2)} was never committed" in caplog.text
    for nothing in (b"{", b"[]", b'{"path": "elsewhere"}', None):
        rundir.storage.delete(LATEST)
        if nothing is not None:
            rundir.storage.write(LATEST, nothing)
        assert loaded_step(checkpoints) == 2
    save(checkpoints, 3)
    assert loaded_step(checkpoints) == 3


def test_what_cannot_be_read_is_not_what_is_not_there(rundir: RunDir, manager: Make) -> None:
    """To start over because the disk does not answer would throw everything away."""
    checkpoints = manager()
    save(checkpoints, 1)
    path = Path(rundir.uri) / folder_of(1) / "manifest.json"
    path.unlink()
    path.mkdir()  # reading it fails
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read: .*a folder is in its place"):
        checkpoints.load_latest()


def test_code_hidden_in_a_checkpoint_is_not_run(
    rundir: RunDir, manager: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

        def __deepcopy__(self, memo: object) -> Trap:
            return self

    checkpoints = manager()
    save(checkpoints, 1)
    folder = save(checkpoints, 2, trap=Trap())
    assert loaded_step(checkpoints) == 1
    assert f"{folder} was not written by this trainer: Weights only load failed" in caplog.text
    assert not (tmp_path / "sprung").exists()


def test_who_waits_gives_way_to_a_new_best_and_but_for_the_best_to_the_last(manager: Make) -> None:
    """While one is written, one waits; nobody else is taken, and nobody waits."""
    checkpoints = Checkpoints(keep=9)
    with stalled() as reached:
        assert checkpoints.save(state(1), 1, 1)
        assert reached.acquire(timeout=60)  # it is being written
        assert checkpoints.save(state(2), 2, 1)
        assert not checkpoints.save(state(3), 3, 1)
        assert checkpoints.save(state(3), 3, 1, is_last=True)
        assert checkpoints.save(state(4), 4, 1, is_best=True)
        assert checkpoints.save(state(5), 5, 1, is_best=True)
        assert not checkpoints.save(state(6), 6, 1)
        assert not checkpoints.save(state(6), 6, 1, is_last=True)
        assert not checkpoints.wait(0.01)
    assert checkpoints.wait(60)
    assert checkpoints.folders() == [folder_of(5), folder_of(1)]
    assert [loaded_step(checkpoints), checkpoints.committed_step()] == [5, 5]
    checkpoints.close(10)
    assert not checkpoints.save(state(7), 7, 1)


def test_what_is_saved_is_what_was_there_when_it_was_saved() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "matrix": base.clone(),
        "view": base.t(),
        "expanded": torch.ones(1).expand(5),
        "half": torch.randn(3).bfloat16(),
        "steps": torch.tensor(3, dtype=torch.int64),
        "none": torch.empty(0, 4),
        "grad": torch.nn.Parameter(torch.ones(2)),
    }
    live = {
        "model": tensors,
        "tied": tensors["matrix"],
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
        "step": 1,
        "seen": {1},
    }
    expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    checkpoints = Checkpoints(keep=9)
    with stalled():
        assert checkpoints.save(live, 1, 1)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor.untyped_storage().fill_(7)
        live["groups"][0]["lr"] = 9.0  # type: ignore[index]
        live["step"] = 2
        live["seen"].add(2)  # type: ignore[attr-defined]
        del tensors["half"]
    assert checkpoints.wait(60)
    found = checkpoints.load_latest()
    assert found is not None
    saved = found[1]
    assert saved["model"].keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved["model"][name], tensor), name
        assert saved["model"][name].dtype == tensor.dtype
    assert saved["groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert (saved["step"], saved["seen"]) == (1, {1})
    assert saved["tied"].data_ptr() == saved["model"]["matrix"].data_ptr()
    checkpoints.close(10)


def test_buffers_are_used_again_until_shapes_change() -> None:
    stage = Stage()
    source = {"a": torch.ones(1000), "b": torch.ones(10)}
    first = stage.copy(source)
    places = [tensor.data_ptr() for tensor in first.values()]
    source["a"].fill_(2)
    again = stage.copy(source)
    assert [tensor.data_ptr() for tensor in again.values()] == places
    assert again["a"].unique().tolist() == [2]
    other = stage.copy({"a": torch.zeros(2000), "b": torch.zeros(10).double()})
    assert (other["a"].shape, other["b"].dtype) == ((2000,), torch.float64)


def test_loading_touches_nothing_live_and_misfits_are_named(manager: Make) -> None:
    model = torch.nn.Linear(3, 2)
    live = model.state_dict()
    checkpoints = manager()
    checkpoints.save({"model": live}, 1, 1)
    assert checkpoints.wait(60)
    with torch.no_grad():
        model.weight.fill_(5)
    before = model.weight.clone()
    found = checkpoints.load_latest()
    assert found is not None
    loaded = found[1]["model"]
    assert torch.equal(model.weight, before)
    check_fits(loaded, live)
    for wrong, message in (
        ({**loaded, "weight": torch.zeros(2, 4)}, r"weight does not fit: \(2, 4\) .* \(2, 3\)"),
        ({**loaded, "bias": loaded["bias"].double()}, r"bias does not fit: .*float64 in the checkpoint.*float32"),
        ({"weight": loaded["weight"]}, "bias does not fit: only the model has it"),
        ({**loaded, "more": loaded["bias"]}, "more does not fit: only the checkpoint has it"),
        ({**loaded, "bias": [0.0, 0.0]}, "bias does not fit: list instead of Tensor"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_fits({"module": wrong}, {"module": live})
    with pytest.raises(CheckpointError, match=r"module\.weight"):
        check_fits({"module": {**loaded, "weight": torch.zeros(1)}}, {"module": live})
    assert torch.equal(model.weight, before)


def test_a_fence_stops_the_older_and_spares_what_counted(rundir: RunDir, manager: Make) -> None:
    old = manager()
    save(old, 1, is_best=True)
    new = manager()
    new.fence(2)
    for name in (LATEST, BEST):
        assert rundir.read_json(name) == {"path": folder_of(1), "step": 1, "generation": 2}
    old.told.clear()
    save(old, 2, is_best=True)
    [report] = old.told
    assert (report["kind"], report["gives_up"]) == ("checkpoint_failed", True)
    assert "generation 2 writes the checkpoints now" in report["message"]
    assert (old.committed_step(), loaded_step(new)) == (1, 1)
    with pytest.raises(FencedError, match="generation 2 writes"):
        old.fence(1)
    save(new, 2, 2)
    assert loaded_step(old) == 2


def test_a_fence_where_nothing_was_saved_yet(manager: Make) -> None:
    manager().fence(4)
    assert manager().load_latest() is None
    with pytest.raises(CheckpointError, match="gone"):
        manager().load_best()
    late = manager()
    save(late, 1, 3, is_best=True)
    assert late.committed_step() is None


def test_what_a_survivor_was_writing_when_it_became_the_next_rank_0_still_counts() -> None:
    checkpoints = Checkpoints(keep=1)
    save(checkpoints, 1)
    with stalled() as reached:
        assert checkpoints.save(state(2), 2, 1)
        assert reached.acquire(timeout=60)
        fence = threading.Thread(target=checkpoints.fence, args=(2,))
        fence.start()
        assert reached.acquire(timeout=60)
    fence.join(60)
    assert checkpoints.wait(60)
    assert (checkpoints.committed_step(), loaded_step(checkpoints)) == (2, 2)
    assert checkpoints.save(state(3), 3, 1)  # but what is saved after the fence is of the generation it says
    assert checkpoints.wait(60)
    assert checkpoints.committed_step() == 2
    checkpoints.close(10)


def test_what_is_not_whole_neither_counts_as_kept_nor_stays(rundir: RunDir, manager: Make) -> None:
    old = manager(keep=2)
    for step in (1, 2, 3):
        save(old, step)
    root = Path(rundir.uri)
    damage(root / folder_of(3), "cut short")
    (root / folder_of(9)).mkdir()  # a save that its process did not survive
    (root / folder_of(9) / "state.pt.1234.tmp").write_bytes(b"half")
    litter = root / "checkpoints/LATEST.json.1234.tmp"
    litter.write_bytes(b"")
    fresh = root / "checkpoints/LATEST.json.5678.tmp"
    fresh.write_bytes(b"")
    hours_ago = time.time() - 7200
    os.utime(litter, (hours_ago, hours_ago))
    new = manager(keep=2)
    new.fence(2)
    (root / folder_of(8, 3)).mkdir()  # of a newer generation: none of our business
    save(new, 4, 2)
    assert new.folders() == [folder_of(8, 3), folder_of(4, 2), folder_of(2)]
    assert not litter.exists()
    assert fresh.exists()


def test_what_the_fenced_out_wrote_late_goes_and_the_only_whole_one_stays(rundir: RunDir, manager: Make) -> None:
    old, new = manager(keep=3), manager(keep=3)
    save(old, 1)
    new.fence(2)
    late = Path(rundir.uri) / folder_of(2)
    shutil.copytree(Path(rundir.uri) / folder_of(1), late)  # written after the fence by one that was frozen before it
    assert loaded_step(new) == 1
    assert new.load_latest()[0] == folder_of(1)  # type: ignore[index]
    save(new, 3, 2)
    assert new.folders() == [folder_of(3, 2), folder_of(1)]
    damage(Path(rundir.uri) / folder_of(3, 2), "cut short")
    new.keep = 1
    new._prune(2)
    assert new.folders() == [folder_of(3, 2), folder_of(1)]  # LATEST points to the one, and the other is whole


def test_a_file_system_without_compare_and_swap_is_refused_by_name() -> None:
    import fsspec

    class Plain(fsspec.AbstractFileSystem):
        protocol = "plain"

    fsspec.register_implementation("plain", Plain, clobber=True)
    with pytest.raises(ConfigError, match=r"plain://x: the file system Plain has no compare-and-swap"):
        CheckpointManager(RunDir("plain://x"), 3, "this")


def test_the_manifest_says_who_wrote_what(rundir: RunDir, manager: Make) -> None:
    one, other = manager(), manager()
    save(one, 1)
    save(one, 2)
    save(other, 3, 2)
    manifests = [json.loads(rundir.storage.read(f"{folder}/manifest.json")) for folder in reversed(one.folders())]
    assert [item["generation"] for item in manifests] == [1, 1, 2]
    writers = [item["writer"] for item in manifests]
    assert writers[0] == writers[1] != writers[2]
    assert all(item["fingerprint"] == "this" for item in manifests)
