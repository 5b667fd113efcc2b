"""All test years of a walk forward together: what each says in its ``evaluation.json``, and what the years say as one.
Pure functions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

CHANCE_T = 2.0
"""The t-statistic beyond which a gain is no chance."""
MUST_BEAT, LEAST_YEARS, COVERAGE = ("ewma", "har_x"), 5, (0.87, 0.93)
"""What the model has to beat, over how many years at least, and the share of outcomes in its 90 % interval."""


def year_figures(year: int, evaluation: Mapping[str, Any], cost: Mapping[str, Any]) -> dict[str, Any]:
    """Return a year's figures. ``evaluation``: its ``evaluation.json``; ``cost``: what `dtrain cost --json` says. Raise
    ValueError where the loss predicts no distribution, which alone has a likelihood."""
    model = evaluation["model"]
    if "nll" not in model:
        raise ValueError("the loss predicts no distribution, so years cannot be compared by likelihood")
    return {
        "year": year,
        "windows": evaluation["windows"],
        "nll": model["nll"],
        "coverage_90": model["coverage_90"],
        "gains": {
            name: {"nats": row["model_gain_nll"], "t": row["model_gain_t"]}
            for name, row in evaluation["baselines"].items()
            if "model_gain_nll" in row
        },
        "usd": cost["total_usd"],
        "price": cost["price"],
    }


def judge_years(years: Sequence[Mapping[str, Any]], wanted: Sequence[int]) -> dict[str, Any]:
    """Return the report of these years (`year_figures`), of all that are ``wanted``: all of them together, each of
    them, the dollars, and the reasons why the model does not pass; none where it does. Raise ValueError for no year."""
    if not years:
        raise ValueError("no test year was made yet: launch a backfill of the job walk_forward")
    ordered = sorted(years, key=lambda item: item["year"])
    reasons = [] if len({item["settings"] for item in ordered}) == 1 else ["the years were made with other settings"]
    windows = sum(item["windows"] for item in ordered)
    names = [name for name in ordered[0]["gains"] if all(name in item["gains"] for item in ordered)]
    gains = {name: joined_gain([(item["windows"], item["gains"][name]) for item in ordered]) for name in names}
    together = {
        "windows": windows,
        **{name: sum(item["windows"] * item[name] for item in ordered) / windows for name in ("nll", "coverage_90")},
        "gains": gains,
        "years_won": {name: sum(item["gains"][name]["nats"] > 0 for item in ordered) for name in names},
    }
    return {
        "years": ordered,
        "missing_years": [year for year in wanted if year not in {item["year"] for item in ordered}],
        "all": together,
        "total_usd": sum(item["usd"] for item in ordered),
        "price": ordered[-1]["price"],
        "reasons": reasons + reasons_against(together, len(ordered)),
    }


def joined_gain(parts: Sequence[tuple[int, Mapping[str, float | None]]]) -> dict[str, float | None]:
    """Return the gain over all years, of (windows, gain) of each: its mean over windows, and its t. Years are taken as
    independent: the labels of one end before the next begins. The variance of each is that of its own Newey-West t."""
    total = sum(windows for windows, _ in parts)
    nats = sum(windows * (gain["nats"] or 0.0) for windows, gain in parts) / total
    if any(not gain["t"] for _, gain in parts):
        return {"nats": nats, "t": None}
    errors = [windows / total * (gain["nats"] or 0.0) / (gain["t"] or 1.0) for windows, gain in parts]
    error = math.hypot(*errors)
    return {"nats": nats, "t": nats / error if error else None}


def reasons_against(together: Mapping[str, Any], years: int) -> list[str]:
    """Return why a model does not pass: a baseline that is better beyond chance, one that has to be worse and is not,
    an interval that covers too much or too little, too few years."""
    reasons = [] if years >= LEAST_YEARS else [f"{years} test year(s): at least {LEAST_YEARS} are judged"]
    for name, gain in together["gains"].items():
        t = gain["t"] or 0.0
        if name in MUST_BEAT and t <= CHANCE_T:
            reasons.append(f"it is not better than {name} beyond chance ({in_words(gain)})")
        elif t < -CHANCE_T:
            reasons.append(f"{name} is better beyond chance ({in_words(gain)})")
    reasons += [f"the baseline {name} is missing" for name in MUST_BEAT if name not in together["gains"]]
    low, high = COVERAGE
    if not low <= together["coverage_90"] <= high:
        reasons.append(f"the 90 % interval covers {together['coverage_90']:.3f}, outside [{low}, {high}]")
    return reasons


def verdict(report: Mapping[str, Any]) -> str:
    """Return the report in a sentence: the gain over the hardest baseline, and the dollars."""
    together, years = report["all"], len(report["years"])
    paid = f"All years together cost ${report['total_usd']:.2f} ({report['price']})."
    if not together["gains"]:
        return f"NLL {together['nll']:.4f} over {years} test year(s), without a baseline. {paid}"
    hardest = min(together["gains"], key=lambda name: together["gains"][name]["nats"])
    gain, won = together["gains"][hardest], together["years_won"][hardest]
    return f"Over {years} test year(s): {in_words(gain)} nats over {hardest}, won in {won}. {paid}"


def years_table(report: Mapping[str, Any]) -> str:
    """Return the years as a Markdown table, all together first, the newest next."""
    together = report["all"] | {"year": "all", "usd": report["total_usd"]}
    names = sorted(together["gains"], key=lambda name: together["gains"][name]["nats"])
    head = ["year", "windows", "NLL", *(f"over {name}" for name in names), "coverage", "cost"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for item in [together, *reversed(report["years"])]:
        cells = [str(item["year"]), f"{item['windows']:,}", f"{item['nll']:.4f}"]
        cells += [in_words(item["gains"][name]) for name in names]
        cells += [f"{item['coverage_90']:.1%}", f"${item['usd']:.4f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def in_words(gain: Mapping[str, float | None]) -> str:
    """Return ``+0.0042 (t 1.3)``."""
    return f"{gain['nats']:+.4f}" + ("" if gain["t"] is None else f" (t {gain['t']:.1f})")
