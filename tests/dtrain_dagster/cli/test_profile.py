from __future__ import annotations

import pytest

from dtrain_dagster.cli.common import Refusal
from dtrain_dagster.cli.monitoring import refuse_absent_ranks


def test_a_rank_that_the_job_never_has_is_refused_at_once():
    with pytest.raises(Refusal, match=r"--rank 4, 7: this job has rank 0 to 3"):
        refuse_absent_ranks([0, 4, 7], {"node_count": 2, "processes_per_node": 2})
    with pytest.raises(Refusal, match=r"--rank 1: this job has rank 0 only"):
        refuse_absent_ranks([1], {"node_count": 1, "processes_per_node": 1})


@pytest.mark.parametrize("launch", [{"node_count": 2, "processes_per_node": 2}, {}, {"node_count": 2}])
def test_what_may_be_there_is_waited_for(launch: dict[str, int]):
    refuse_absent_ranks([0, 3], launch)
