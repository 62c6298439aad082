"""Run a test script that ships with accelerate on offloaded models.

    python -m tests.integrations.accelerate_own SCRIPT [--policy JSON] [--plain] [-- ARGUMENTS]

The script's source gets lines where a user adds them; nothing of it is copied here:

    accelerator = Accelerator(...)              ->  attach(accelerator)
    model = RegressionModel(), deepcopy(model), ...from_pretrained(...)
                                                ->  model = inf.offload(model, policy)

The scripts look at parameters and gradients outside of forward, which a user does not: there the
names `allclose` and `in_memory` of this module take their place. What the external ones fetch from
the network (GLUE, a BERT, the package evaluate) is made here: sentences, a tiny BERT, an accuracy.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import infinity as inf

SCRIPTS = "accelerate.test_utils.scripts"
# Functions whose models are the plain ones that others are compared with.
BASELINES = ("mock_training",)
MODELS = ("RegressionModel", "deepcopy", "from_pretrained")


class Lines(ast.NodeTransformer):
    """Adds the lines."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name in BASELINES else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if not (isinstance(target, ast.Name) and isinstance(node.value, ast.Call)):
            return self.generic_visit(node)
        name, called = target.id, _last_name(node.value.func)
        if name == "accelerator" and called == "Accelerator":
            return [node, self._line(f"attach({name})")]
        # deepcopy(model) and from_pretrained make other things, too.
        if name in ("model", "ddp_model") and called in MODELS:
            alone = called == "RegressionModel" and "ddp_model = deepcopy(model)" in self._source
            return node if alone else [node, self._line(f"{name} = offload({name})")]
        if ast.unparse(node.value) == "accelerator.unwrap_model(model).cpu()":
            return [node, self._line(f"{name} = in_memory({name})")]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        grads = [arg for arg in node.args if isinstance(arg, ast.Attribute) and arg.attr == "grad"]
        if ast.unparse(node.func) == "torch.allclose" and len(grads) == 2:
            node.func = ast.Name("allclose", ast.Load())
            node.args = [grad.value for grad in grads]
        return node

    def over(self, source: str) -> ast.Module:
        """Return the script with the lines."""
        # test_sync copies its model and trains the copy; the other stays plain.
        self._source = source
        return ast.fix_missing_locations(self.visit(ast.parse(source)))

    def _line(self, text: str) -> ast.stmt:
        self.added.append(text)
        return ast.parse(text).body[0]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# -- what the added lines call ---------------------------------------------------------------------

POLICY: dict[str, Any] = {}
OFFLOADED: list[torch.nn.Module] = []


def offload(model: torch.nn.Module) -> torch.nn.Module:
    """Offload, with the policy of the command line."""
    # A script leaves its models behind, and each keeps a part of the budget.
    OFFLOADED.append(inf.offload(model, inf.Policy(**POLICY)))
    return model


def in_memory(model: torch.nn.Module) -> types.SimpleNamespace:
    """The values of a model, for a script that reads `model.a` when it has trained."""
    return types.SimpleNamespace(**model.state_dict())


def _grad_of(param: torch.Tensor) -> torch.Tensor:
    for model in OFFLOADED:
        if any(param is each for each in model.parameters()):
            grad = inf.handle(model).full_grad(param)  # type: ignore[arg-type]
            assert grad is not None
            return grad
    assert param.grad is not None
    return param.grad


def allclose(one: torch.Tensor, other: torch.Tensor, **tolerances: float) -> bool:
    """torch.allclose of the gradients of two parameters; False if one is not reduced over the ranks
    yet. The script compares with the gradient of all ranks, and the engine raises instead."""
    try:
        return torch.allclose(_grad_of(one), _grad_of(other), **tolerances)
    except RuntimeError as error:
        if "is not reduced over the ranks yet" not in str(error):
            raise
        return False


# -- what the network would give -------------------------------------------------------------------

WORDS = ("the", "a", "cat", "dog", "sees", "hears", "old", "new", "house", "tree", "and", "not")


def sentences(count: int, seed: int) -> Any:
    """Pairs of sentences, with label 1 where both are the same."""
    from datasets import Dataset

    numbers = random.Random(seed)
    rows: dict[str, list[Any]] = {"idx": [], "sentence1": [], "sentence2": [], "label": []}
    for index in range(count):
        one = [numbers.choice(WORDS) for _ in range(numbers.randint(3, 8))]
        same = numbers.random() < 0.5
        other = one if same else [numbers.choice(WORDS) for _ in one]
        for key, value in zip(
            rows, (index, " ".join(one), " ".join(other), int(same)), strict=True
        ):
            rows[key].append(value)
    return Dataset.from_dict(rows)


def load_dataset(*_names: str) -> Any:
    """In place of GLUE's MRPC."""
    from datasets import DatasetDict

    return DatasetDict(train=sentences(96, 0), validation=sentences(40, 1))


class Accuracy:
    """In place of `evaluate.load("glue", "mrpc")`."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Count."""
        self._right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        """The part that was right since the last call."""
        right, self._right = self._right, []
        return {"accuracy": sum(right) / len(right)}


def tiny_bert(directory: Path) -> None:
    """Write a BERT of 10,000 parameters and its tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
    known = {word: index for index, word in enumerate((*special, *WORDS))}
    tokenizer = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(known), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(directory)


# -- running ---------------------------------------------------------------------------------------


def run(script: str, arguments: Sequence[str], *, plain: bool) -> None:
    """Run a script, as its file is run."""
    spec = importlib.util.find_spec(f"{SCRIPTS}.{script}")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    if script.startswith("external_deps."):
        evaluate: Any = types.ModuleType("evaluate")
        evaluate.load = lambda *_names: Accuracy()
        sys.modules["evaluate"] = evaluate
        import datasets

        datasets.load_dataset = load_dataset
    lines = Lines()
    tree = ast.parse(source) if plain else lines.over(source)
    print(f"{script}: {len(lines.added)} lines added: {sorted(set(lines.added))}")
    from infinity.integrations.accelerate import attach

    module: Any = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=spec.origin, attach=attach, offload=offload, in_memory=in_memory, allclose=allclose
    )
    sys.modules["__main__"] = module
    sys.argv = [spec.origin, *arguments]
    exec(compile(tree, spec.origin, "exec"), module.__dict__)
    assert plain or OFFLOADED, "no model was offloaded"
    print(f"{script}: ended well, {len(OFFLOADED)} models were offloaded")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("--policy", type=json.loads, default={})
    parser.add_argument("--plain", action="store_true")
    known, arguments = parser.parse_known_args()
    POLICY.update(known.policy)
    run(known.script, [each for each in arguments if each != "--"], plain=known.plain)


if __name__ == "__main__":
    main()
