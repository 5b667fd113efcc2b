"""A trace as a flame graph and a timeline: what is added up, what is left out, and what is no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain_dagster.dashboard.flame import MOST_FRAMES, pictures_of
from dtrain_dagster.dashboard.profiles import TraceError, TracePictures, list_traces
from tests.dtrain_dagster.small_job import write_dataset
from trainer.config import DatasetRef, DistributedTrainingConfig, FactoryConfig, JobConfig, TrackingConfig
from trainer.engine.run_job import run_job
from trainer.rundir import RunDir


def operation(name: str, began: Any, took: float, thread: int = 1, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": thread, "ts": began, "dur": took, **more}


STEPS = [
    operation("step#1", 0, 1000),
    operation("forward", 0, 400),
    operation("mm", 100, 300),
    operation("step#2", 2000, 3000),
    operation("forward", 2000, 1000),
    operation("mm", 2100, 200),
    operation("all-reduce", 2500, 1500, thread=2),
    operation("PyTorch Profiler (0)", 0, 9000, cat="Trace"),
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 2, "args": {"name": "network"}},
]


def picture_of(document: Any, shown: str = "operations") -> dict[str, Any]:
    found = pictures_of(document)[shown]
    assert found is not None
    return found


def paths_of(picture: dict[str, Any]) -> dict[str, tuple[float, int]]:
    """The milliseconds and calls of each frame, by the names from the outermost to its own."""
    frames = {item["id"]: item for item in picture["frames"]}
    paths = {}
    for item in frames.values():
        path, at = [], item
        while at is not None:
            path.append(at["name"])
            at = frames.get(at["parent"])
        paths["/".join(reversed(path))] = (item["nanoseconds"] / 1e6, item["calls"])
    return paths


def test_functions_of_a_thread_that_lives_for_a_part_of_the_trace_are_shown() -> None:
    function = {"cat": "python_function"}
    trace = [
        operation("main.py(1): run", 0, 1000, **function),
        operation("aten::mm", 10, 900),
        operation("saving.py(3): save", 500, 100, thread=2, **function),
        operation("aten::copy_", 520, 50, thread=2),
    ]
    paths = paths_of(picture_of({"traceEvents": trace}, "python"))
    assert "all threads/thread 2/saving.py(3): save/aten::copy_" in paths
    assert not any("run" in path for path in paths), "what runs all the time says nothing"


@pytest.mark.parametrize("parts", [3, 7, 90])
def test_no_frame_is_shorter_than_those_below_it_together(parts: int) -> None:
    """A browser draws nothing of a flame graph in which one is, be it by the last digit of a sum."""
    trace = [operation(f"part {number}", 2 * number, 1.2346) for number in range(parts)]
    frames = picture_of({"traceEvents": trace})["frames"]
    assert len(frames) == 2 + parts
    for frame in frames:
        below = [item["nanoseconds"] for item in frames if item["parent"] == frame["id"]]
        assert isinstance(frame["nanoseconds"], int)
        assert not below or frame["nanoseconds"] == sum(below)


def test_what_has_the_same_callers_is_added_up() -> None:
    picture = picture_of({"traceEvents": STEPS})
    paths = paths_of(picture)
    assert paths == {
        "all threads": (5.5, 0),
        "all threads/thread 1": (4.0, 0),
        "all threads/thread 1/step": (4.0, 2),
        "all threads/thread 1/step/forward": (1.4, 2),
        "all threads/thread 1/step/forward/mm": (0.5, 2),
        "all threads/network": (1.5, 0),
        "all threads/network/all-reduce": (1.5, 1),
    }
    parents = [item["parent"] for item in picture["frames"]]
    assert all(parent is None or parent < place for place, parent in enumerate(parents))


def test_own_time_is_without_what_was_called() -> None:
    top = {item["name"]: item["milliseconds"] for item in picture_of(STEPS)["top"]}
    assert top == {"step": 2.6, "all-reduce": 1.5, "forward": 0.9, "mm": 0.5}
    assert sum(item["share"] for item in picture_of(STEPS)["top"]) == pytest.approx(1.0, abs=1e-3)


def test_the_timeline_keeps_the_order_and_the_longest() -> None:
    picture = picture_of(STEPS)
    assert picture["threads"] == ["thread 1", "network"]
    assert [(bar["name"], bar["thread"], bar["depth"], bar["start"]) for bar in picture["bars"]][-1] == (
        "all-reduce", 1, 0, 2.5,
    )  # fmt: skip
    many = [operation("long", 0, 1e6), *(operation(f"op {at}", at, 0.5) for at in range(2 * MOST_FRAMES))]
    picture = picture_of(many)
    assert (len(picture["bars"]), picture["left_out"]) == (MOST_FRAMES, MOST_FRAMES + 1)
    assert len(picture["frames"]) <= MOST_FRAMES
    assert picture["bars"][0]["name"] == "long"


def test_deep_nests_and_strange_entries_are_no_trouble() -> None:
    deep = [operation(f"level {level}", level, 10_000 - 2 * level) for level in range(2000)]
    strange: list[Any] = [None, 7, {"ph": "X"}, operation("nan", float("nan"), 1)]
    strange += [operation("text", "0", 1), operation("negative", 1, -1)]
    picture = picture_of([*deep, *strange])
    assert {bar["name"].split()[0] for bar in picture["bars"]} == {"level"}
    assert max(bar["depth"] for bar in picture["bars"]) < 100
    hostile = picture_of([operation("<script>\x1b[2J\u202e", 0, 1)])
    assert hostile["top"][0]["name"] == "<script>\\x1b[2J\\u202e"


def called(name: str, began: float, took: float, thread: int = 1) -> dict[str, Any]:
    """A Python function, as torch's profiler writes it."""
    return operation(name, began, took, thread, cat="python_function", args={"Python id": 1, "Python parent id": None})


CALLS = [
    called("threading.py(1): run", 0, 1000),  # from before the trace to after it, as what has started the program
    called("train.py(9): step", 10, 900),
    called("torch/nn/modules/module.py(1776): _wrapped_call_impl", 20, 500),
    called("torch/nn/modules/module.py(1787): _call_impl", 30, 480),
    called("mine.py(3): forward", 40, 400),
    called("<built-in method linear of type object at 0x7f00ab>", 50, 300),
    operation("aten::linear", 60, 200),
    called("mine.py(3): forward", 600, 100),
    operation("aten::relu", 610, 50),
    called("threading.py(1): run", 0, 1000, thread=2),
    called("<built-in method acquire of _thread.lock object at 0x7f00cd>", 0, 1000, thread=2),
]


def test_python_functions_are_the_callers_of_operations_where_they_are_wanted() -> None:
    """How the program was started, what idle threads wait in, and what lies between a module and its forward is left
    out."""
    assert paths_of(picture_of(CALLS, "python")) == {
        "all threads": (0.9, 0),
        "all threads/thread 1": (0.9, 0),
        "all threads/thread 1/train.py(9): step": (0.9, 1),
        "all threads/thread 1/train.py(9): step/mine.py(3): forward": (0.5, 2),
        "all threads/thread 1/train.py(9): step/mine.py(3): forward/<built-in method linear>": (0.3, 1),
        "all threads/thread 1/train.py(9): step/mine.py(3): forward/<built-in method linear>/aten::linear": (0.2, 1),
        "all threads/thread 1/train.py(9): step/mine.py(3): forward/aten::relu": (0.05, 1),
    }
    plain = picture_of(CALLS)
    assert set(paths_of(plain)) == {
        "all threads", "all threads/thread 1", "all threads/thread 1/aten::linear", "all threads/thread 1/aten::relu",
    }  # fmt: skip
    assert pictures_of(STEPS)["python"] is None


def test_a_long_name_of_a_python_function_keeps_its_end() -> None:
    long = [called(f"{'/folder' * 40}/mine.py(3): forward", 5, 1), operation("aten::relu", 0, 10)]
    name = picture_of(long, "python")["frames"][-1]["name"]
    assert (name[0], name[-20:], len(name)) == ("…", "/mine.py(3): forward", 120)


ON_GPU = [
    {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7 "}},
    called("threading.py(1): run", 0, 200),
    called("mine.py(3): forward", 5, 100),
    operation("aten::linear", 10, 60),
    operation("aten::addmm", 12, 50),
    operation("cudaLaunchKernel", 20, 5, cat="cuda_runtime", args={"cbid": 211, "correlation": 41}),
    operation("cudaMemcpyAsync", 72, 3, cat="cuda_runtime", args={"cbid": 41, "correlation": 42}),
    {"ph": "X", "cat": "kernel", "name": "ampere_sgemm_32x32", "pid": 0, "tid": 7, "ts": 90, "dur": 400,
     "args": {"device": 0, "stream": 7, "correlation": 41}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pageable)", "pid": 0, "tid": 7, "ts": 489.5,
     "dur": 10.5, "args": {"device": 0, "stream": 7, "correlation": 42, "bytes": 4}},
    {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "pid": 0, "tid": 20, "ts": 95, "dur": 2,
     "args": {"device": 0, "stream": 20, "correlation": 99}},
    {"ph": "X", "cat": "gpu_user_annotation", "name": "Optimizer.step#SGD.step", "pid": 0, "tid": 7, "ts": 90,
     "dur": 410, "args": {}},
    {"ph": "s", "id": 41, "pid": 1, "tid": 1, "ts": 20, "cat": "ac2g", "name": "ac2g"},
    {"ph": "f", "id": 41, "pid": 0, "tid": 7, "ts": 90, "cat": "ac2g", "name": "ac2g", "bp": "e"},
]  # fmt: skip


def test_what_a_gpu_did_is_in_rows_of_its_streams_under_what_has_launched_it() -> None:
    """Times of a stream are cut where clocks make two kernels overlap; what was launched before the trace began has no
    caller in it."""
    stream = "all threads and GPU streams/GPU 0, stream 7"
    found = {path: took for path, took in paths_of(picture_of(ON_GPU)).items() if "GPU 0" in path}
    assert found == {
        stream: (0.41, 0),
        f"{stream}/aten::linear": (0.4, 0),
        f"{stream}/aten::linear/aten::addmm": (0.4, 0),
        f"{stream}/aten::linear/aten::addmm/ampere_sgemm_32x32": (0.4, 1),
        f"{stream}/Memcpy DtoH (Device -> Pageable)": (0.01, 1),
        "all threads and GPU streams/GPU 0, stream 20": (0.002, 0),
        "all threads and GPU streams/GPU 0, stream 20/Memset (Device)": (0.002, 1),
    }
    paths = paths_of(picture_of(ON_GPU, "python"))
    assert f"{stream}/mine.py(3): forward/aten::linear/aten::addmm/ampere_sgemm_32x32" in paths
    picture = picture_of(ON_GPU)
    assert picture["threads"] == ["thread 1", "GPU 0, stream 7", "GPU 0, stream 20"]
    by = {bar["name"]: (bar["thread"], bar["by"]) for bar in picture["bars"]}
    assert by["ampere_sgemm_32x32"] == (1, "aten::addmm")
    assert by["aten::addmm"] == (0, "")
    top = {item["name"]: (item["is_on_gpu"], item["milliseconds"]) for item in picture["top"]}
    assert (top["ampere_sgemm_32x32"], top["aten::addmm"]) == ((True, 0.4), (False, 0.045))


def test_a_real_trace_shows_the_users_own_code_above_its_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTRAIN_FACTORY_MODULES", "examples.own_model")
    job = JobConfig(
        job_id="traced",
        run_dir=str(tmp_path / "jobs" / "traced"),
        dataset=DatasetRef(uri=str(write_dataset(tmp_path / "dataset"))),
        model=FactoryConfig(factory="examples.own_model.model:make_model"),
        loss=FactoryConfig(factory="examples.own_model.loss:make_loss"),
        training=DistributedTrainingConfig(world_size=1, max_steps=8, profile_steps=2, profile_from_step=4),
        tracking=TrackingConfig(tensorboard=False),
    )
    rundir = RunDir(job.run_dir)
    rundir.write_job(job)
    assert run_job(job) == 0, rundir.read_json("result.json")
    [trace] = list_traces(rundir)
    found = json.loads(TracePictures().picture(rundir, trace.name))
    paths = list(paths_of(found["python"]))
    for function in ("own_model/model.py", "own_model/loss.py"):
        below = [path.split(function, 1)[1] for path in paths if function in path]
        assert any("forward" in path and "aten::" in path for path in below), (function, paths[:40])
    backward = next(path for path in paths if "Backward0" in path)
    assert "backward" in backward.split("Backward0")[0], "of the function that has begun it"
    assert not any(".py(" in path for path in paths_of(found["operations"]))
    assert len(found["python"]["frames"]) <= MOST_FRAMES


@pytest.mark.parametrize("document", [{}, 7, {"traceEvents": {}}, [], [None], {"traceEvents": []}])
def test_what_is_no_trace_is_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"holds no operation|not a trace"):
        picture_of(document)


def test_traces_are_listed_the_newest_first_and_drawn_once(tmp_path: Any) -> None:
    rundir = RunDir(str(tmp_path))
    for name in ("trace-r00000-s000009.json", "trace-r00001-s000120.json", "request-000001.json", "trace-x.json"):
        rundir.storage.write(f"profile/{name}", json.dumps({"traceEvents": STEPS}).encode())
    assert [(item.rank, item.step) for item in list_traces(rundir)] == [(1, 120), (0, 9)]
    pictures = TracePictures()
    made = pictures.picture(rundir, "trace-r00000-s000009.json")
    assert pictures.picture(rundir, "trace-r00000-s000009.json") is made
    rundir.storage.write("profile/trace-r00000-s000010.json", b"[" * 100_000)
    with pytest.raises(TraceError, match="Perfetto"):
        pictures.picture(rundir, "trace-r00000-s000010.json")
    for name in ("trace-x.json", "../job.json", "trace-r00000-s000011.json"):
        with pytest.raises(FileNotFoundError):
            pictures.picture(rundir, name)
