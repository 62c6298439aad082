"""The import `deepspeed`: install() and the command, each in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.compat.deepspeed.__main__ import main
from infinity.compat.deepspeed.names import TABLE, VERSION, contents
from tests.integrations.deepspeed_runs import config

ROOT = Path(__file__).parents[2]


def python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with this tree on its path."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def run(code: str, tmp_path: Path) -> str:
    """The output of a program."""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", TABLE)
def test_each_module_of_the_table_has_its_names(module: str) -> None:
    # It raises for a name that its home has not.
    assert isinstance(contents(module), dict)
    parent = module.rpartition(".")[0]
    assert not parent or parent in TABLE


INSTALLED = f"""
import importlib.metadata, importlib.util, sys
from infinity.compat.deepspeed import install
# Never by itself.
assert "deepspeed" not in sys.modules
assert importlib.util.find_spec("deepspeed") is None
install()
install()
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.util.find_spec("deepspeed.pipe") is None
assert importlib.metadata.version("deepspeed") == {VERSION!r}
assert importlib.metadata.packages_distributions()["deepspeed"] == ["deepspeed"]
assert importlib.metadata.version("torch")
import deepspeed
import deepspeed.utils
import deepspeed.utils.z3_leaf_module
# A function of this name is in `deepspeed.utils`, and its module beside it.
assert callable(deepspeed.utils.z3_leaf_module)
import deepspeed.comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.aio import AsyncIOBuilder
assert AsyncIOBuilder().is_compatible()
try:
    AsyncIOBuilder().load()
    raise SystemExit("AsyncIOBuilder().load() is refused")
except ValueError as error:
    assert "infinity.aio" in str(error)
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.utils import logger, safe_get_full_grad
assert deepspeed.zero.Init is deepspeed.runtime.zero.partition_parameters.Init
assert deepspeed.DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine
assert deepspeed.__version__ == {VERSION!r}
assert dist.get_world_size() == 1
try:
    deepspeed.pipe
except AttributeError as error:
    print(error)
try:
    import deepspeed.pipe
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_the_import_is_ours_when_it_was_asked_for_and_not_before(tmp_path: Path) -> None:
    out = run(INSTALLED, tmp_path)
    assert "stand-in for DeepSpeed has no deepspeed.pipe" in out
    assert out.splitlines()[-1] == "deepspeed.pipe"


def test_the_real_one_is_not_replaced_when_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "deepspeed.py").write_text("REAL = True\n")
    code = """
import sys
sys.path.insert(0, ".")
import deepspeed
from infinity.compat.deepspeed import DeepSpeedRefusal, install
try:
    install()
except DeepSpeedRefusal as error:
    print(error)
assert sys.modules["deepspeed"].REAL
assert not any("compat" in type(finder).__module__ for finder in sys.meta_path)
"""
    assert "imported already, from" in run(code, tmp_path)


SCRIPT = """
import argparse, os, sys
import torch
import deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
engine, _, _, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters()
)
for _ in range(2):
    loss = engine(torch.ones(4, 4)).square().mean()
    engine.backward(loss)
    engine.step()
assert __name__ == "__main__" and sys.path[0] == PLACE
# One write: torchrun leaves stdout unbuffered, and ranks share the pipe.
sys.stdout.write(f"rank {engine.global_rank} of {engine.world_size}: {loss.item():.6f}\\n")
engine.destroy()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("module", [False, True])
def test_the_command_runs_an_unchanged_script_on_two_ranks(module: bool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config(3)))
    (tmp_path / "train.py").write_text(SCRIPT.replace("PLACE", repr(str(tmp_path))))
    # DeepSpeed is installed there, and a script that imports it gets ours.
    info = tmp_path / "deepspeed-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n")
    script = ["-m", "train"] if module else ["train.py"]
    done = python(
        "-m", "infinity.compat.deepspeed", "--nproc-per-node", "2", *script,
        "--deepspeed", "--deepspeed_config", "ds.json",
        cwd=tmp_path, PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.partition(":")[0] for line in said] == ["rank 0 of 2", "rank 1 of 2"]
    assert len({line.partition(":")[2] for line in said}) == 1
    assert "DeepSpeed 0.1 is installed, and not used" in done.stderr


def test_a_command_without_python_is_refused() -> None:
    with pytest.raises(SystemExit, match="--no-python"):
        main(["--no-python", "train.py"])


@pytest.mark.ranks
def test_a_script_that_fails_fails_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\nraise SystemExit(3)\n")
    done = python("-m", "infinity.compat.deepspeed", "train.py", cwd=tmp_path)
    assert done.returncode != 0


def test_imports_are_public_names_of_the_package() -> None:
    package = importlib.import_module("infinity.compat.deepspeed")
    assert all(hasattr(package, name) for name in package.__all__)
