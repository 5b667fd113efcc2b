"""What a run of the tests came to: a JSON file with counts and durations, and a second try for what failed.

Loaded by `tests/conftest.py`. With ``--repeat-alone``, tests that failed beside others are run once more after all
others have ended, in a fresh interpreter and one after the other. What passes then is *flaky*: it is printed with its
first failure, counted in the file of ``--results``, and fails the run, unless it is `QUARANTINED`.

With ``--cpu-budget SECONDS``, a test without one of the marks `COSTLY` fails the run by name where it takes more of the
processor than that, both beside others and alone. The budget is that of a machine which does `_work` in
`WORK_SECONDS`; a slower one allows more. Processor time is that of the test's own process, of the children that it
has waited for, and of services that several tests share (`SERVICES`).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

MOST_REPEATED = 40
"""Where more tests fail than this, something is broken, and nothing is repeated."""
SLOWEST = 20
DURATIONS = Path(__file__).with_name("durations.json")
"""Test → its seconds and processor seconds, of a whole run of ``make test``. Tests below `STORED_FROM` are left out."""
STORED_FROM = (0.3, 0.05)
"""Seconds and processor seconds. From either of them on a test is stored, and is not run with ``--fast``."""
CPU, MODULES = "cpu_seconds", "modules"
MANY_MODULES = 100
"""A test that loads more than these has no budget: it is the first of its worker that needs a library such as torch."""
COSTLY = frozenset({"slow", "browser", "long"})
WORK_SECONDS = 0.16
"""Of the machine on which budgets were set, without other work."""
QUARANTINED: dict[str, tuple[str, str]] = {}
"""Flaky test → the reason why it may be so for now, and the date from which on it has been."""
SERVICES: set[int] = set()
"""Processes that outlast a test. What they do in its time is the test's, not that of whichever test sees their end."""
TICK = os.sysconf("SC_CLK_TCK")
_RANKS = ("passed", "xpassed", "xfailed", "skipped", "flaky", "failed", "error")
"""Of the three phases of a test, the one furthest to the right counts."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outcome", "what a run came to")
    group.addoption("--results", metavar="FILE", help="write counts, durations, failures and flaky tests as JSON")
    group.addoption(
        "--store-durations", action="store_true", help=f"write {DURATIONS.name}, by which files are ordered"
    )
    group.addoption("--fast", action="store_true", help="only tests that are cheap by their marks and stored durations")
    group.addoption("--repeat-alone", action="store_true", help="run what failed once more, alone; passing is «flaky»")
    group.addoption("--cpu-budget", type=float, metavar="SECONDS", help="of each test that has no mark of a costly one")


def is_stored(durations: Sequence[float]) -> bool:
    """Whether a test took long enough, by its seconds or its processor seconds, to be stored."""
    return any(took >= least for took, least in zip(durations, STORED_FROM, strict=True))


def stored_durations() -> dict[str, list[float]]:
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}  # type: ignore[no-any-return]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Processor(), "processor")
    if not hasattr(config, "workerinput"):  # a worker of xdist tells its controller
        config.pluginmanager.register(Outcome(config), "outcome")


def cpu_seconds() -> float:
    """Processor time of this process, of the children that it has waited for, and of `SERVICES`, so far."""
    spent = (resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in spent) + sum(map(_of_service, SERVICES))


def _of_service(pid: int) -> float:
    """With the children that it has waited for. Nothing once it has ended: it is among ours then."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def _work() -> None:
    counts: Counter[int] = Counter()
    for number in range(1_000_000):
        counts[number * number % 977] += 1


def slowness() -> float:
    """How many times the processor time this machine takes for `_work` that the reference does; at least 1."""
    taken = []
    for _ in range(3):
        before = time.process_time()
        _work()
        taken.append(time.process_time() - before)
    return max(1.0, min(taken) / WORK_SECONDS)


class Processor:
    """Adds what each phase of a test took of the processor to its report, in the process that runs the test."""

    def __init__(self) -> None:
        self.before, self.modules = cpu_seconds(), len(sys.modules)

    def pytest_runtest_logstart(self) -> None:
        self.before = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = cpu_seconds()
        report.user_properties.append((CPU, round(now - self.before, 4)))
        report.user_properties.append((MODULES, len(sys.modules) - self.modules))
        self.before, self.modules = now, len(sys.modules)
        return report


class Outcome:
    """The reports of one run, as the process sees them that prints the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.began = config, time.time()
        self.outcomes: dict[str, str] = {}
        self.seconds: Counter[str] = Counter()
        self.cpu: Counter[str] = Counter()
        self.costly: set[str] = set()
        self.modules: Counter[str] = Counter()
        self.over_budget: dict[str, float] = {}
        """Tests above their budget → their processor seconds."""
        self.in_teardown: set[str] = set()
        self.flaky: dict[str, list[pytest.TestReport]] = {}
        self.skips: Counter[str] = Counter()
        """What was missing → the number of tests that were skipped for it."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.cpu[report.nodeid] += sum(value for name, value in report.user_properties if name == CPU)
        self.modules[report.nodeid] += sum(value for name, value in report.user_properties if name == MODULES)
        if COSTLY & set(report.keywords) or self.modules[report.nodeid] > MANY_MODULES:
            self.costly.add(report.nodeid)
        outcome = {"passed": "passed", "skipped": "skipped"}.get(
            report.outcome, "failed" if report.when == "call" else "error"
        )
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            self.skips[str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
        before = self.outcomes.get(report.nodeid, "passed")
        self.outcomes[report.nodeid] = max(before, outcome, key=_RANKS.index)
        if outcome == "error" and report.when == "teardown":
            self.in_teardown.add(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """After the workers have gone, before the summary is printed."""
        failed = [test for test, outcome in self.outcomes.items() if outcome in ("failed", "error")]
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            if budget := self.config.option.cpu_budget:
                budget *= slowness()
                self.over_budget = {
                    test: cpu
                    for test, cpu in self.cpu.items()
                    if cpu > budget and test not in self.costly | set(failed)
                }
            if self.config.option.repeat_alone and (failed or self.over_budget):
                for count, what in ((len(failed), "failed"), (len(self.over_budget), "are over budget")):
                    if count > MOST_REPEATED:
                        self.line(f"{count} tests {what}: too many to be repeated alone")
                self.repeat(
                    failed if len(failed) <= MOST_REPEATED else [],
                    dict(self.over_budget) if len(self.over_budget) <= MOST_REPEATED else {},
                    budget or 0.0,
                )
            wrong = (
                self.stats("failed") or self.stats("error") or self.over_budget or set(self.flaky) - set(QUARANTINED)
            )
            if wrong:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            elif failed:
                session.exitstatus = pytest.ExitCode.OK
        document = self.document(int(session.exitstatus))
        if path := self.config.option.results:
            write_results(Path(path), document)
        if self.config.option.store_durations:
            stored = {test: told[1:] for test, told in document["tests"].items() if is_stored(told[1:])}
            write_results(DURATIONS, stored)

    def repeat(self, failed: Sequence[str], costly: Mapping[str, float], budget: float) -> None:
        """Run them once more; what passes now is flaky, and what keeps to its budget alone is not over it."""
        # What fails in a teardown may be the fault of any test of its file, since it may be a fixture of the file.
        asked = {test.split("::")[0] if test in self.in_teardown else test: None for test in [*failed, *costly]}
        if not asked:
            return
        self.line(f"\nrepeating {len(failed)} failed and {len(costly)} costly tests alone")
        with tempfile.TemporaryDirectory() as folder:
            results = Path(folder) / "results.json"
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--results", str(results)]
            if expression := self.config.option.markexpr:
                command += ["-m", expression]
            done = subprocess.run(
                [*command, *asked],
                cwd=self.config.rootpath,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
            self.line(done.stdout)
            try:
                told = json.loads(results.read_text())["tests"]
            except (OSError, ValueError):
                return  # it did not come to its end: all stay failed
        alone = {test: outcome for test, (outcome, *_) in told.items()}
        if costly:  # other machines of its host may have slowed this one since
            budget = max(budget, self.config.option.cpu_budget * slowness())
        for test, cpu in costly.items():
            if told.get(test, [None, 0, cpu])[2] <= budget:
                del self.over_budget[test]
        for test in failed:
            if self.passes(test, alone):
                self.outcomes[test] = "flaky"
                self.flaky[test] = self.take_reports(test)

    def passes(self, test: str, alone: dict[str, str]) -> bool:
        """Whether what it failed in is now well, by the outcomes of the repetition."""
        if test not in self.in_teardown:
            return alone.get(test) == "passed"
        path = test.split("::")[0]
        ended = {outcome for each, outcome in alone.items() if each.split("::")[0] == path}
        return alone.get(test) in ("passed", "skipped") and "error" not in ended

    def take_reports(self, test: str) -> list[pytest.TestReport]:
        """The reports of its failure, which are no longer among the failures of the summary."""
        taken = []
        for kind in ("failed", "error"):
            reports = self.stats(kind)
            taken += [report for report in reports if report.nodeid == test]
            reports[:] = [report for report in reports if report.nodeid != test]
            if not reports:
                self.terminal().stats.pop(kind, None)
        self.terminal().stats.setdefault("flaky", []).extend(taken[:1])
        return taken

    def document(self, status: int) -> dict[str, Any]:
        files, cpu_of_files = Counter[str](), Counter[str]()
        for test, seconds in self.seconds.items():
            files[test.split("::")[0]] += seconds
            cpu_of_files[test.split("::")[0]] += self.cpu[test]
        return {
            **{kind: sum(outcome == kind for outcome in self.outcomes.values()) for kind in _RANKS},
            "exit_status": status,
            "seconds": round(time.time() - self.began, 1),
            "test_seconds": round(sum(self.seconds.values()), 1),
            "cpu_seconds": round(sum(self.cpu.values()), 1),
            "workers": self.config.getoption("numprocesses", None) or 0,
            "load_average": [round(value, 2) for value in os.getloadavg()],
            "skipped_for": dict(self.skips.most_common()),
            "over_budget": {test: round(cpu, 2) for test, cpu in self.over_budget.items()},
            "flaky_tests": {test: [str(report.longrepr) for report in told] for test, told in self.flaky.items()},
            "slowest_tests": {test: round(seconds, 2) for test, seconds in self.seconds.most_common(SLOWEST)},
            "slowest_files": {path: round(seconds, 1) for path, seconds in files.most_common(SLOWEST)},
            "most_cpu_tests": {test: round(seconds, 2) for test, seconds in self.cpu.most_common(SLOWEST)},
            "most_cpu_files": {path: round(seconds, 1) for path, seconds in cpu_of_files.most_common(SLOWEST)},
            "tests": {
                test: [self.outcomes[test], round(self.seconds[test], 3), round(self.cpu[test], 3)]
                for test in sorted(self.outcomes)
            },
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, count in self.skips.most_common():
            terminalreporter.write_line(f"skipped {count}: {reason}")
        terminalreporter.write_line(f"{sum(self.cpu.values()):,.0f} CPU-seconds")
        for test, cpu in self.over_budget.items():
            terminalreporter.write_line(
                f"OVER BUDGET {test}: {cpu:.1f} CPU-seconds and no mark of a slow test", red=True
            )
        if not self.flaky:
            return
        terminalreporter.section(f"{len(self.flaky)} flaky: failed beside other tests, passed alone", yellow=True)
        for test, reports in self.flaky.items():
            for report in reports:
                terminalreporter.write_line(f"{report.when} of {test}, at first:")
                report.toterminal(terminalreporter._tw)
        for test in self.flaky:
            reason, since = QUARANTINED.get(test, ("not quarantined: the run has failed", ""))
            terminalreporter.write_line(f"FLAKY {test} ({reason}{since and ', since ' + since})", yellow=True)

    def terminal(self) -> pytest.TerminalReporter:
        found: pytest.TerminalReporter = self.config.pluginmanager.get_plugin("terminalreporter")
        return found

    def stats(self, kind: str) -> list[Any]:
        return self.terminal().stats.get(kind, [])

    def line(self, text: str) -> None:
        self.terminal().ensure_newline()
        self.terminal().write_line(text)


def write_results(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in document.items())
    path.write_text(f"{{\n{lines}\n}}\n")
