"""A parameter at rest answers what is metadata and raises, with its name, on everything that wants
values."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from infinity._src.hooks.gather_context import gather
from infinity._src.params.sharded_param import ShardedParameter
from infinity.errors import EngineClosed, ParameterReleased, ReplacedOutsideEngine
from tests.unit.hooks import models
from tests.unit.hooks.rig import Rig, at_rest

NAME = "blocks.1.up.weight"


@pytest.fixture
def rig() -> Rig:
    return Rig(models.stack(), models.stack_groups)


@pytest.fixture
def p(rig: Rig) -> ShardedParameter:
    return at_rest(rig.model, NAME)


def test_it_is_a_parameter_with_the_metadata_of_the_original(rig: Rig, p: ShardedParameter) -> None:
    plain = dict(rig.plain.named_parameters())[NAME]
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, torch.Tensor)
    assert torch.is_tensor(p)
    for name in (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "layout",
        "ndim",
        "nbytes",
        "itemsize",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "grad",
        "is_quantized",
    ):
        assert getattr(p, name) == getattr(plain, name), name
    for name in (
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "get_device",
        "storage_offset",
        "__len__",
        "is_inference",
    ):
        assert getattr(p, name)() == getattr(plain, name)(), name
    assert torch.numel(p) == plain.numel()
    assert p.size(0) == 32
    assert not p.is_shared()
    assert not p.is_pinned()
    assert len({p, p}) == 1


def test_its_repr_names_it_and_where_it_rests(p: ShardedParameter) -> None:
    assert NAME in repr(p)
    assert "nvme" in repr(p)
    assert NAME in f"{p}"


def test_attributes_that_users_put_on_the_original_are_carried_over() -> None:
    model = models.stack()
    model.head.weight.no_decay = True
    rig = Rig(model, models.stack_groups)
    assert rig.model.head.weight.no_decay is True


VALUES: dict[str, Callable[[Any], Any]] = {
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "sum": lambda p: p.sum(),
    "add": lambda p: p + 1,
    "in-place add": lambda p: p.add_(1),
    "iadd": lambda p: p.__iadd__(1),
    "equal": lambda p: torch.equal(p, p),
    "==": lambda p: p == p,
    "bool": bool,
    "index": lambda p: p[0],
    "set index": lambda p: p.__setitem__(0, 1.0),
    "iterate": list,
    "item": lambda p: p.item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "numpy forced": lambda p: p.numpy(force=True),
    "np.asarray": lambda p: __import__("numpy").asarray(p),
    "dlpack": lambda p: p.__dlpack__(),
    "data": lambda p: p.data,
    "data norm": lambda p: p.data.norm(),
    "data =": lambda p: setattr(p, "data", torch.zeros(32, 16)),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "storage": lambda p: p.storage(),
    "share_memory_": lambda p: p.share_memory_(),
    "pin_memory": lambda p: p.pin_memory(),
    "set_": lambda p: p.set_(torch.zeros(32, 16)),
    "resize_": lambda p: p.resize_(4),
    "pickle": pickle.dumps,
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "multiprocessing": lambda p: multiprocessing.reduction.ForkingPickler.dumps(p),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "backward": lambda p: p.backward(),
    "autograd.grad": lambda p: torch.autograd.grad(
        torch.ones((), requires_grad=True) * 2, [p], allow_unused=True
    ),
    "half": lambda p: p.half(),
    "to dtype": lambda p: p.to(torch.float64),
    "to meta": lambda p: p.to("meta"),
    "to copy": lambda p: p.to(torch.float32, copy=True),
    "cuda": lambda p: p.cuda(),
    "view": lambda p: p.view(-1),
    "t": lambda p: p.t(),
    "T": lambda p: p.T,
    "F.linear": lambda p: nn.functional.linear(torch.zeros(2, 16), p),
    "matmul": lambda p: torch.zeros(2, 32) @ p,
    "cat": lambda p: torch.cat([p, p]),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda p: p.new_zeros(3),
    "init": lambda p: nn.init.normal_(p),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.zeros(512), [p]),
    "copy_": lambda p: p.copy_(torch.zeros(32, 16)),
    "copy from": lambda p: torch.zeros(32, 16).copy_(p),
}


@pytest.fixture(scope="module")
def shared() -> Rig:
    return Rig(models.stack(), models.stack_groups)


@pytest.mark.parametrize("operation", VALUES)
def test_what_wants_values_raises_and_names_the_parameter(shared: Rig, operation: str) -> None:
    p = at_rest(shared.model, NAME)
    mode = torch.enable_grad() if operation == "autograd.grad" else torch.no_grad()
    with mode, pytest.raises(ParameterReleased, match=NAME.replace(".", r"\.")) as error:
        VALUES[operation](p)
    assert "nvme" in str(error.value)
    assert isinstance(error.value, RuntimeError)
    assert at_rest(shared.model, NAME) is p
    assert models.stack_loss(shared.model, 0).isfinite()


def test_after_all_these_attempts_the_model_trains_bit_equal(shared: Rig) -> None:
    shared.train(models.stack_loss, steps=1)


def test_a_parameter_whose_insides_were_swapped_is_reported_by_the_next_forward(
    rig: Rig, p: ShardedParameter
) -> None:
    torch.utils.swap_tensors(p, nn.Parameter(torch.zeros(32, 16)))
    with pytest.raises(ReplacedOutsideEngine, match=NAME):
        models.stack_loss(rig.model, 0)


def test_the_error_says_which_call_gathers_it(p: ShardedParameter) -> None:
    with pytest.raises(ParameterReleased, match=r"inf\.handle\(model\)\.gather"):
        p.sum()


def test_conversions_to_what_it_is_already_return_itself(p: ShardedParameter) -> None:
    assert p.to("cpu") is p
    assert p.to(torch.float32) is p
    assert p.to("cpu", torch.float32) is p
    assert p.to(torch.zeros(1)) is p
    assert p.cpu() is p
    assert p.float() is p
    assert p.contiguous() is p


def test_the_whole_model_converts_to_what_it_is_already_and_to_nothing_else(rig: Rig) -> None:
    rig.model.to("cpu").to(torch.float32).float().cpu()
    for convert in (
        nn.Module.half,
        nn.Module.double,
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
    ):
        with pytest.raises((ParameterReleased, ReplacedOutsideEngine), match=r"\.weight|\.bias"):
            convert(rig.model)
    with pytest.raises(ParameterReleased):
        rig.model.share_memory()
    rig.train(models.stack_loss, steps=1)


def test_requires_grad_is_mirrored_on_the_gathered_parameter(rig: Rig, p: ShardedParameter) -> None:
    assert p.requires_grad_(False) is p
    assert not p.requires_grad
    assert not rig.params[NAME].gathered.requires_grad
    p.requires_grad = True
    assert rig.params[NAME].gathered.requires_grad


def test_grad_can_be_read_set_and_deleted(rig: Rig, p: ShardedParameter) -> None:
    assert p.grad is None
    p.grad = torch.ones(32, 16)
    assert torch.equal(p.grad.as_subclass(torch.Tensor), torch.ones(32, 16))
    p.grad = torch.full((32, 16), 2.0)
    assert torch.equal(p.grad.as_subclass(torch.Tensor), torch.full((32, 16), 2.0)), (
        "set, not accumulated"
    )
    p.grad = None
    assert p.grad is None
    p.grad = torch.ones(32, 16)
    del p.grad
    assert p.grad is None
    with pytest.raises(ValueError, match="does not fit"):
        p.grad = torch.ones(3)


def test_a_float32_gradient_dtype_can_be_asked_for(p: ShardedParameter) -> None:
    p.grad_dtype = torch.float32
    assert p.grad_dtype is torch.float32


def test_user_hooks_see_the_gradients_and_can_be_removed(rig: Rig, p: ShardedParameter) -> None:
    seen: list[torch.Tensor] = []
    after: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    handle = p.register_hook(lambda grad: seen.append(grad.clone()))
    accumulated = p.register_post_accumulate_grad_hook(lambda q: after.append((q, q.grad)))
    models.stack_loss(rig.model, 0).backward()
    models.stack_loss(rig.plain, 0).backward()
    expected = dict(rig.plain.named_parameters())[NAME].grad
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)
    assert after[0][0] is p
    assert after[0][1] is p.grad
    handle.remove()
    accumulated.remove()
    models.stack_loss(rig.model, 1).backward()
    assert len(seen) == len(after) == 1


def test_hooks_registered_before_offload_still_fire() -> None:
    model = models.stack()
    seen: list[torch.Tensor] = []
    after: list[torch.Tensor | None] = []
    model.head.weight.register_hook(lambda grad: seen.append(grad))
    model.head.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad))
    rig = Rig(model, models.stack_groups)
    seen.clear()
    after.clear()
    models.stack_loss(rig.model, 0).backward()
    assert len(seen) == 1
    assert after[-1] is rig.model.head.weight.grad


def test_optimizers_of_torch_can_be_built_and_refuse_to_step(rig: Rig) -> None:
    optimizer = torch.optim.AdamW(rig.model.parameters(), lr=1e-3)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 1e-3
    models.stack_loss(rig.model, 0).backward()
    for optimizer in (
        torch.optim.AdamW(rig.model.parameters(), lr=1e-3),
        torch.optim.AdamW(rig.model.parameters(), lr=1e-3, foreach=False),
        torch.optim.SGD(rig.model.parameters(), lr=1e-3),
    ):
        with pytest.raises(ParameterReleased):
            optimizer.step()


def test_backward_with_create_graph_raises(rig: Rig) -> None:
    from infinity.errors import SecondOrderUnsupported

    loss = models.stack_loss(rig.model, 0)
    with pytest.raises(SecondOrderUnsupported, match="create_graph"):
        loss.backward(create_graph=True)
    rig.zero_grad()
    rig.train(models.stack_loss, steps=1)


def test_gradients_of_inputs_can_still_be_asked_for(rig: Rig) -> None:
    x = models.stack_input(rig.model, 0).requires_grad_()
    expected = torch.autograd.grad(rig.plain(x).sum(), x)
    assert torch.equal(torch.autograd.grad(rig.model(x).sum(), x)[0], expected[0])
    rig.check_idle()


def test_a_captured_parameter_in_a_custom_function_is_answered_by_name(rig: Rig) -> None:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(w)
            return x.sum() * w.sum()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return None, grad.expand(ctx.saved_tensors[0].shape) * 2

    captured = at_rest(rig.model, NAME)
    with pytest.raises(ParameterReleased, match="up"):
        Function.apply(torch.ones(2), captured)


def test_after_close_it_says_that_the_engine_is_closed(rig: Rig, p: ShardedParameter) -> None:
    rig.lifecycle.detach()
    assert p.shape == (32, 16)
    with pytest.raises(EngineClosed, match=NAME):
        p.sum()
    with pytest.raises(EngineClosed, match=r"weight|bias"):
        rig.model(torch.zeros(2, 3, 16))
    with pytest.raises(EngineClosed):
        gather(rig.lifecycle, p)
