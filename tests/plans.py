"""Jobs to be planned, as tests write them."""

from __future__ import annotations

import dataclasses
from typing import Any

from infinity import Policy
from infinity._src.plan.machine import Machine
from infinity._src.plan.memory import beside_budgets
from infinity._src.plan.workload import Job, ModelShape


def job_of(tokens: int, sequence: int, **fields: Any) -> Job:
    """Make a job with all states on NVMe. fields: of the job, or of its policy."""
    policy = Policy(params="nvme", optim="nvme", nvme=["."])
    return Job(policy, tokens=tokens, sequence=sequence).replace(**fields)


def with_budget(machine: Machine, shape: ModelShape, job: Job, budget_bytes: float) -> Machine:
    """Give the machine RAM for so large a budget of each rank, and for what lies beside it."""
    beside = beside_budgets(shape, machine, job)
    return dataclasses.replace(machine, ram_bytes=machine.ranks * budget_bytes + beside)
