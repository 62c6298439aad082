"""Jobs to be planned, as tests write them."""

from __future__ import annotations

from typing import Any

from infinity import Policy
from infinity._src.perf.plan.workload import Job


def job_of(tokens: int, sequence: int, **fields: Any) -> Job:
    """Make a job with all states on NVMe. fields: of the job, or of its policy."""
    policy = Policy(params="nvme", optim="nvme", nvme=["."])
    return Job(policy, tokens=tokens, sequence=sequence).replace(**fields)
