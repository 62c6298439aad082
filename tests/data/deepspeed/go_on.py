"""Continue with DeepSpeed from a universal checkpoint: `go_on.py CASE DIRECTORY FIRST STEPS`.

The engine is that of a case of `make.py`, with `checkpoint.load_universal`. Prints one line of
JSON: the losses of the steps from FIRST on, the learning rates of the groups, and the count of
steps of each state.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import make
else:
    from tests.data.deepspeed import make


def run_rank(name: str, directory: str, first: int, steps: int, rank: int, port: str) -> None:
    """Load and train."""
    case = make.CASES[name]
    deepspeed = make.started(case, rank, port)
    model = make.Net().to(make.dtype_of(case))
    # Another model than the one that was saved, but for what DeepSpeed takes from it.
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.fill_(0.25)
    config = {**case.config("unused"), "checkpoint": {"load_universal": True}}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=make.groups_of(model), config=config
    )
    path, _ = engine.load_checkpoint(directory)
    assert path is not None, directory
    found: dict[str, Any] = {"losses": [], "lr": [], "global_steps": engine.global_steps}
    for step in range(first, first + steps):
        found["lr"].append([group["lr"] for group in engine.optimizer.param_groups])
        loss = engine(make.tokens(step, rank))
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        found["losses"].append(mean.item() / case.ranks)
        engine.backward(loss)
        engine.step()
    states = engine.optimizer.optimizer.state.values()
    found["steps"] = [float(state["step"]) for state in states]
    if rank == 0:
        print("RESULT " + json.dumps(found))
    make.finished(port)


def main() -> None:
    """Start the ranks, or be one."""
    if sys.argv[1:2] == ["--rank"]:
        name, directory, first, steps, rank, port = sys.argv[2:]
        run_rank(name, directory, int(first), int(steps), int(rank), port)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, __file__, "--rank", *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as place:
        ranks = [
            subprocess.Popen([*command, str(rank), port], cwd=place)
            for rank in range(make.CASES[sys.argv[1]].ranks)
        ]
        if max(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
