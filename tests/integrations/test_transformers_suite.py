"""The script that runs transformers' own tests on offloaded models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integrations

SCRIPT = Path(__file__).parents[2] / "bench" / "integrations" / "transformers_tests.py"

TESTS = '''
import unittest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def trainer(out, **given):
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )
    rows = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4
    model = LlamaForCausalLM(config)
    if "optimizers" in given:
        given["optimizers"] = (torch.optim.SGD(model.parameters(), lr=0.1), None)
    args = TrainingArguments(str(out), use_cpu=True, max_steps=1, report_to=[])
    return Trainer(model, args, train_dataset=rows, **given)


def test_looks_at_weights(tmp_path):
    run = trainer(tmp_path)
    run.train()
    # Outside of a forward: the plugin has gathered them.
    assert run.model.lm_head.weight.abs().sum() > 0


def test_custom_optimizer(tmp_path):
    trainer(tmp_path, optimizers=None).train()


def test_is_refused_and_not_known(tmp_path):
    trainer(tmp_path, optimizers=None).train()


def test_fails_anyway(tmp_path):
    assert not tmp_path.exists()


@unittest.skip("needs a GPU")
def test_skips():
    pass
'''


def test_without_a_checkout_there_is_nothing_to_run() -> None:
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("skipped: give a checkout")


def test_ends_of_tests_are_told_apart(tmp_path: Path) -> None:
    place = tmp_path / "checkout" / "tests" / "trainer"
    place.mkdir(parents=True)
    (place / "test_trainer.py").write_text(TESTS)
    ended = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "checkout", "--out", tmp_path / "table.md"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    told = (tmp_path / "table.md").read_text()
    assert "| all | 1 | 1 | 1 | 3 |" in told, told
    assert "| not applicable | fails on a plain model, too: " in told
    assert "refused, with the fix | 1: test_custom_optimizer |" in told
    assert "skips itself: needs a GPU | 1: test_skips |" in told
    assert "1: test_is_refused_and_not_known |" in told
