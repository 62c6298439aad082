"""torch.nn.DataParallel of an offloaded model, on a machine with GPUs."""

from __future__ import annotations

import pytest
import torch

import infinity as inf
from infinity.errors import ParameterReleased
from tests import models

BATCH = models.token_batches(1, rows=4)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")
@pytest.mark.parametrize("grad", [True, False])
def test_it_is_refused_by_name_at_its_first_forward(grad: bool) -> None:
    model = inf.offload(models.make(models.llama).to("cuda"), inf.Policy())
    # One GPU twice is copied to as two are.
    parallel = torch.nn.DataParallel(model, device_ids=[0, 0])
    batch = {name: value.to("cuda") for name, value in BATCH.items()}
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(ParameterReleased, match=r"torch\.nn\.DataParallel copies .*torchrun"),
    ):
        parallel(**batch)
    assert models.loss_of(model, batch).isfinite()
    inf.handle(model).close()
