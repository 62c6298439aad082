"""The table of trainers in docs/embedding.md: each cell that says yes is held by a test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "embedding.md"
COLUMNS = (
    "losses as without",
    "resumes bit for bit",
    "two ranks as DDP",
    "saved by two, resumed by one",
    "adapters",
    "files load elsewhere",
)
_TRANSFORMERS = (
    "test_transformers::test_losses_are_those_of_adamw",
    "test_transformers::test_resuming_equals_the_run_that_went_on",
    "test_transformers_ranks::test_two_ranks_are_those_of_ddp",
    "test_transformers_ranks::test_saved_on_two_ranks_and_resumed_on_one_has_the_same_states",
    "test_transformers_peft::test_adapters_train_and_resume",
    "test_transformers::test_saved_models_load_in_from_pretrained",
)
_TRL = (
    "test_trl::test_a_run_equals_that_of_the_plain_trainer",
    "test_trl::test_a_resumed_run_equals_the_uninterrupted_one",
    "test_trl_ranks::test_two_ranks_equal_ddp_and_resume",
    "test_trl_ranks::test_one_rank_resumes_what_two_have_saved",
    "test_trl::test_a_run_equals_that_of_the_plain_trainer",
    "test_trl::test_the_trained_model_loads_with_transformers",
)
_ACCELERATE_RANKS = (
    "test_accelerate_ranks::test_two_ranks_resume_bit_for_bit_and_one_rank_takes_up_what_two_saved"
)
_ACCELERATE = (
    "test_accelerate::test_losses_are_those_of_the_script_without_the_two_lines",
    "test_accelerate::test_a_resumed_run_is_the_uninterrupted_one",
    "test_accelerate_ranks::test_losses_are_those_of_ddp",
    _ACCELERATE_RANKS,
    "test_peft::test_a_resumed_run_of_adapters_is_the_uninterrupted_one_and_kilobytes",
    "test_accelerate::test_weights_come_out_whole_streamed_and_unwrapped",
)
_PEFT_RANKS = "test_peft_ranks::test_two_ranks_save_resume_and_merge_and_one_goes_on"
_PEFT = (
    "test_peft::test_losses_are_those_of_the_model_in_memory",
    "test_peft::test_a_resumed_run_of_adapters_is_the_uninterrupted_one_and_kilobytes",
    _PEFT_RANKS,
    _PEFT_RANKS,
    "test_peft::test_a_merged_model_has_the_bits_of_merge_and_unload",
    "test_peft::test_adapter_files_are_those_of_peft_and_load_there_and_here",
)
_LIGHTNING = (
    "test_lightning::test_losses_are_those_of_the_module_in_memory",
    "test_lightning::test_a_resumed_run_equals_one_that_went_on",
    "test_lightning_ranks::test_losses_are_those_of_ddp",
    "test_lightning_ranks::test_saved_on_two_ranks_and_resumed_on_one",
    "",
    "test_lightning::test_the_module_is_of_use_after_the_run",
)
_FABRIC = (
    "test_fabric::test_losses_are_those_of_the_model_in_memory",
    "test_fabric::test_a_resumed_run_equals_one_that_went_on",
    "test_fabric::test_losses_of_two_ranks_are_those_of_ddp",
    "test_fabric::test_saved_on_two_ranks_and_resumed_on_one",
    "",
    "",
)
_TITAN_RANKS = "test_torchtitan::test_two_ranks_train_as_fsdp_and_one_goes_on"
_TITAN = (
    "test_torchtitan::test_losses_are_those_of_torchtitan",
    "test_torchtitan::test_an_interrupted_run_goes_on_bit_for_bit",
    _TITAN_RANKS,
    _TITAN_RANKS,
    "",
    "",
)
_OWN_RANKS = (
    "test_example_trainer::test_two_ranks_train_as_ddp_and_one_goes_on_from_their_checkpoint"
)
_OWN = (
    "test_example_trainer::test_losses_are_those_of_a_plain_loop",
    "test_example_trainer::test_an_interrupted_run_goes_on_bit_for_bit",
    _OWN_RANKS,
    _OWN_RANKS,
    "",
    "",
)
TESTS = {
    "transformers `Trainer`, `Seq2SeqTrainer`": _TRANSFORMERS,
    "TRL: SFT, DPO, GRPO, Reward": _TRL,
    "Accelerate": _ACCELERATE,
    "PEFT in a loop of your own": _PEFT,
    "Lightning `Trainer`": _LIGHTNING,
    "Fabric": _FABRIC,
    "torchtitan (experimental)": _TITAN,
    "a trainer of your own": _OWN,
}
"""By row, the test of each column; empty where there is none."""


def cells() -> dict[str, list[str]]:
    """The rows of the table by their first cell, without the column of new lines."""
    section = PAGE.read_text().split("\n## Existing integrations\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    head, _, *body = rows
    assert tuple(head[2:]) == COLUMNS
    return {row[0]: row[2:] for row in body}


def test_the_table_has_the_rows_that_are_tested() -> None:
    assert cells().keys() == TESTS.keys()


@pytest.mark.parametrize("row", TESTS)
def test_each_cell_is_held_by_a_test(row: str) -> None:
    for cell, test in zip(cells()[row], TESTS[row], strict=True):
        assert bool(cell) == bool(test), (row, cell, test)
        if test:
            file, _, name = test.partition("::")
            tree = ast.parse((HERE / f"{file}.py").read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
