"""A dataset larger than memory is read within a limit, and readers of the same one share what is in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from memory_group import memory_group

from trainer.data.cached_arrays import CACHE_VERSION, write_record
from trainer.data.manifest import content_digest
from trainer.runtime.host_memory import group_room

FEATURES, WINDOW = 8, 60
LIMIT = 48 << 20

READ = """
import json, os, re, sys, threading
import numpy as np
import torch
torch.set_num_threads(1)
from pathlib import Path
from trainer.data.sampler import Sampler
from trainer.data.shards import DataShardManager
import memory_group
folder, blocks, group, steps = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if group:
    memory_group.join(Path(group))

def anonymous():
    return int(re.search(r"Anonymous:\\s+(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1]) << 10

def mapped(name):
    "Of the arrays: all that is in memory (Rss), or this process's share of it (Pss)."
    found = re.findall(r"[.]npy\\n(?:.*\\n)*?" + name + r":\\s+(\\d+)", Path("/proc/self/smaps").read_text())
    return sum(map(int, found)) << 10

shards = DataShardManager(str(folder), folder)
before = anonymous()
for block in blocks:
    sampler = Sampler(samples=shards.count("train"), global_batch_size=1024, micro_batches=1, seed=0, rank=0,
                      world_size=1, shuffle_block=block)
    for step in range(steps):
        for first, last in sampler.ahead(0, 0, step, is_first=not step):
            shards.will_need("train", first, last)
        positions = sampler.step(0, 1024 * step)[1][0].positions
        rows = shards.end_rows("train", positions)
        windows, target = shards.gather(rows)
        assert (windows[:, -1, 0].long().numpy() == rows).all() and (windows[:, 0, 0].long().numpy() == rows - 59).all()
        assert (target.long().numpy() == rows).all()
print(json.dumps({"anonymous": anonymous() - before, "larger": shards.is_larger_than_memory}), flush=True)
sys.stdin.readline()
print(json.dumps([mapped("Rss"), mapped("Pss")]), flush=True)
sys.stdin.readline()
"""


def large_dataset(folder: Path, megabytes: int) -> Path:
    """As if it had been unpacked already; in each row stands its number."""
    rows = megabytes * 10**6 // (4 * (FEATURES + 1))
    cut = rows // 3  # two segments
    names = [f"f{number}" for number in range(FEATURES)]
    splits = {"train": {"first": "2000-01-01", "last": "2010-01-01"}}
    segments = [
        {"ticker": "A", "rows": [0, cut], "samples": {"train": [WINDOW - 1, cut]}},
        {"ticker": "B", "rows": [cut, rows], "samples": {"train": [cut + WINDOW - 1, rows]}},
    ]
    one = {"mean": 0.0, "std": 1.0}
    manifest = {
        "schema_version": 1, "dataset_id": "large", "window": WINDOW, "horizon": 5, "splits": splits,
        "columns": [*({"name": name, "role": "feature"} for name in names), {"name": "y", "role": "target"}],
        "normalisation": {"features": dict.fromkeys(names, one), "target": one},
        "shards": [{"path": "none", "rows": rows, "tickers": ["A", "B"], "segments": segments}],
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    cache = folder / f"large-v{CACHE_VERSION}"
    cache.mkdir(mode=0o700)
    number = np.arange(rows, dtype=np.float32)  # exact below 2^24
    np.save(cache / "features.npy", np.repeat(number[:, None], FEATURES, axis=1))
    np.save(cache / "target.npy", number)
    write_record(cache, content_digest(manifest))
    os.sync()
    for path in cache.glob("*.npy"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return folder


def start(folder: Path, blocks: list[int | None], group: Path | None, steps: int) -> subprocess.Popen[str]:
    path = os.pathsep.join((str(Path(__file__).parents[1]), *filter(None, sys.path)))
    command = [sys.executable, "-c", READ, str(folder), json.dumps(blocks), str(group or ""), str(steps)]
    return subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=os.environ | {"PYTHONPATH": path})


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_a_dataset_three_times_the_limit_is_read_within_it(tmp_path: Path) -> None:
    """In blocks, and shuffled over all of it."""
    folder = large_dataset(tmp_path, 3 * LIMIT // 10**6)
    with memory_group(LIMIT) as group:
        if group is None:
            pytest.skip("no control group with a memory limit can be made here: it takes root and its file system")
        reader = start(folder, [512, None], group, 20)
        try:
            result = json.loads(said(reader))
        finally:
            reader.kill()
            reader.wait()
    assert result["larger"], "the limit of the group counts"
    assert result["anonymous"] < LIMIT * 5 // 6, "of data of three times the limit"


@pytest.mark.slow
def test_readers_share_what_is_in_memory(tmp_path: Path) -> None:
    """Each has all of it at hand, and has a share of it: in proportional set sizes shared pages count once over all."""
    size = 60_000_000
    folder = large_dataset(tmp_path, size // 10**6)
    readers = [start(folder, [None], None, 50) for _ in range(2)]
    try:
        anonymous = [json.loads(said(reader))["anonymous"] for reader in readers]
        shares = []
        for reader in readers:
            go_on(reader)
            shares.append(json.loads(said(reader)))
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    # The allocator itself takes 10 to 28 MB, which varies from run to run. A copy of the data would add `size`.
    assert max(anonymous) < 0.75 * size
    assert min(resident for resident, _ in shares) > 0.9 * size
    assert sum(share for _, share in shares) < 1.1 * size


def test_the_tightest_group_counts_whatever_the_version(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("5:cpu,cpuacct:/other\n4:memory:/job/step\n0::/slice/unit\n")
    for name, text in {
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/job/memory.limit_in_bytes": "5000",
        "slice/memory.max": "max",
        "slice/unit/memory.max": "7000",
        "slice/unit/memory.current": "4000",
        "slice/unit/memory.stat": "anon 2500\ninactive_file 1000\nactive_file 500",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert sorted(group_room(tmp_path, membership)) == [4000, 5000, 9223372036854771712]
    assert list(group_room(tmp_path, tmp_path / "none")) == []
