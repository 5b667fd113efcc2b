"""Check the locked packages against known vulnerabilities: ``make audit``, which needs a network.

Exit code 0: none is known; 1: some are, and they are printed; 2: some packages could not be checked, which is printed
and proves nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SERVICE = ("pypi.org", 443)
"""Host and port of PyPI's advisories, which pip-audit asks."""
PATIENCE_SECONDS = 10.0
"""Longest time to connect."""


def main(locks: Sequence[str]) -> int:
    """Run pip-audit on the lock files, print the result, and return the exit code."""
    if why := unreachable(SERVICE):
        print(f"not audited: {SERVICE[0]} cannot be reached ({why}). Nothing is known about these packages now")
        return 2
    command = ["pip-audit", "--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    done = subprocess.run([*command, *(f"--requirement={lock}" for lock in locks)], stdout=subprocess.PIPE, text=True)
    try:
        code, lines = verdict(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError, AttributeError):
        code, lines = 2, [f"not audited: pip-audit failed (exit code {done.returncode}), see above"]
    print("\n".join(lines))
    return code


def verdict(report: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code and the lines to print for a report of pip-audit. Raise KeyError and others if it is no
    report."""
    found, skipped, asked = [], [], 0
    for item in report["dependencies"]:
        if "skip_reason" in item:
            skipped.append(item["name"])
            continue
        asked += 1
        for vulnerability in item["vulns"]:
            fixed = ", ".join(vulnerability.get("fix_versions") or []) or "no version yet"
            found.append(f"{item['name']} {item['version']}: {vulnerability['id']}, mended in {fixed}")
    lines = [*found, f"{asked} packages were held against PyPI's advisories: {len(found)} are known"]
    if skipped:
        lines.append(f"not audited, since PyPI did not tell of them: {len(skipped)}, such as {', '.join(skipped[:3])}")
    return (1 if found else 2 if skipped or not asked else 0), lines


def unreachable(address: tuple[str, int]) -> str:
    """Return why the address cannot be connected to; "" if it can."""
    try:
        socket.create_connection(address, PATIENCE_SECONDS).close()
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
