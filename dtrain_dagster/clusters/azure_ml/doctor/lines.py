"""What the doctor says: one line for each thing that was looked at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

DoctorVerdict = Literal["ok", "warning", "missing"]
"""Whether it is as it should be; may be in the way, or is only known later; or a training cannot start without it."""
BUYS = "Nothing was bought: the command only reads, and writes one small blob, which it deletes."


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorLine:
    """One thing that was looked at."""

    check: str
    """Which part of the walk it belongs to: ``identity``, ``providers``…"""
    verdict: DoctorVerdict
    seen: str
    remedy: str = ""
    """What to do; empty where nothing is to be done."""
    command: str = ""
    """The command that does it, or shows more."""


def exit_code_of(lines: Sequence[DoctorLine]) -> int:
    """Return 1 if something is missing, else 0."""
    return int(any(line.verdict == "missing" for line in lines))


def count_verdicts(lines: Sequence[DoctorLine]) -> dict[str, int]:
    """Return how many lines have each verdict."""
    return {name: sum(line.verdict == name for line in lines) for name in ("ok", "warning", "missing")}


def doctor_document(lines: Sequence[DoctorLine]) -> dict[str, Any]:
    """Return everything for JSON."""
    return {"buys": BUYS, "counts": count_verdicts(lines), "lines": [asdict(line) for line in lines]}


def doctor_text(lines: Sequence[DoctorLine]) -> str:
    """Return the lines for a terminal: verdict, check and what was seen; below it the remedy, and the command."""
    texts = []
    for line in lines:
        texts.append(f"{line.verdict:<8}{line.check:<11} {line.seen}")
        texts += [f"{'':20}{sign} {words}" for sign, words in (("→", line.remedy), ("$", line.command)) if words]
    counts = count_verdicts(lines)
    return "\n".join([*texts, f"{counts['missing']} missing, {counts['warning']} warnings. {BUYS}"])
