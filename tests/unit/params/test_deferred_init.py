"""`init=`: a model from scratch, by its own rules, one parameter in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import infinity as inf
from infinity._src.base import progress
from infinity._src.params import deferred_init
from infinity._src.params.deferred_init import DeferredModel
from tests import forks

LARGE = 512  # a square of it in fp32 is 1 MiB: deferred


class Net(nn.Module):
    """Constructors, later initialisers, views, a tie, buffers, and values read of small tensors."""

    def __init__(self, init: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * LARGE, LARGE, padding_idx=3)
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.largest = float(self.embed.weight.detach().max())
        self.blocks = nn.ModuleList(nn.Linear(LARGE, LARGE) for _ in rates)
        self.head = nn.Linear(LARGE, 2 * LARGE, bias=False)
        self.register_buffer("table", torch.arange(8.0), persistent=False)
        self.register_buffer("mask", torch.ones(2 * LARGE, 2 * LARGE).tril())
        for index, block in enumerate(self.blocks):
            assert isinstance(block, nn.Linear)
            init(block.weight)
            with torch.no_grad():
                block.weight[index] *= 1 + rates[index]
                block.weight.mul_(self.embed.weight[5])
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.head(hidden)


INITS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": lambda w: nn.init.normal_(w, std=0.02),
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "xavier": nn.init.xavier_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "eye": nn.init.eye_,
    "sum": lambda w: w.data.add_(torch.randn_like(w)),
    "own generator": lambda w: w.data.normal_(generator=torch.Generator().manual_seed(4)),
    "permuted": lambda w: w.data.copy_(w.data[torch.randperm(LARGE)].t()),
}


def same(built: DeferredModel, model: nn.Module) -> None:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert set(built.names()) >= set(state)
    for name, value in state.items():
        out = torch.empty_like(value)
        built.read_into(name, out)
        assert torch.equal(out, value.detach()), name


@pytest.mark.parametrize("init", INITS)
def test_values_are_those_in_memory_and_the_generator_goes_on_as_there(init: str) -> None:
    torch.manual_seed(7)
    model = Net(INITS[init])
    after = torch.get_rng_state()
    torch.manual_seed(7)
    built = DeferredModel(lambda: Net(INITS[init]))
    assert torch.equal(torch.get_rng_state(), after)
    assert isinstance(built.model, Net)
    assert built.model.largest == model.largest
    same(built, model)
    same(built, model)  # as often as asked
    assert torch.equal(torch.get_rng_state(), after)


STEPS: list[Callable[[nn.Parameter, nn.Parameter], object]] = [
    lambda a, b: a.normal_(),
    lambda a, b: a.uniform_(-1, 1),
    lambda a, b: a.copy_(b),
    lambda a, b: a.copy_(a.t() + 1),
    lambda a, b: b.copy_(a[:1].expand_as(a)),
    lambda a, b: a.mul_(0.5).add_(b),
    lambda a, b: b[2:].normal_(std=2.0),
    lambda a, b: b.zero_(),
    lambda a, b: a.bernoulli_(0.5),
    lambda a, b: a[1].fill_(3.0),
    lambda a, b: a.copy_(torch.rand(a.shape)),
]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(st.lists(st.tuples(st.sampled_from(range(len(STEPS))), st.booleans()), max_size=9))
def test_any_order_of_operations_gives_the_bits_of_memory(calls: list[tuple[int, bool]]) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.a = nn.Parameter(torch.zeros(8, 8))
        model.b = nn.Parameter(torch.ones(8, 8))
        with torch.no_grad():
            for step, swapped in calls:
                STEPS[step](*((model.b, model.a) if swapped else (model.a, model.b)))
        return model

    torch.manual_seed(1)
    model = build()
    torch.manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred_init, "DEFERRED_BYTES_MIN", 1)
        built = DeferredModel(build)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=_after(calls, build)))
    same(built, model)


def _after(calls: object, build: Callable[[], nn.Module]) -> torch.Generator:
    """A generator that stands where the default one stands after `build`."""
    state = torch.get_rng_state()
    torch.manual_seed(1)
    build()
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    torch.set_rng_state(state)
    torch.rand(3)
    return generator


@pytest.mark.parametrize("place", ["nvme", "cpu"])
def test_an_offloaded_model_begins_with_the_bits_of_memory(place: str, tmp_path: Path) -> None:
    nvme = {"nvme": tmp_path} if place == "nvme" else {}
    policy = inf.Policy(params=place, optim=place, **nvme)
    torch.manual_seed(3)
    model = Net(INITS["trunc_normal"])
    like = Net(nn.init.zeros_).to("meta")
    torch.manual_seed(3)
    offloaded = inf.offload(like, policy, init=lambda: Net(INITS["trunc_normal"]))
    tokens = torch.arange(6).view(2, 3)
    assert torch.equal(offloaded(tokens), model(tokens))
    want = model.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in offloaded.state_dict().items())
    assert torch.equal(offloaded.table, model.table)
    inf.handle(offloaded).close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_transformers_begins_as_it_does_in_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(deferred_init, "DEFERRED_BYTES_MIN", 4096)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        vocab_size=128, tie_word_embeddings=True,
    )  # fmt: skip

    def build() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)

    torch.manual_seed(5)
    model = build()
    with torch.device("meta"):
        like = build()
    torch.manual_seed(5)
    policy = inf.Policy(params="nvme", optim="nvme", nvme=tmp_path)
    offloaded = inf.offload(like, policy, init=build)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(offloaded(input_ids=tokens).logits, model(input_ids=tokens).logits)
    inf.handle(offloaded).close()


def test_mistakes_are_told_before_anything_is_filled(tmp_path: Path) -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return nn.Linear(LARGE, LARGE)

    like = on_meta()
    cases: list[tuple[object, str]] = [
        (lambda: 3, "returned a int"),
        (on_meta, "left weight on the meta device"),
        (lambda: nn.Linear(LARGE, LARGE, bias=False), "bias is missing"),
        (lambda: nn.Linear(LARGE, 2 * LARGE), r"weight of shape \(1024, 512\)"),
        (
            lambda: nn.Linear(LARGE, LARGE, dtype=torch.bfloat16),
            r"in torch.bfloat16; the model .* Build both by the same call with the same .* dtype",
        ),
        (nn.Linear(1, 1).weight, "init=Parameter is not known"),
    ]
    for init, message in cases:
        with pytest.raises(ValueError, match=message):
            inf.offload(like, inf.Policy(params="cpu"), init=init)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass one of them"):
        inf.offload(like, inf.Policy(params="cpu"), load={}, init=lambda: nn.Linear(LARGE, LARGE))


@pytest.mark.parametrize("shown", [True, False])
def test_one_rank_tells_how_far_drawing_is(
    shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOGGED_EVERY_S", 1e-6)
    DeferredModel(lambda: nn.Linear(LARGE, LARGE), shown=shown)
    assert ("drawing initial values: " in capsys.readouterr().err) == shown


def test_memory_is_that_of_one_parameter_and_not_of_the_model(tmp_path: Path) -> None:
    script = f"""
        import torch
        from torch import nn
        import infinity as inf

        def peak():  # of this program: ru_maxrss begins with what the parent process had
            return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

        def build():
            return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))  # 16 MiB each

        with torch.device("meta"):
            model = build()
        warm = nn.Linear(2048, 2048)
        before = peak()
        policy = inf.Policy(params="nvme", optim="nvme", nvme={str(tmp_path)!r}, ram="64MiB",
                            unit_bytes_max="32MiB")
        inf.offload(model, policy, init=build)
        print(peak() - before)
    """
    done = forks.run_code(script)
    assert done.returncode == 0, done.stderr
    # The model is 384 MiB; its engine takes 64 MiB, and some parameters are on their way.
    assert int(done.stdout) < 300 << 10, done.stdout
