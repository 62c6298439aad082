"""The user's policy: tiers and encoding of states, and how a step runs. Validated once, here."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from infinity._src.base.paths import absolute
from infinity._src.base.sizes import parse_size
from infinity._src.config.choices import CHOICES
from infinity._src.config.deepspeed import DeepSpeedRun, read_deepspeed
from infinity.aio import IoSettings
from infinity.aio._swap_file import check_directory_pattern, is_directory_pattern

log = logging.getLogger("infinity")

_OF_ALL_RANKS = (
    "params", "state", "zero", "accumulate", "find_unused_parameters", "sync_module_states",
    "broadcast_buffers", "qwz", "hpz", "qgz", "error_feedback", "update",
    "delayed_warmup", "seed", "grad_dtype", "reduce_dtype", "unit_bytes_max", "on_nonfinite",
    "update_on", "generations", "damaged", "durable", "durable_every", "mesh",
)  # fmt: skip
THREADS_MAX = 512


@dataclasses.dataclass(frozen=True)
class Policy:
    """Settings of an offloaded model. Every field has a default that works.

    params, optim, grads, activations: the lowest tier where these may rest: "device", "cpu" or
        "nvme"; budget that is left keeps them higher. grads="nvme" spills those that an explicit
        `ram` does not hold. `activations` are the inputs of checkpointed calls
        (torch.utils.checkpoint, or what `gradient_checkpointing_enable()` makes of it), from 64 KiB
        on: they go during forward and come back ahead of backward. "cpu" is for models that compute
        on another device; how much memory that takes depends on the batch, is not in `ram`, and is
        told by `handle.stats()`.
    nvme: one directory, or several, on NVMe drives; needed when a tier is "nvme". Default:
        $INFINITY_NVME_DIR. "{rank}" and "{local_rank}" in it stand for a rank's number, and that
        within its node: "/mnt/nvme{local_rank}" gives each rank a drive of its own; without them
        ranks share the drives, their room and their bandwidth. Resolved by `inf.offload`.
    ram: everything that this process holds for offloading, in bytes or as text ("64GiB"): pinned
        buffers, gradients, resident extents. "min" is the least that works; None is half of what
        the machine or its cgroup leaves, divided by the ranks of the node.
    resident: how much of a state whose tier is "nvme" rests in RAM all the same: {"params": 0.5,
        "optim": "8GiB"}, a share (float, 0.0 to 1.0) or a size. None: as much as the budget leaves,
        as the planner places it.
    state: the encoding of states at rest. "exact": fp32 masters and moments (12 bytes per bf16
        parameter). "bf16": moments in bf16 (8). "compact": 24-bit masters, moments in 8 bits (5.1).
        The last two round at random, keyed on `seed`.
    zero: states that the ranks split. 1: optimizer states; 2: gradients, too; 3: parameters, too.
        Stages 1 and 2 keep whole parameters on every rank's device: params="device".
    accumulate: use of the micro-batches inside `handle.no_sync()` on several ranks. "shard": each
        is reduced into this rank's shard, at once; memory stays flat, and each costs a reduction.
        "local": they add up in whole gradients of this rank, in CPU memory (in `ram`: the gradients
        of the whole model), which the last micro-batch reduces. None: "local" with zero=1, else
        "shard".
    find_unused_parameters: with zero=1 or 2, forwards may use other modules on each rank, in any
        order (stochastic depth, experts, heads of several tasks), as with DDP. All ranks reduce all
        gradients, in a fixed order, with zeros of a rank that has none; a parameter that no rank
        has used gets no gradient. Costs device memory for gradients that wait for their turn, and
        reductions of what is not used. update="backward" is refused.
    sync_module_states: all ranks begin with the parameters and buffers of rank 0, as with FSDP; the
        others' `load=` is not read, and their models may be on the meta device. Otherwise ranks
        that begin with other parameters are an error.
    broadcast_buffers: all ranks have the buffers of rank 0 (running statistics), from the start and
        after each backward outside of `handle.no_sync()`, as with DDP. Otherwise buffers are each
        rank's own.
    qwz: weights are gathered as int8 groups (ZeRO++): half the bytes; every rank computes with what
        they stand for.
    hpz: where each rank keeps a secondary shard of the gathered weights, one for each rank of its
        node: "device" or "cpu" (ZeRO++). Until the weights change the ranks of other nodes, and
        drives, are not asked again. None: none.
    qgz: gradients are reduced as int4 groups, first inside the node, then over nodes (ZeRO++): a
        quarter of the bytes.
    error_feedback: with qgz, what rounding took from a gradient is added to the next one. Costs 2
        bytes for each parameter of the model, and 2 for each of this rank's node, in `ram`. No
        checkpoint has these errors: after `inf.restore` they begin with nothing.
    mesh: a DeviceMesh over all ranks: one dimension, or (nodes, ranks of a node). None: nodes are
        found. One of this rank alone: the model is this rank's own, whatever the others do.
    rank_timeout_s: seconds after which a rank that does not come to what all do together is given
        up, on all others; 600.
    update: "deferred": `opt.step()` returns at once and the update overlaps with the next forward.
        "backward": each unit is updated as soon as backward has its gradient; no clipping by norm,
        no GradScaler, unless generations=2. "delayed": the update overlaps with the whole next
        step, which computes with the parameters before it (ZeRO-Offload's delayed parameter
        update); forwards without gradients, `state_dict()`, `gather()` and exports wait for it and
        take the updated ones.
    delayed_warmup: steps that update="delayed" takes as "deferred" first.
    seed: of random rounding.
    device: where the model computes: "cpu", "cuda", "cuda:1" or a torch.device. None: where its
        parameters are ("cpu" for one that is wholly on the meta device).
    grad_dtype: the dtype in which gradients are accumulated and wait; None: the parameter's.
    reduce_dtype: the dtype in which gradients travel between ranks; None: the dtype in which they
        wait. They are summed in fp32 in the order of ranks, divided by their number, and rounded
        once; over several nodes of several ranks first so in each node, then over nodes.
    units: the modules to gather as one unit: modules, their classes' names, or qualified names.
        None: found.
    unit_bytes_max: modules larger than this are split further where the module tree allows it.
    on_nonfinite: answer of `opt.step()` to a gradient that is not finite, before any state is
        touched.
    verify: "full" checks every byte that is read against its checksum. "sample" checks one piece in
        16 of each section that is read (at least one), others each time: a run that is stale or
        misdirected as a whole is always caught, damage to a part of it with the odds of its size
        (one damaged piece in one read of 16). "off" checks nothing.
    io_backend: "auto", "io_uring" or "threads"; a backend that is forced and missing is an error.
    io: request size, depth and the drives' bandwidths: an `infinity.aio.IoSettings`, a mapping with
        its fields, or the path of what `python -m infinity.bench swap --sweep --json FILE` wrote.
        None: requests of a size that suits the backend (1 MiB for rings, whole runs for threads),
        32 of them, bandwidths measured when needed.
    update_threads: threads of this rank that verify, update and copy chunks on the CPU. None: where
        a GPU computes, all cores of this rank's share of the machine but one; where the CPU does, a
        quarter of its processors, divided by the ranks.
    generations: 1 overwrites states in place. 2 writes each step beside the one before, wherever
        states rest (twice the room), and so a step is a transaction: one in which an update fails
        is undone, on all ranks, and update="backward" serves every loop (units update ahead of
        `opt.step()`, and once more from the old states when it clips, or not at all when gradients
        are not finite).
        3 to 5 are for durable runs: one is written, and the others are commits that are kept, for
        `inf.restore(damaged="from-older")`. Each takes the room of all states once more; where a
        drive lacks it, fewer are kept, and a warning says so.
    damaged: an update that meets states which a drive can no longer give back, with two generations
        (the step is undone first). "raise": StatesLost names parameters, elements and file, and the
        run ends. "from-older": it goes on, and these have the values and moments of before their
        last update, where the drive still has those; a warning names them, and
        `handle.stats().older_chunks` counts. Needs verify="full", and states that are not in RAM.
    durable: True keeps the run in the `nvme` directories: after a crash `inf.restore(model, opt,
        directory)` goes on from the last committed step. An exit without `handle.close()` commits
        the last one, on one rank alone. Needs params="nvme" and optim="nvme", keeps two generations
        of everything there and nothing of it resident. Directories that hold a run already are left
        as they are, and no step is taken before `inf.restore`; "new" gives that run up, when the
        first step is taken.
    durable_every: commit every so many steps; a step in between overwrites the one before it, and a
        crash loses all of them.
    update_on: "cpu": updates run on the CPU, beside the next forward (or backward). "device":
        states stream through the GPU that computes, inside `opt.step()`, with update="deferred".
        The two give the same bits; "cpu" is the default whatever the tiers, since it moves a fifth
        of the bytes over the link, and `infinity plan` says what each would cost.

    Raises: ValueError naming field, value and fix.
    """

    params: str = "cpu"
    optim: str = "cpu"
    grads: str = "cpu"
    activations: str = "device"
    nvme: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ()
    ram: int | str | None = None
    resident: Mapping[str, float | int | str] | None = None
    state: str = "exact"
    zero: int = 3
    accumulate: str | None = None
    find_unused_parameters: bool = False
    sync_module_states: bool = False
    broadcast_buffers: bool = False
    qwz: bool = False
    hpz: str | None = None
    qgz: bool = False
    error_feedback: bool = False
    mesh: Any = None
    rank_timeout_s: float = 600.0
    update: str = "deferred"
    delayed_warmup: int = 40
    seed: int = 0
    device: Any = None
    grad_dtype: Any = None
    reduce_dtype: Any = None
    units: Sequence[Any] | None = None
    unit_bytes_max: int | str = "512MiB"
    on_nonfinite: str = "raise"
    verify: str = "full"
    io_backend: str = "auto"
    io: IoSettings | Mapping[str, Any] | str | os.PathLike[str] | None = None
    update_on: str = "cpu"
    update_threads: int | None = None
    generations: int = 1
    damaged: str = "raise"
    durable: bool | str = False
    durable_every: int = 1

    def __post_init__(self) -> None:
        for field in CHOICES:
            self._check_choice(field)
        self._check_ranks()
        for field in ("grad_dtype", "reduce_dtype"):
            value = getattr(self, field)
            if value not in (None, torch.bfloat16, torch.float16, torch.float32):
                raise ValueError(
                    f"{field}={value!r} is not supported; use torch.bfloat16, torch.float16, "
                    "torch.float32 or None"
                )
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError) as error:
                raise ValueError(
                    f"device={self.device!r}: give 'cpu', 'cuda', 'cuda:1' or a torch.device "
                    f"({error})"
                ) from None
        if type(self.durable_every) is not int or self.durable_every < 1:
            raise ValueError(
                f"durable_every={self.durable_every!r}: give a whole number of steps, 1 or more"
            )
        threads = self.update_threads
        if threads is not None and (type(threads) is not int or not 1 <= threads <= THREADS_MAX):
            raise ValueError(
                f"update_threads={threads!r}: give a whole number from 1 to {THREADS_MAX}, or None"
            )
        # A commit must outlive the steps after it, so a second place is needed.
        if self.durable:
            object.__setattr__(self, "generations", max(self.generations, 2))
        for field in ("delayed_warmup", "seed"):
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise ValueError(f"{field}={value!r}: give a whole number, 0 or more")
        object.__setattr__(self, "resident", self._resident())
        # A string is a sequence of its letters, too.
        if isinstance(self.units, str):
            object.__setattr__(self, "units", (self.units,))
        if not (self.units is None or isinstance(self.units, Sequence)):
            raise ValueError(
                f"units={self.units!r}: give a list of modules, their classes' names or qualified "
                "names, or None"
            )
        object.__setattr__(self, "nvme", self._paths())
        object.__setattr__(self, "io", self._io())
        object.__setattr__(
            self, "unit_bytes_max", self._size("unit_bytes_max", self.unit_bytes_max)
        )
        if self.ram is not None and self.ram != "min":
            object.__setattr__(self, "ram", self._size("ram", self.ram))
        if "nvme" in self._tiers and not self.nvme:
            raise ValueError(
                f"params={self.params!r}, optim={self.optim!r}, grads={self.grads!r}, "
                f"activations={self.activations!r} need a "
                "place on NVMe: set nvme=[directories] or $INFINITY_NVME_DIR"
            )
        self._check_damaged()
        self._check_together()

    @classmethod
    def from_deepspeed(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any] | DeepSpeedRun,
        *,
        world_size: int | None = None,
        auto: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> Policy:
        """Make the policy that a DeepSpeed configuration asks for; docs/deepspeed-config.md tells
        what becomes of each key.

        config: a mapping, the path of a JSON file, or what `inf.read_deepspeed` made of one.
        world_size: ranks; None: of the process group, else of the launcher. auto: values in place
        of "auto", by dotted key; others stay open where no field depends on them. overrides: fields
        that replace those of the configuration, such as nvme= and ram=, of which it says nothing.

        Keys that mean nothing here, or not the same, are logged once (INFO). Raises: ValueError
        naming key, value and fix.
        """
        run = config
        if not isinstance(run, DeepSpeedRun):
            node = None if "mesh" in overrides else _launched("LOCAL_WORLD_SIZE")
            run = read_deepspeed(
                run,
                world_size=_world_size() if world_size is None else world_size,
                ranks_per_node=node,
                auto=auto or {},
                keep_auto=True,
            )
        fields = {**run.policy, **overrides}
        for name in ("grad_dtype", "reduce_dtype"):
            if isinstance(fields.get(name), str):
                fields[name] = getattr(torch, fields[name], fields[name])
        # Where the CPU computes they are in its memory already, in DeepSpeed too.
        on_cpu = str(fields.get("device")).partition(":")[0] == "cpu"
        if on_cpu and fields.get("activations") == "cpu" and "activations" not in overrides:
            fields["activations"] = "device"
        # A part of it in RAM is of the tier that the configuration had.
        if fields.get("params") != "nvme" and "resident" not in overrides:
            fields.pop("resident", None)
        if "nvme" in (fields.get("params"), fields.get("optim")) and not (
            fields.get("nvme") or os.environ.get("INFINITY_NVME_DIR")
        ):
            section = "offload_param" if fields["params"] == "nvme" else "offload_optimizer"
            raise ValueError(
                f'zero_optimization.{section}.device="nvme" without nvme_path: name a directory '
                "there, in nvme=, or in $INFINITY_NVME_DIR"
            )
        policy = cls(**fields)
        _log_once(run.notes)
        return policy

    def _check_ranks(self) -> None:
        if self.zero < 3 and self.params != "device":
            raise ValueError(
                f"zero={self.zero} keeps whole parameters on every rank's device, and "
                f"params={self.params!r} does not: use params='device', or zero=3"
            )
        if self.zero < 3 and self.hpz is not None:
            raise ValueError(
                f"hpz={self.hpz!r}: with zero={self.zero} every rank has all parameters; use "
                "zero=3, or hpz=None"
            )
        if self.zero == 1 and self.accumulate == "shard":
            raise ValueError(
                "accumulate='shard' reduces every micro-batch, which is zero=2: use that, or "
                "accumulate='local'"
            )
        if self.error_feedback and not self.qgz:
            raise ValueError(
                "error_feedback=True is for gradients that travel as int4 groups: set qgz=True, too"
            )
        if self.find_unused_parameters and self.zero == 3:
            raise ValueError(
                "find_unused_parameters=True with zero=3: ranks hold parts of each unit, and must "
                "gather the same units in the same order; use zero=2 with params='device', or call "
                "the same modules on all ranks (a block that is left out may add 0 times its "
                "output)"
            )
        timeout = self.rank_timeout_s
        if (
            isinstance(timeout, bool)
            or not isinstance(timeout, (int, float))
            or not 0 < timeout < float("inf")
        ):
            raise ValueError(f"rank_timeout_s={timeout!r}: give a number of seconds, more than 0")
        if self.mesh is not None and not hasattr(self.mesh, "get_group"):
            raise ValueError(
                f"mesh={self.mesh!r}: give a torch.distributed.device_mesh.DeviceMesh, or None"
            )

    @property
    def rules(self) -> dict[str, str]:
        """Return the settings that all ranks must have alike: settings that decide numbers, or the
        exchange.
        """
        return {field: repr(getattr(self, field)) for field in _OF_ALL_RANKS}

    @property
    def accumulates_locally(self) -> bool:
        """True where micro-batches inside `no_sync` add up in whole gradients of this rank."""
        return self.accumulate == "local" or (self.accumulate is None and self.zero == 1)

    def _check_together(self) -> None:
        if self.update == "backward" and self.on_nonfinite == "skip" and not self.speculates:
            raise ValueError(
                "update='backward' cannot honour on_nonfinite='skip': when a gradient that is not "
                "finite is met, other units of the step are updated already. Use generations=2, "
                "on_nonfinite='raise' or 'ignore', or update='deferred'"
            )
        if self.find_unused_parameters and self.update == "backward":
            raise ValueError(
                "update='backward' updates units in the order of each rank's own backward, and "
                "find_unused_parameters=True lets ranks differ in it: use update='deferred' or "
                "'delayed'"
            )
        self._check_durable()
        if self.update_on == "device" and self.update != "deferred":
            raise ValueError(
                f"update_on='device' updates inside opt.step(), and update={self.update!r} at "
                "other times: use update='deferred', or update_on='cpu'"
            )
        if self.update == "delayed" and self.generations > 1:
            raise ValueError(
                "update='delayed' keeps one generation: it computes with the parameters of the "
                "step before while the update is "
                "made; use update='deferred' or 'backward' with generations=2, or generations=1"
            )
        for kind, tier in (("params", self.params), ("optim", self.optim)):
            if kind in (self.resident or {}) and tier != "nvme":
                raise ValueError(
                    f"resident={dict(self.resident or {})!r}: {kind!r} rests in memory anyway, "
                    f"since {kind}={tier!r}; leave it out, or set {kind}='nvme'"
                )

    def _check_damaged(self) -> None:
        if self.damaged == "raise":
            return
        if self.generations < 2:
            raise ValueError(
                f"damaged={self.damaged!r} takes states of an earlier step, and generations=1 has "
                "none: set generations=2"
            )
        if self.verify != "full":
            raise ValueError(
                f"damaged={self.damaged!r} takes older states only where all their checksums are "
                f"right: set verify='full' instead of {self.verify!r}"
            )

    def _check_durable(self) -> None:
        if not self.durable:
            if self.durable_every != 1:
                raise ValueError(
                    f"durable_every={self.durable_every} is for durable runs: set durable=True too"
                )
            if self.generations > 2:
                raise ValueError(
                    f"generations={self.generations} keeps {self.generations - 1} commits of a "
                    "durable run: set durable=True too, or use 1 or 2"
                )
            return
        given = {"params": self.params, "optim": self.optim}
        if set(given.values()) != {"nvme"}:
            tier, value = next((tier, value) for tier, value in given.items() if value != "nvme")
            raise ValueError(
                f"durable={self.durable!r} keeps all states on the drives: set {tier}='nvme' "
                f"instead of {value!r}"
            )
        if self.resident:
            raise ValueError(
                "durable runs keep nothing resident, so that every step reaches the drives: leave "
                "resident= out"
            )
        if self.verify == "off":
            raise ValueError(
                "durable runs need checksums to know what a crash left: set verify='full' "
                "or 'sample'"
            )
        if self.durable_every > 1 and self.update == "backward":
            raise ValueError(
                f"durable_every={self.durable_every} overwrites steps in between, and "
                "update='backward' takes updates back: use update='deferred', or durable_every=1"
            )

    @property
    def places(self) -> int:
        """Places of a chunk between which a step chooses, each in memory if the state rests there:
        2 where a step is a transaction."""
        return min(self.generations, 2)

    @property
    def older_commits(self) -> int:
        """Commits that a durable run keeps beside the newest one."""
        return max(self.generations - 2, 0)

    @property
    def speculates(self) -> bool:
        """True where units update during backward ahead of a step that may decide otherwise."""
        return self.update == "backward" and self.generations > 1

    # The rules of the update modes, each stated once for the engine, its planner and `perf.plan`.

    @property
    def consumes_grads(self) -> bool:
        """True when the last micro-batch's gradients are used up in backward, by its updates."""
        # A speculative update may be redone by the step, so its gradients wait for that.
        return self.update == "backward" and not self.speculates

    @property
    def delays(self) -> bool:
        """True when a step's updates run beside the next step's passes."""
        return self.update == "delayed"

    @property
    def updates_in_step(self) -> bool:
        """True when all updates are submitted by `opt.step()`, which no pass reads ahead of."""
        return self.update == "deferred"

    @property
    def last_unit_first(self) -> bool:
        """True when the updates of a step begin with the last unit."""
        return self.update == "backward"

    @property
    def placement_update(self) -> str:
        """The update mode whose traffic a placement is optimized for."""
        # Gradients that wait for a step move as with deferred updates.
        return "deferred" if self.speculates else self.update

    @property
    def cpu_update(self) -> str | None:
        """The update mode on the CPU, which the limits of a step know; None on a device."""
        return self.update if self.update_on == "cpu" else None

    def whole_params(self, *, several: bool) -> bool:
        """Tell whether each rank keeps all parameters on its device; several: of more than one."""
        return self.params == "device" and (self.zero < 3 or not several)

    @property
    def resident_parts(self) -> dict[str, float | int]:
        """Shares and bytes of states on NVMe that stay in RAM: `resident`, or none in a durable
        run."""
        if self.durable:
            return {"params": 0.0, "optim": 0.0}
        return {
            kind: part for kind, part in (self.resident or {}).items() if not isinstance(part, str)
        }

    @property
    def _tiers(self) -> tuple[str, ...]:
        return (self.params, self.optim, self.grads, self.activations)

    @property
    def directories(self) -> tuple[Path, ...]:
        assert isinstance(self.nvme, tuple)
        return self.nvme

    @property
    def io_settings(self) -> IoSettings:
        """`io` as it is used: the defaults where nothing is given, no block that was measured with
        another backend."""
        return (
            self.io.for_backend(self.io_backend)
            if isinstance(self.io, IoSettings)
            else IoSettings()
        )

    def _resident(self) -> Mapping[str, float | int] | None:
        """`resident` with sizes as bytes (int) and shares as they are (float)."""
        if self.resident is None:
            return None
        if not isinstance(self.resident, Mapping):
            raise ValueError(
                f"resident={self.resident!r}: give a mapping such as "
                f"{{'params': 0.5, 'optim': '8GiB'}}, or None"
            )
        given = dict(self.resident)
        wrong = next((key for key in given if key not in ("params", "optim")), None)
        if wrong is not None:
            raise ValueError(
                f"resident={given!r}: {wrong!r} is not known; use 'params' and 'optim'"
            )
        parsed: dict[str, float | int] = {}
        for key, value in given.items():
            if isinstance(value, float):
                if not 0.0 <= value <= 1.0:
                    raise ValueError(
                        f"resident[{key!r}]={value!r}: a share is between 0.0 and 1.0; write sizes "
                        "as '8GiB'"
                    )
                parsed[key] = value
            # 1 means one byte, where the user most likely means all.
            elif type(value) is int and value == 1:
                raise ValueError(
                    f"resident[{key!r}]=1 would be one byte; write 1.0 for all of it, or a size "
                    "such as '8GiB'"
                )
            else:
                parsed[key] = self._size(f"resident[{key!r}]", value)
        return parsed

    def _io(self) -> IoSettings | None:
        given = self.io
        if given is None or isinstance(given, IoSettings):
            return given
        if not isinstance(given, (Mapping, str, os.PathLike)):
            raise ValueError(
                f"io={given!r} is not known; use None, an infinity.aio.IoSettings, a mapping with "
                "its fields or the path of a JSON file of python -m infinity.bench swap"
            )
        try:
            return IoSettings.load(given)
        except ValueError as error:
            raise ValueError(f"io: {error}") from None

    def _paths(self) -> tuple[Path, ...]:
        given = self.nvme
        if isinstance(given, (str, os.PathLike)):
            given = (given,)
        if not given and "nvme" in self._tiers and os.environ.get("INFINITY_NVME_DIR"):
            given = tuple(os.environ["INFINITY_NVME_DIR"].split(os.pathsep))
        if not isinstance(given, Sequence) or not all(
            isinstance(path, (str, os.PathLike)) and str(path) for path in given
        ):
            raise ValueError(
                f"nvme={self.nvme!r}: give a directory, or a list of directories, none of them "
                "empty"
            )
        for path in given:
            # As it is given: the directory around it may have braces in its name.
            check_directory_pattern(Path(path))
        paths = tuple(absolute(path, "nvme") for path in given)
        if self.durable and paths and is_directory_pattern(paths[0]):
            raise ValueError(
                f"nvme={[str(path) for path in paths]}: a durable run keeps the manifests of all "
                "ranks in the first directory: name one there that is the same on every rank; the "
                "others may differ"
            )
        if len({path.resolve() for path in paths}) != len(paths):
            raise ValueError(f"nvme={[str(path) for path in paths]} names a directory twice")
        return paths

    def _size(self, field: str, value: Any) -> int:
        try:
            return parse_size(value)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{field}={value!r}: {error}") from None

    def _check_choice(self, field: str) -> None:
        value, choices = getattr(self, field), CHOICES[field]
        # `True == 1`: the type must agree too, or durable=0 would pass for False.
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return
        known = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{field}={value!r} is not known; use {known}")


_logged: set[str] = set()


def _log_once(notes: Sequence[str]) -> None:
    """Log notes on a configuration that this process has not logged yet."""
    for note in notes:
        if note not in _logged:
            _logged.add(note)
            log.info("DeepSpeed configuration: %s", note)


def _launched(variable: str) -> int | None:
    """Read a number of ranks that a launcher has put into the environment; None without one."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _world_size() -> int:
    """Return the ranks of the process group, else those that a launcher starts, else 1."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_world_size()
    return _launched("WORLD_SIZE") or 1
