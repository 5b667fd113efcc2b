"""Many browsers and many jobs: everybody is answered, from one look at the disk, and memory stays as it is."""

from __future__ import annotations

import pytest

from tests.abuse.dashboard_load import measure


@pytest.mark.slow
def test_browsers_share_what_is_read():
    found = measure(jobs=300, browsers=20, seconds=6.0)
    assert (found["jobs"], found["errors"]) == (301, 0)
    assert found["unchanged_answers"] > 0


@pytest.mark.long
def test_ten_thousand_jobs_and_a_hundred_browsers():
    found = measure(jobs=10_000, browsers=100, seconds=60.0)
    assert (found["jobs"], found["errors"]) == (10_001, 0)
    before, after = found["memory_mib"]
    assert after - before < 64
