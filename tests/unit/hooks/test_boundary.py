"""Boundary activations are restored on the device from which they were offloaded."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import torch

from infinity._src.hooks.activation_offload import Boundary, Call


def test_a_boundary_is_seen_on_its_device() -> None:
    boundary = Boundary(torch.zeros(4, 8).t(), Call(1, cast("Any", None)), deque())
    boundary.target = torch.empty(boundary.lead + boundary.span, device="meta")
    view = boundary.view()
    assert (view.device.type, view.shape, view.stride()) == ("meta", (8, 4), (1, 8))
