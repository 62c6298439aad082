"""Gradient proxies against plain fp32 gradients: norms, scaling, accumulation, and what must
raise."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity._src.params import accumulator as grad_accumulator
from infinity._src.params.accumulator import (
    AccumulatorState,
    GradAccumulator,
    GradProxy,
    GradRegistry,
)
from infinity._src.params.grad_norms import to_fp32

SHAPES = ((5, 7), (130,), (64, 96), (3, 5, 7), (1,))


def make_params(
    dtype: torch.dtype = torch.bfloat16, grad_dtype: torch.dtype | None = None
) -> tuple[list[torch.nn.Parameter], list[GradAccumulator]]:
    """Parameters without values and the accumulators of their gradients."""
    book = GradRegistry()
    params, accumulators = [], []
    for index, shape in enumerate(SHAPES):
        size = torch.Size(shape)
        storage = torch.full((size.numel(),), float("nan"), dtype=grad_dtype or dtype)
        accumulators.append(book.add(f"layer.{index}.weight", size, storage, torch.device("cpu")))
        param = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
        param.grad_dtype = grad_dtype
        params.append(param)
    book.reserve()
    return params, accumulators


def accumulate(
    params: list[torch.nn.Parameter], accumulators: list[GradAccumulator], scale: float = 1.0
) -> list[torch.Tensor]:
    """Put fresh random gradients into the accumulators, as the end of a backward does; returns
    them."""
    grads = [(torch.randn(param.shape) * scale).to(param.dtype) for param in params]
    for param, accumulator, grad in zip(params, accumulators, grads, strict=True):
        accumulator.reconcile(param.grad)
        accumulator.accumulate(grad)
        param.grad = accumulator.proxy
    return grads


def plain(grads: list[torch.Tensor]) -> list[torch.nn.Parameter]:
    """Ordinary fp32 parameters with these gradients."""
    params = [torch.nn.Parameter(torch.zeros(grad.shape)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.float()
    return params


def assert_same(accumulators: list[GradAccumulator], params: list[torch.nn.Parameter]) -> None:
    for accumulator, param in zip(accumulators, params, strict=True):
        assert param.grad is not None
        assert torch.equal(accumulator.materialize(), param.grad), accumulator.name


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf])
def test_clip_grad_norm_equals_clipping_of_fp32_gradients(
    foreach: bool | None, dtype: torch.dtype, norm_type: float
) -> None:
    torch.manual_seed(0)
    params, accumulators = make_params(dtype)
    reference = plain(accumulate(params, accumulators))
    for max_norm in (0.5, 100.0, 0.1):  # the second one clips nothing
        ours = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, foreach=foreach)
        theirs = torch.nn.utils.clip_grad_norm_(reference, max_norm, norm_type, foreach=foreach)
        assert torch.equal(ours, theirs)
        assert ours.dtype == torch.float32
        assert_same(accumulators, reference)


def test_clips_with_a_norm_computed_apart() -> None:
    params, accumulators = make_params()
    reference = plain(accumulate(params, accumulators))
    for each in (params, reference):
        total = torch.nn.utils.get_total_norm([param.grad for param in each])
        torch.nn.utils.clip_grads_with_norm_(each, 0.25, total)
    assert_same(accumulators, reference)


def test_scaling_by_numbers_and_tensors_is_replayed_in_fp32() -> None:
    params, accumulators = make_params()
    reference = plain(accumulate(params, accumulators))
    for param in (*params, *reference):
        assert param.grad is not None
        param.grad *= 1.7
        param.grad /= 3
        param.grad.mul_(torch.tensor(0.3, dtype=torch.float64))
        param.grad.data.div_(torch.tensor(7))
        param.grad.detach().mul_(2)
    torch._foreach_div_([param.grad for param in params], 1.1)
    torch._foreach_div_([param.grad for param in reference], 1.1)
    torch._foreach_mul_([param.grad for param in params], [0.5, 0.6, 0.7, 0.8, 0.9])
    torch._foreach_mul_([param.grad for param in reference], [0.5, 0.6, 0.7, 0.8, 0.9])
    assert_same(accumulators, reference)
    assert torch.equal(params[2].grad.norm(), reference[2].grad.norm())
    assert torch.equal(params[2].grad.data.norm(2), reference[2].grad.norm())
    assert torch.equal(
        torch.linalg.vector_norm(params[1].grad), torch.linalg.vector_norm(reference[1].grad)
    )


def test_accumulates_in_the_dtype_of_the_slot() -> None:
    for grad_dtype in (torch.bfloat16, torch.float32):
        params, accumulators = make_params(torch.bfloat16, grad_dtype)
        expected = [grad.to(grad_dtype) for grad in accumulate(params, accumulators)]
        for _ in range(3):
            for total, grad in zip(expected, accumulate(params, accumulators), strict=True):
                total.add_(grad)
        assert all(
            torch.equal(accumulator.tensor.view(accumulator.shape), total)
            for accumulator, total in zip(accumulators, expected, strict=True)
        )
        assert accumulators[2].norm() == torch.linalg.vector_norm(expected[2].float()).item()


def test_a_drain_after_scaling_scales_only_what_was_there() -> None:
    params, accumulators = make_params()
    first = accumulate(params, accumulators)
    torch.nn.utils.clip_grad_norm_(params, 0.5)
    coefficient = accumulators[0].log[0][1]
    second = accumulate(params, accumulators)
    for accumulator, one, two in zip(accumulators, first, second, strict=True):
        expected = (one.float() * coefficient).bfloat16() + two
        assert accumulator.log == []
        assert torch.equal(accumulator.tensor.view(accumulator.shape), expected)
        assert accumulator.norm() == torch.linalg.vector_norm(expected.float()).item()


def test_grad_scaler_unscales_and_reports_what_is_not_finite() -> None:
    for poison in (None, float("inf"), float("nan")):
        params, accumulators = make_params()
        grads = accumulate(params, accumulators, scale=1000.0)
        if poison is not None:
            grads[2][3, 4] = poison
            accumulators[2].empty()
            accumulators[2].accumulate(grads[2])
        reference = plain(grads)
        states = []
        for each in (params, reference):
            optimizer = torch.optim.SGD(each, lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(torch.zeros(()))
            scaler.unscale_(optimizer)
            states.append(
                sum(
                    v.item()
                    for v in scaler._per_optimizer_states[id(optimizer)][
                        "found_inf_per_device"
                    ].values()
                )
            )
        assert states[0] == states[1] == (0.0 if poison is None else 1.0)
        if poison is None:
            assert_same(accumulators, reference)


def test_finite_is_exact_where_the_norm_overflows() -> None:
    params, accumulators = make_params(torch.bfloat16)
    accumulate(params, accumulators, scale=1e30)
    assert math.isinf(accumulators[2].norm())
    assert accumulators[2].finite()
    accumulators[2].scale("mul", 1e10)
    assert not accumulators[2].finite()
    accumulators[0].scale("mul", math.nan)
    assert not accumulators[0].finite()


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_zeros_or_empties(foreach: bool) -> None:
    params, accumulators = make_params()
    optimizer = torch.optim.SGD(params, lr=0.1, foreach=foreach)
    accumulate(params, accumulators)
    accumulators[0].scale("mul", 0.5)
    optimizer.zero_grad(set_to_none=False)
    assert all(
        accumulator.state is AccumulatorState.HELD
        and not accumulator.tensor.any()
        and accumulator.norm() == 0.0
        for accumulator in accumulators
    )
    grads = accumulate(params, accumulators)
    assert_same(accumulators, plain(grads))
    optimizer.zero_grad()
    assert all(
        accumulator.reconcile(param.grad) is AccumulatorState.EMPTY
        for accumulator, param in zip(accumulators, params, strict=True)
    )
    module = torch.nn.ParameterList(params)
    grads = accumulate(params, accumulators)
    assert_same(accumulators, plain(grads))
    module.zero_grad()
    assert all(param.grad is None for param in params)


def test_the_same_stand_in_serves_every_step() -> None:
    params, accumulators = make_params()
    accumulate(params, accumulators)
    before = [id(param.grad) for param in params]
    for param in params:
        param.grad = None
    accumulate(params, accumulators)
    assert before == [id(param.grad) for param in params]


def test_an_ordinary_tensor_in_grad_replaces_the_gradient() -> None:
    params, accumulators = make_params()
    accumulate(params, accumulators)
    mine = torch.randn(SHAPES[2]).bfloat16()
    params[2].grad = mine
    assert accumulators[2].reconcile(params[2].grad) is AccumulatorState.HELD
    assert torch.equal(accumulators[2].materialize(), mine.float())
    with pytest.raises(
        RuntimeError, match=r"layer\.0\.weight\.grad was set to the gradient of layer\.1\.weight"
    ):
        accumulators[0].reconcile(accumulators[1].proxy)
    with pytest.raises(
        RuntimeError, match=r"layer\.1\.weight\.grad was replaced by a tensor of shape \(3,\)"
    ):
        accumulators[1].reconcile(torch.zeros(3))


def test_a_write_waits_for_the_update_that_reads() -> None:
    params, accumulators = make_params()
    waited: list[str] = []
    accumulate(params, accumulators)
    for accumulator in accumulators:
        accumulator.guard(
            SimpleNamespace(before_write=lambda accumulator: waited.append(accumulator.name))
        )
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    accumulators[0].norm()
    accumulators[0].empty()
    assert waited == []
    accumulate(params, accumulators)
    assert waited == [accumulator.name for accumulator in accumulators]
    accumulators[1].zero()
    assert waited[-1] == accumulators[1].name


@pytest.mark.parametrize(
    "operation",
    [
        lambda grad: grad + 1,
        lambda grad: grad * 2,
        lambda grad: grad.add_(1),
        lambda grad: grad.clamp(-1, 1),
        lambda grad: grad.clamp_(max=math.nan),
        lambda grad: grad.clamp_(max=torch.ones(grad.shape)),
        lambda grad: torch._foreach_clamp_max_([grad], [torch.ones(grad.shape)]),
        lambda grad: grad.mul_(torch.ones(grad.shape)),
        lambda grad: grad.mul_(grad),
        lambda grad: torch.ones(grad.shape).mul_(grad),
        lambda grad: grad.sum(),
        lambda grad: grad.clone(),
        lambda grad: grad.float(),
        lambda grad: grad.isnan(),
        lambda grad: grad.view(-1),
        lambda grad: grad.to("meta"),
        lambda grad: grad.norm(dim=0),
        lambda grad: grad.norm(math.nan),
        lambda grad: grad.norm(dtype=torch.float64),
        lambda grad: grad.copy_(torch.ones(grad.shape)),
        lambda grad: torch.ones(grad.shape).copy_(grad),
        lambda grad: grad.item(),
        lambda grad: grad.tolist(),
        lambda grad: grad.numpy(),
        lambda grad: grad.data_ptr(),
        lambda grad: grad.untyped_storage(),
        lambda grad: grad.share_memory_(),
        lambda grad: grad.__array__(),
        lambda grad: setattr(grad, "data", torch.ones(grad.shape)),
        lambda grad: copy.deepcopy(grad),
        pickle.dumps,
        lambda grad: torch.stack([grad, grad]),
        lambda grad: torch.nn.utils.parameters_to_vector([grad]),
        lambda grad: torch.from_dlpack(grad),
    ],
)
def test_what_a_stand_in_cannot_do_raises_and_names_the_parameter(operation) -> None:
    params, accumulators = make_params()
    accumulate(params, accumulators)
    before = accumulators[2].materialize()
    with pytest.raises(RuntimeError, match=r"layer\.2\.weight\.grad"):
        operation(params[2].grad)
    assert torch.equal(accumulators[2].materialize(), before)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_torch_optimizer_raises_and_changes_nothing(name: str, foreach: bool) -> None:
    params, accumulators = make_params()
    accumulate(params, accumulators)
    optimizer = getattr(torch.optim, name)(params, lr=0.1, foreach=foreach)
    with pytest.raises(RuntimeError, match=r"layer\.0\.weight\.grad"):
        optimizer.step()


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_clip_grad_value_equals_clipping_of_fp32_gradients(
    foreach: bool | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    params, accumulators = make_params(dtype)
    reference = plain(accumulate(params, accumulators))
    for most in (0.5, 100.0, 1.0, 0.1):  # the second and the third clip nothing
        torch.nn.utils.clip_grad_value_(params, most, foreach=foreach)
        torch.nn.utils.clip_grad_value_(reference, most, foreach=foreach)
        assert_same(accumulators, reference)
        ours = torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=foreach)
        theirs = torch.nn.utils.clip_grad_norm_(reference, 1e9, foreach=foreach)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "clamp",
    [
        lambda grads: [grad.clamp_(-0.5, 0.25) for grad in grads],
        lambda grads: [grad.clamp_(0.5, -0.25) for grad in grads],  # the maximum wins
        lambda grads: [grad.clamp_(min=0) for grad in grads],
        lambda grads: [grad.clamp_min_(-0.3) for grad in grads],
        lambda grads: [grad.clip_(max=0.3) for grad in grads],
        lambda grads: [grad.data.mul_(0.7).clamp_max_(0.3) for grad in grads],
        lambda grads: torch._foreach_clamp_min_(grads, [-0.1, -0.2, 0.3, -0.4, -0.5]),
        lambda grads: torch._foreach_maximum_(grads, -0.2),
        lambda grads: torch._foreach_minimum_(grads, [0.1, 0.2, -0.3, 0.4, 1.0]),
    ],
)
def test_clamps_are_those_of_fp32_gradients(clamp) -> None:
    torch.manual_seed(0)
    params, accumulators = make_params()
    grads = accumulate(params, accumulators)
    reference = plain(grads)
    clamp([param.grad for param in params])
    clamp([param.grad for param in reference])
    assert_same(accumulators, reference)
    assert not torch.equal(accumulators[2].materialize(), grads[2].float())
    ordinary = torch.ones(3)
    torch._foreach_clamp_max_([params[0].grad, ordinary], -0.01)
    assert ordinary.tolist() == [to_fp32(-0.01)] * 3
    assert accumulators[0].materialize().max() <= to_fp32(-0.01)


def test_a_proxy_that_is_its_own_data_stays_and_another_is_refused() -> None:
    """`Module.cpu()` assigns what the conversion gave it."""
    params, accumulators = make_params()
    accumulate(params, accumulators)
    grad, before = params[2].grad, accumulators[2].materialize()
    assert grad is not None
    for same in (grad, grad.cpu(), grad.data, grad.detach()):
        grad.data = same
    assert params[2].grad is grad
    assert torch.equal(accumulators[2].materialize(), before)
    for other in (params[1].grad, before):
        with pytest.raises(RuntimeError, match=r"layer\.2\.weight\.grad .*`\.data =`"):
            grad.data = other


def test_a_stand_in_kept_past_its_gradient_raises() -> None:
    params, accumulators = make_params()
    accumulate(params, accumulators)
    stale = params[0].grad
    params[0].grad = None
    accumulators[0].reconcile(None)
    for operation in (
        lambda: stale.norm(),
        lambda: stale.mul_(2),
        lambda: stale.materialize(),
        lambda: torch._foreach_norm([stale]),
    ):
        with pytest.raises(RuntimeError, match=r"stale gradient of layer\.0\.weight"):
            operation()


def test_more_scalings_than_the_kernels_replay_raise() -> None:
    params, accumulators = make_params()
    accumulate(params, accumulators)
    for _ in range(grad_accumulator.LOG_MAX):
        params[0].grad *= 0.5
    with pytest.raises(RuntimeError, match="multiply the factors first"):
        params[0].grad *= 0.5
    params[1].grad.clamp_(max=1.0)
    for _ in range(grad_accumulator.LOG_MAX - 2):
        params[1].grad *= 0.5
    log = list(accumulators[1].log)
    with pytest.raises(RuntimeError, match="scaled or clamped more than"):
        # two bounds are two entries, and the log has space for one
        params[1].grad.clamp_(-1.0, 1.0)
    assert accumulators[1].log == log


def test_stand_ins_and_ordinary_gradients_clip_together() -> None:
    params, accumulators = make_params(torch.float32)
    grads = accumulate(params, accumulators)
    adapter = torch.nn.Parameter(torch.zeros(4, 4))
    adapter.grad = torch.randn(4, 4)
    reference = plain([grad.clone() for grad in (*grads, adapter.grad)])
    ours = torch.nn.utils.clip_grad_norm_([*params, adapter], 0.5, foreach=True)
    assert torch.equal(ours, torch.nn.utils.clip_grad_norm_(reference, 0.5, foreach=True))
    assert_same(accumulators, reference[:-1])
    assert torch.equal(adapter.grad, reference[-1].grad)


def test_norms_over_ranks_take_one_reduction_for_all_parameters() -> None:
    """Two registries stand for two ranks, each with half of every gradient; the second combines the
    sums of both."""
    torch.manual_seed(1)
    grads = [torch.randn(64).bfloat16() for _ in range(5)]
    said: list[list[float]] = []
    books = [GradRegistry(lambda parts: said.append(parts) or [parts]), None]
    books[1] = GradRegistry(lambda parts: [said[-1], parts])
    for rank, book in enumerate(books):
        for index, grad in enumerate(grads):
            accumulator = book.add(
                str(index), torch.Size((8, 8)), torch.empty(32).bfloat16(), torch.device("cpu")
            )
            accumulator.accumulate(grad[rank * 32 : rank * 32 + 32])
    books[0].accumulators[0].norm()
    for accumulator, grad in zip(books[1].accumulators, grads, strict=True):
        assert accumulator.norm() == pytest.approx(
            torch.linalg.vector_norm(grad.float()).item(), rel=1e-6
        )
        assert accumulator.proxy.norm().item() == accumulator.norm()
    assert len(said) == 1
    assert len(said[0]) == 5
    for order in (1.0, 3.0, 0.5, 0.0, -1.0, math.inf, -math.inf, 400.0):
        books[0].norms(books[0].accumulators, order)
        found = books[1].norms(books[1].accumulators, order)
        wanted = [torch.linalg.vector_norm(grad.float(), order).item() for grad in grads]
        assert found == pytest.approx(wanted, rel=1e-6), order
    with pytest.raises(RuntimeError, match="split over ranks"):
        books[1].accumulators[0].materialize()


def test_a_part_of_no_elements_counts_nothing() -> None:
    book = GradRegistry(lambda parts: [[2.0], parts])
    accumulator = book.add("w", torch.Size((8,)), torch.empty(0), torch.device("cpu"))
    accumulator.accumulate(torch.empty(0))
    for order in (0.0, 1.0, 3.0, -1.0, math.inf, -math.inf):
        assert accumulator.norm(order) == 2.0, order
    assert accumulator.norm() == pytest.approx(math.sqrt(2.0))  # gathered squared
    assert accumulator.finite()


def test_norms_of_large_gradients_use_a_bounded_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_accumulator, "NORM_PIECE_NUMEL", 1000)
    book = GradRegistry()
    accumulator = book.add(
        "w", torch.Size((50, 101)), torch.empty(5050).bfloat16(), torch.device("cpu")
    )
    assert book.scratch_bytes == 4000
    grad = torch.randn(50, 101).bfloat16()
    accumulator.accumulate(grad)
    accumulator.scale("mul", 0.7)
    assert accumulator.norm() == pytest.approx((grad.float() * 0.7).norm().item(), rel=1e-6)
    accumulator.accumulate(grad)
    assert torch.equal(
        accumulator.tensor.view(50, 101), (grad.float() * torch.tensor(0.7)).bfloat16() + grad
    )
    assert book.scratch(1000).numel() == 1000
    assert book._scratch.numel() == 1000


def test_repr_and_metadata_need_no_values() -> None:
    params, accumulators = make_params()
    accumulate(params, accumulators)
    grad = params[2].grad
    assert isinstance(grad, GradProxy)
    assert "layer.2.weight" in repr(grad)
    assert grad.shape == (64, 96)
    assert grad.dtype == torch.bfloat16
    assert grad.numel() == 64 * 96
    assert not grad.is_sparse
    assert grad.device.type == "cpu"
    assert grad.is_contiguous()


OPERATIONS = st.lists(
    st.one_of(
        st.just(("accumulate", 0.0)),
        st.just(("none", 0.0)),
        st.just(("zero", 0.0)),
        st.just(("norm", 0.0)),
        st.just(("clip", 0.5)),
        st.tuples(st.sampled_from(["mul", "div"]), st.floats(0.0078125, 128.0, width=32)),
        st.tuples(
            st.sampled_from(["clamp_min", "clamp_max"]), st.floats(-2.0, 2.0, width=32)
        ),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, seed=st.integers(0, 5))
def test_any_sequence_of_operations_is_the_fp32_gradient_that_a_loop_would_hold(
    operations: list[tuple[str, float]], seed: int
) -> None:
    """The model: an fp32 tensor that every operation changes, rounded to bf16 only where a gradient
    follows a scaling."""
    torch.manual_seed(seed)
    book = GradRegistry()
    accumulator = book.add("w", torch.Size((6, 7)), torch.empty(42).bfloat16(), torch.device("cpu"))
    param = torch.nn.Parameter(torch.zeros(6, 7).bfloat16())
    truth: torch.Tensor | None = None
    for kind, value in operations:
        if kind == "accumulate":
            grad = torch.randn(6, 7).bfloat16()
            truth = grad.float() if truth is None else (truth.bfloat16() + grad).float()
            accumulator.reconcile(param.grad)
            accumulator.accumulate(grad)
            param.grad = accumulator.proxy
        elif kind == "none":
            param.grad, truth = None, None
        elif param.grad is None or truth is None:
            continue
        elif kind == "zero":
            param.grad.zero_()
            truth.zero_()
        elif kind == "norm":
            assert torch.equal(param.grad.norm(), truth.norm())
        elif len(accumulator.log) < grad_accumulator.LOG_MAX and kind == "clip":
            plain_param = torch.nn.Parameter(torch.zeros(6, 7))
            plain_param.grad = truth
            ours = torch.nn.utils.clip_grad_norm_([param], value)
            assert torch.equal(ours, torch.nn.utils.clip_grad_norm_([plain_param], value))
        elif len(accumulator.log) < grad_accumulator.LOG_MAX:
            getattr(param.grad, f"{kind}_")(value)
            getattr(truth, f"{kind}_")(value)
    accumulator.reconcile(param.grad)
    assert (accumulator.state is AccumulatorState.EMPTY) == (truth is None)
    if truth is not None:
        assert torch.equal(accumulator.materialize(), truth)
        assert accumulator.norm() == truth.norm().item()


FACTORS = [0.5, 3.0, math.inf, math.nan, 1e38]


@pytest.mark.parametrize("value", [1.0, 1e4, 1e30, math.inf, math.nan])
@pytest.mark.parametrize(
    "log",
    [
        *([(kind, factor)] for kind in ("mul", "div") for factor in FACTORS),
        *([("clamp_max", most), ("mul", 2.0)] for most in (0.5, math.inf)),
    ],
    ids=str,
)
def test_finiteness_is_that_of_the_gradient_after_its_log(
    log: list[tuple[str, float]], value: float
) -> None:
    book = GradRegistry()
    accumulator = book.add("w", torch.Size([64]), torch.zeros(64).bfloat16(), torch.device("cpu"))
    grad = torch.full((64,), value, dtype=torch.bfloat16)
    grad[0] = 0.0
    accumulator.accumulate(grad)
    truth = grad.float()
    for kind, number in log:
        getattr(accumulator.proxy, f"{kind}_")(number)
        getattr(truth, f"{kind}_")(number)
    assert accumulator.finite() == bool(truth.isfinite().all())
