"""Figures that README.md and docs quote from benchmarks/results: a new result makes an old sentence fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.large_model import DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
Saved = dict[str, Any]


def _interval(saved: Saved, key: str, form: str) -> str:
    """«mean (low to high)» of a figure and its interval; ``form`` has the three as {0}, {1}, {2}."""
    return form.format(saved[key], saved[f"{key}_low"], saved[f"{key}_high"])


def _extra(saved: Saved, kind: str) -> tuple[float, float, float]:
    return (saved[f"extra_{kind}_seconds"], saved[f"extra_{kind}_low"], saved[f"extra_{kind}_high"])


def _shares(saved: Saved) -> list[float]:
    return [cell["vs_bound"]["ours"]["ratio"] for cell in saved["cells"]]


def _whole_run(saved: Saved, mode: str) -> float:
    """Seconds of a step by the clock: the wide model on three hosts at the lowest rate."""
    wanted = ("100mbit", "wide", mode, 3, 0)
    named = ("rate", "model", "communication", "hosts", "round")
    [row] = [row for row in saved["rows"] if tuple(row[name] for name in named) == wanted]
    return row["whole_run_step_seconds"]


def _silence(saved: Saved) -> str:
    times = f"{_word(saved['local_repeats'])} times{', on a busy machine' if saved.get('busy') else ''}"
    p50, p95 = saved["local_p50_seconds"], saved["local_p95_seconds"]
    return f"{times} | {p50:.1f} s | {p95:.1f} s | {saved['local_steps_redone_max']} |"


def _on_each(saved: Saved, key: str, form: str) -> str:
    return " | ".join(form.format(saved[f"{name}_{key}"]) for name in ("local", "slurm", "kubernetes", "ray"))


def _tapes(saved: Saved) -> str:
    return (
        f"{saved['tapes']} tapes, {sum(saved['faults'].values())} faults, {saved['violations']} violations; largest "
        f"difference {saved['largest_weight_difference']:.1e}"
    )


def _megabytes(saved: Saved, key: str) -> list[str]:
    return [f"{saved[key][side] / 1e6:.0f} MB" for side in ("ddp", "fsdp", "plain")]


def _ratios_of_fit(saved: Saved) -> list[dict[str, float]]:
    return sorted((cell["fit_vs_plain"] for cell in saved["cells"].values()), key=lambda each: each["ratio"])


def _of_20(saved: Saved) -> str:
    within = round(saved["trainings"] * saved["coverage_90_percent"] / 100)
    return (
        f"{saved['trainings']} trainings of different sizes, estimated first, then run: median error "
        f"{saved['median_error_percent']} %, {within} within their 90 % interval"
    )


QUOTES: list[tuple[str, str, Callable[[Saved], str]]] = [
    ("docs/many-trainings.md", "fleet", lambda r: f"dollars above the budget | {r['value']:g} |"),
    ("docs/many-trainings.md", "fleet", lambda r: (
        f"Weighted work is {r['weighted_work_vs_fcfs'][0]:.2f} times as much (90 % interval of the mean: "
        f"{r['weighted_work_vs_fcfs'][1]:.2f} to {r['weighted_work_vs_fcfs'][2]:.2f}), the time "
        f"{r['completion_vs_fcfs'][0]:.2f} of the other"
    )),
    ("docs/many-trainings.md", "fleet", lambda r: (
        f"without a job | {r['idle_share'][0]:.0%} | {r['fcfs_idle_share'][0]:.0%} |".replace("%", " %")
    )),
    ("README.md", "recovery", lambda r: (
        f"Training stops for {r['local_p50_seconds']:.2f} s (median of {_word(r['local_repeats'])} kills, at most "
        f"{r['local_p95_seconds']:.2f} s;\n  three nodes on one{' busy' if r.get('busy') else ''} machine of "
        f"{_word(r['cores'])} cores)"
    )),
    ("docs/losing-nodes.md", "recovery", lambda r: (
        f"{_word(r['local_repeats'])} kills | {r['local_p50_seconds']:.2f} s | {r['local_p95_seconds']:.2f} s | "
        f"{r['local_steps_redone_max']} |"
    )),
    ("docs/losing-nodes.md", "recovery", lambda r: (
        f"torchrun, tuned (`benchmarks/launchers.py`), {_word(r['torchrun_tuned_repeats'])} kills | "
        f"{r['torchrun_tuned_p50_seconds']:.0f} s | {r['torchrun_tuned_p95_seconds']:.0f} s | up to "
        f"{r['torchrun_tuned_steps_redone_max']} |"
    )),
    ("docs/losing-nodes.md", "recovery", lambda r: (
        f"From the start of the replacement until three nodes train again: {r['local_back_to_three_p50_seconds']:.1f} s"
    )),
    ("docs/installing.md", "recovery_engines", lambda r: (
        f"the survivors agree to go on, median | {_on_each(r, 'regroup_p50_seconds', '{:.2f} s')} |"
    )),
    ("docs/installing.md", "recovery_engines", lambda r: (
        f"all three train again, median | {_on_each(r, 'back_seconds', '{:.1f} s')} |"
    )),
    ("docs/installing.md", "recovery_engines", lambda r: (
        f"for which the ledger has a cause | {_on_each(r, 'accounted_percent', '{:.2f} %')} |"
    )),
    ("docs/losing-nodes.md", "control_plane", lambda r: (
        "after {:.2f} s (of 8 nodes), {:.2f} s (of 128) and {:.2f} s (of 256)".format(
            *(r["sizes"][nodes]["regroup_1"]["p50"] for nodes in ("8", "128", "256"))
        )
    )),
    ("docs/losing-nodes.md", "control_plane", lambda r: (
        "when sixteen of 256 are killed at once, after {p50:.1f} s (medians of four losses)".format(
            **r["sizes"]["256"]["regroup_16"]
        )
    )),
    ("docs/losing-nodes.md", "control_plane", lambda r: (
        f"makes {r['sizes']['256']['regroup_1']['storage_max']} operations on the storage"
    )),
    ("docs/losing-nodes.md", "flaky_hosts", lambda r: (
        "They lost {:.0f}\nnodes per node-hour on SLURM, {:.0f} on Kubernetes and {:.0f} on Ray.".format(
            *(r[f"{engine}_with_per_node_hour"] for engine in ("slurm", "kubernetes", "ray"))
        )
    )),
    ("docs/losing-nodes.md", "flaky_hosts", lambda r: (
        "With each exclusion lifted at once they lost {:.0f}, {:.0f} and {:.0f}.".format(
            *(r[f"{engine}_without_per_node_hour"] for engine in ("slurm", "kubernetes", "ray"))
        )
    )),
    ("docs/losing-nodes.md", "recovery_warned", lambda r: (
        f"Of {_word(r['slurm_repeats'])} machines of a real SLURM that it told, the others' next step came "
        f"{r['slurm_p50_seconds']:.2f} s after the\nlast one together (median; at most {r['slurm_p95_seconds']:.2f} s)"
    )),
    ("docs/performance.md", "fit", lambda r: (
        "{} rounds (8 of the case with workers) | the least of ten {ratio:.2f} times ({low:.2f} to {high:.2f}; ".format(
            r["rounds"], **_ratios_of_fit(r)[0]
        )
    )),
    ("docs/performance.md", "fit", lambda r: (
        f"the others {_ratios_of_fit(r)[1]['ratio']:.2f} to {_ratios_of_fit(r)[-1]['ratio']:.2f} | 1.0 |"
    )),
    ("docs/losing-nodes.md", "recovery_freeze", lambda r: f"a node frozen (SIGSTOP), {_silence(r)}"),
    ("docs/losing-nodes.md", "recovery_cut", lambda r: f"a cable pulled, {_silence(r)}"),
    ("docs/losing-nodes.md", "chaos", lambda r: (
        f"{r['tapes']} fault sequences (tapes)\nwith {sum(r['faults'].values())} faults, {r['violations']} violations"
    )),
    ("docs/performance.md", "chaos_fsdp", lambda r: f"--tapes 10 --jobs 1`:\n  {_tapes(r)}"),
    ("docs/performance.md", "chaos_hsdp", lambda r: f"on each of three nodes:\n  {_tapes(r)}"),
    ("docs/performance.md", "large_model", lambda r: (
        f"`python -m benchmarks.large_model`: {r['parameters'] / 1e6:.1f} million parameters, {_word(r['ranks'])} "
        f"ranks on {_word(r['cores'])} cores with nothing else to do (load {r['load_before']} before)"
    )),
    ("docs/performance.md", "large_model", lambda r: (
        "of a rank | {} | {} ({:.2f}) | {} |".format(
            *_megabytes(r, "peak_bytes")[:2], r["peak_vs_ddp"], _megabytes(r, "peak_bytes")[2]
        )
    )),
    ("docs/performance.md", "large_model", lambda r: (
        f"at its peak | {' | '.join(_megabytes(r, 'rss_bytes'))} |"
    )),
    ("docs/performance.md", "large_model", lambda r: (
        f"median of {_word(r['rounds'])} rounds | "
        f"{' | '.join(f'{seconds:.2f}' for seconds in r['seconds_per_step'].values())} |"
    )),
    ("docs/performance.md", "large_model", lambda r: (
        f"was {r['min_vs_plain_fsdp2']:.2f} in the median of the rounds, {r['vs_plain_rounds'][0]:.2f} in the worst "
        f"and {r['vs_plain_rounds'][-1]:.2f} in the best."
    )),
    ("docs/performance.md", "large_model", lambda r: (
        f"Over {r['steps'] * (r['rounds'] + 1)} steps, in which the loss fell from {r['losses'][0]:.2f} to "
        f"{r['losses'][1]:.2f}, losses were those of `ddp` within {r['loss_difference']:.1e}, and those of torch's own "
        f"FSDP2 within {r['loss_difference_plain']:.1e}"
    )),
    ("docs/proofs.md", "large_model", lambda r: (
        f"training is {r['min_vs_plain_fsdp2']:.2f} times as fast as torch's own FSDP2"
    )),
    ("docs/proofs.md", "throughput", lambda r: (
        _interval(r, "geomean_vs_plain_ddp_equal", "{0:.2f} times as fast as plain DDP (geometric mean of ")
        + _word(len(r["cells"]))
        + _interval(r, "geomean_vs_plain_ddp_equal", " cells, 95 % interval {1:.2f} to {2:.2f})")
    )),
    ("docs/proofs.md", "throughput", lambda r: (
        "the least of {cells} was {ratio:.2f}, {proven} ({low:.2f} to {high:.2f})".format(
            cells=_word(len(r["cells"])), **{key: r["min_vs_any_peer_where"][key] for key in ("ratio", "low", "high")},
            proven="which is more than 1" if r["min_vs_any_peer_where"]["low"] > 1 else "not proven to be more than 1",
        )
    )),
    ("docs/proofs.md", "throughput", lambda r: (
        f"It reaches {min(_shares(r)):.2f} to {max(_shares(r)):.2f} of the rate"
    )),
    ("docs/performance.md", "throughput", lambda r: (
        _interval(r, "geomean_vs_plain_ddp_equal", "{0:.2f} times ({1:.2f} to {2:.2f})")
    )),
    ("docs/performance.md", "throughput", lambda r: (
        _interval(r, "geomean_vs_plain_ddp_malloc_equal", "{0:.2f} times ({1:.2f} to {2:.2f}); the least ")
        + f"{r['min_vs_plain_ddp_malloc']:.2f}"
    )),
    ("docs/proofs.md", "links", lambda r: (
        f"{_whole_run(r, 'allreduce') / _whole_run(r, 'topk'):.1f} times as fast as all-reduce by the clock"
    )),
    ("docs/proofs.md", "estimate", _of_20),
    ("docs/proofs.md", "sensors", lambda r: (
        "takes under 0.03 s with 10, 1,000 and 10,000 past jobs"
        if max(r[f"tick_seconds_{jobs}"] for jobs in (10, 1000, 10000)) < 0.03 else "a tick is slower than it says"
    )),
    ("docs/proofs.md", "diagnosis", lambda r: (
        f"Of {r['plants']} plants {round(r['plants'] * r['right_percent'] / 100)} were named, "
        f"of the {r['mild_plants']} below 15 % of a step "
        f"{round(r['mild_plants'] * r['mild_right_percent'] / 100)}, and {r['false_alarms']} of "
        f"{r['healthy']} healthy trainings were blamed"
    )),
    ("docs/performance.md", "throughput", lambda r: (
        _interval(r, "geomean_vs_plain_ddp_equal", "{0:.2f} times ({1:.2f} to {2:.2f})")
    )),
    ("docs/performance.md", "throughput", lambda r: (
        f"it runs at {min(_shares(r)):.2f} to {max(_shares(r)):.2f} of the rate"
    )),
    ("docs/performance.md", "orchestration", lambda r: (
        "{:.2f} CPU-seconds (95 % interval {:.2f} to {:.2f})".format(*_extra(r, "cpu"))
        + " and {:.2f} s ({:.2f} to {:.2f})".format(*_extra(r, "wall"))
    )),
]  # fmt: skip
"""The file, the result that it quotes, and the words that this result makes."""


def _word(number: int) -> str:
    """A small number as text has it."""
    return {2: "two", 4: "four", 6: "six", 8: "eight", 10: "ten"}.get(number, f"{number:,}")


def test_the_run_of_a_large_model_is_of_the_default_sizes() -> None:
    saved = json.loads((ROOT / "benchmarks" / "results" / "large_model.json").read_text())
    assert {name: saved[name] for name in DEFAULTS} == DEFAULTS
    assert saved["loss_difference"] <= 1e-5


@pytest.mark.parametrize(
    ("file", "result", "words"), QUOTES, ids=[f"{n}-{f}-{r}" for n, (f, r, _) in enumerate(QUOTES)]
)
def test_the_text_says_what_the_saved_result_says(file: str, result: str, words: Callable[[Saved], str]) -> None:
    saved = json.loads((ROOT / "benchmarks" / "results" / f"{result}.json").read_text())
    says = " ".join(words(saved).split())  # wherever its lines are broken
    text = " ".join((ROOT / file).read_text().split())
    assert says in text, f"{file} does not say what {result}.json does: {says!r}"
