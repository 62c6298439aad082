"""Units, flats and parameters as messages and debuggers show them."""

from __future__ import annotations

import infinity as inf
from tests import models


def test_to_print_them_touches_no_storage() -> None:
    model = inf.offload(models.make(models.llama), inf.Policy(params="device"))
    handle = inf.handle(model)
    # all are gathered: to print evicted ones would crash
    models.loss_of(model, models.token_batches(1)[0])
    unit = handle.units[0]
    shown = repr([unit, unit.flats[0], unit.params[0]])
    assert unit.params[0].name in shown
    assert len(shown) < 200
    handle.close()
