"""Set-up of the parts of the engine that only several ranks need, as the policy asks for them.

    stage   parameters                 gradients                          optimizer states
    1       whole, on the device       whole sums, then this rank's shard  this rank's shard
    2       whole, on the device       this rank's shard                   this rank's shard
    3       this rank's shard          this rank's shard                   this rank's shard

Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5; the switches of ZeRO++ (arXiv
2306.10209).
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from infinity._src.config.policy import Policy
from infinity._src.distributed.communicator import Comm, digest, number_of
from infinity._src.distributed.topology import is_own
from infinity._src.distributed.transport import Transport
from infinity._src.memory.device import Device, GradOffload
from infinity._src.params.buffers import GradBuffers, UnreducedGrads
from infinity._src.params.param_copies import SecondaryShards
from infinity._src.params.reduce import FlagBuffers, ReduceScatter
from infinity._src.params.unit import Flat, Unit

_ENGINES: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
"""Counter of engines for each default process group. All ranks of a group build their engines in
the same order."""


class RankSetup:
    """Ranks of one model: their communicator, and the parts that the policy wants for them.

    The constructor is collective, and blocks. transport: moves tensors of the device between ranks;
    None: the default transport of the device.
    """

    def __init__(
        self,
        policy: Policy,
        device: torch.device,
        undo: contextlib.ExitStack,
        transport: type[Transport] | None = None,
    ) -> None:
        self._policy = policy
        # Counted per default group, because each default group has a new store. An engine of this
        # rank alone does not advance the counter, since other ranks may build no such engine.
        name = (
            f"engine {next(_ENGINES.setdefault(dist.group.WORLD, itertools.count()))}"
            if dist.is_initialized() and not is_own(policy.mesh)
            else ""
        )
        self.comm = Comm.open(
            mesh=policy.mesh,
            device=device,
            timeout_s=policy.rank_timeout_s,
            name=name,
            transport=transport,
        )
        self.several = self.comm.world > 1
        self._values: dict[Flat, int] = {}
        self._by_param: dict[Flat, list[int]] = {}  # the digest of each parameter of a flat
        self._secondary_bytes = 0
        self._unreduced: UnreducedGrads | None = None
        self._reduces: ReduceScatter | None = None
        # Registered first, so that closed last: other parts close before the communication streams.
        undo.callback(self.comm.close)

    def note(self, flat: Flat, digests: Sequence[xxhash.xxh3_64]) -> int:
        """Record the digests of a flat's parameters on this rank, for `check_values`. Returns one
        digest of all of them."""
        # One digest per parameter, so that the error of `check_values` can name the parameter.
        each = [number_of(one) for one in digests]
        self._by_param[flat] = each
        found = digest(torch.tensor(each, dtype=torch.int64))
        self.note_digest(flat, found)
        return found

    def note_digest(self, flat: Flat, found: int) -> None:
        if self.several:
            self._values[flat] = found

    def check_values(self) -> None:
        """Check that all ranks began with the same values. Collective; blocks. Raises: ValueError.

        Each rank keeps its shard of the values: shards of different values would make up a model
        that no rank had.
        """
        flats = list(self._values)
        differing = self.comm.differing_indices(list(self._values.values()))
        by_param = dict(self._by_param)
        # Cleared even when the check fails: the dicts hold references to flats.
        self._values.clear()
        self._by_param.clear()
        if not differing:
            return
        flat = flats[differing[0]]
        # A rank that resumes an interrupted initialization has only the digest of the whole flat.
        known = flat in by_param
        found = self.comm.differing_indices(
            [known, *by_param.get(flat, [0] * len(flat.params))]
        )
        name = f"the parameters of {flat.unit.name} are"
        if known and found and found[0] > 0:
            name = f"the values of {flat.params[found[0] - 1].name} are"
        raise ValueError(
            f"{name} not the same on all ranks, and each rank would keep only its part: "
            "Policy(sync_module_states=True) copies rank 0's; or seed all ranks alike before the "
            "model is built, or give load= the same source"
        )

    @property
    def syncs_states(self) -> bool:
        """True where all ranks take their initial values from rank 0."""
        return self.several and self._policy.sync_module_states

    def scatter(self, flat: Flat, values: torch.Tensor | None) -> torch.Tensor:
        """Return this rank's shard [layout.shard_numel] of a flat's initial values. values:
        [layout.numel] on rank 0, None on the other ranks. Collective; blocks."""
        shard = torch.empty(flat.layout.shard_numel, dtype=flat.dtype)
        parts = None if values is None else list(values.view(self.comm.world, -1))
        self.comm.scatter(f"first values of {flat.params[0].name}", shard, parts)
        return shard

    @property
    def whole_params(self) -> bool:
        """True where this rank keeps all parameters on its device."""
        return self._policy.whole_params(several=self.several)

    @property
    def in_any_order(self) -> bool:
        """True where ranks may use different units, in different orders."""
        return self.several and self._policy.find_unused_parameters

    def on_any_rank(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank. Collective where ranks may use different units
        (`in_any_order`); elsewhere all ranks have the same flag, and it is returned as is."""
        return self.comm.all_reduce_any([flag])[0] if self.in_any_order else flag

    def transit_bytes(
        self, flats: Sequence[Flat], dtype_of: Callable[[Flat], torch.dtype], *, copies: bool
    ) -> int:
        """Return the bytes of CPU memory of the buffers that several ranks need. The result grows
        when parameters are unfrozen.

        copies: the model computes on a device with separate memory.
        """
        # One rank reduces nothing, so it needs none of these buffers.
        if not self.several:
            return 0
        topology, learning = self.comm.topology, [flat for flat in flats if flat.learns]
        size_bytes = 0
        if self._policy.accumulates_locally:
            size_bytes += UnreducedGrads.needs_bytes(learning, dtype_of)
        if self._policy.hpz == "cpu":
            size_bytes += SecondaryShards.needs_bytes(flats, topology.nodes)
        if self._policy.error_feedback:
            size_bytes += ReduceScatter.error_bytes(learning, topology.nodes, topology.local_world)
        if copies:
            size_bytes += FlagBuffers.needs_bytes(learning)
        return size_bytes

    def unreduced_grads(
        self,
        flats: Sequence[Flat],
        gradients: GradBuffers,
        device: Device,
        offload: GradOffload | None,
        undo: contextlib.ExitStack,
    ) -> UnreducedGrads | None:
        """Make the buffers that sum whole gradients over micro-batches inside `no_sync`; None where
        each micro-batch is reduced, and accumulators sum shards. Called once."""
        if not (self.several and self._policy.accumulates_locally):
            return None
        unreduced = UnreducedGrads(gradients.dtype, device, offload)
        undo.callback(unreduced.close)
        unreduced.allocate(flats)
        self._unreduced = unreduced
        return unreduced

    def reduce_scatter(
        self,
        flats: Sequence[Flat],
        gradients: GradBuffers,
        device: Device,
        offload: GradOffload | None,
        undo: contextlib.ExitStack,
    ) -> ReduceScatter | None:
        """Make the reduction of these flats' gradients; None on one rank. Called once."""
        if not self.several:
            return None
        policy = self._policy
        reducer = ReduceScatter(
            flats,
            self.comm,
            dtype_of=gradients.dtype,
            reduce_dtype=policy.reduce_dtype,
            qgz=policy.qgz,
            error_feedback=policy.error_feedback,
            device=device,
            offload=offload,
        )
        undo.callback(reducer.close)
        self._reduces = reducer
        return reducer

    def secondary_shards(self, units: Sequence[Unit], device: Device) -> SecondaryShards | None:
        """Make the secondary shards, which gathers read until weights change; None where the policy
        uses none.

        The caller closes them.
        """
        # Below stage 3 parameters stay whole on the device: no gather would read these shards.
        if not self.several or self._policy.zero < 3:
            return None
        found = None
        if self._policy.hpz is not None:
            # This node keeps the shards of its counterparts on other nodes, so that a gather stays
            # inside the node.
            found = SecondaryShards(
                units, self.comm.topology.counterparts, self._policy.hpz, device
            )
        elif self._policy.params == "device":
            # With params="device" the shard that a gather reads is this rank's own.
            found = SecondaryShards(units, (self.comm.rank,), "device", device)
        self._secondary_bytes = found.size_bytes if found is not None else 0
        return found

    def figures(self) -> dict[str, int]:
        """Return the fields of `engine_stats.Stats` that only several ranks fill."""
        gather, reduce = self.comm.volume("gather"), self.comm.volume("reduce")
        return {
            "comm_gather_inside_bytes": gather.inside,
            "comm_gather_across_bytes": gather.across,
            "comm_reduce_inside_bytes": reduce.inside,
            "comm_reduce_across_bytes": reduce.across,
            "whole_grad_bytes": self._unreduced.size_bytes if self._unreduced is not None else 0,
            "secondary_bytes": self._secondary_bytes,
            "feedback_bytes": self._reduces.feedback_bytes if self._reduces is not None else 0,
        }
