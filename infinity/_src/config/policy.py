"""The user's settings (`Policy`): tiers and encoding of states, mode of updates. `Policy` validates
them once, when it is built.
"""

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
    """Settings of an offloaded model. Every field has a working default.

    params, optim, grads, activations: the lowest tier of these states: "device", "cpu" or "nvme".
        The part that fits in the remaining `ram` rests on a higher tier. grads="nvme" spills
        gradients that exceed an
        explicit `ram`. `activations`: inputs of checkpointed calls (torch.utils.checkpoint, or
        `gradient_checkpointing_enable()`) of at least 64 KiB, which are offloaded during forward
        and prefetched in backward. "cpu" is for models that compute on another device; the memory
        depends on the batch, is not counted in `ram`, and is reported by `handle.stats()`.
    nvme: one or several directories on NVMe drives; required when a tier is "nvme". Default:
        $INFINITY_NVME_DIR. "{rank}" and "{local_rank}" are replaced by the rank's number, and its
        number within its node: "/mnt/nvme{local_rank}" assigns a drive to each rank; without them
        ranks share the drives' capacity and bandwidth. Resolved by `inf.offload`.
    ram: budget of this process for offloading, in bytes or as text ("64GiB"): pinned buffers,
        gradients, resident extents. "min": the smallest working budget; None: half of the available
        memory of the machine or its cgroup, divided by the ranks of the node.
    resident: the part of a state with tier "nvme" to keep in RAM: {"params": 0.5, "optim": "8GiB"},
        a share (float, 0.0 to 1.0) or a size. None: the planner uses the remaining budget.
    state: the encoding of states at rest. "exact": fp32 masters and moments (12 bytes per bf16
        parameter). "bf16": moments in bf16 (8). "compact": 24-bit masters, moments in 8 bits (5.1).
        The last two use stochastic rounding, with `seed`.
    zero: states sharded over the ranks. 1: optimizer states; 2: also gradients; 3: also parameters.
        Stages 1 and 2 keep whole parameters on every rank's device: params="device".
    accumulate: gradient accumulation inside `handle.no_sync()` on several ranks. "shard": the
        gradients of each micro-batch are reduced immediately into this rank's shard, without
        further memory. "local": unreduced gradients of the whole model are summed in CPU memory
        (counted in `ram`), and reduced with the last micro-batch. None: "local" with zero=1, else
        "shard".
    find_unused_parameters: with zero=1 or 2, ranks may use different modules in forward, in any
        order (stochastic depth, experts, heads of several tasks), as with DDP. All ranks reduce all
        gradients in a fixed order, with zeros for missing ones; a parameter that no rank has used
        gets no gradient. Costs device memory for gradients that wait for their turn, and reductions
        of unused ones. update="backward" is refused.
    sync_module_states: all ranks start with rank 0's parameters and buffers, as with FSDP; other
        ranks do not read `load=`, and their models may be on the meta device. Otherwise different
        initial parameters on ranks are an error.
    broadcast_buffers: rank 0's buffers (running statistics) are broadcast at the start and after
        each backward outside of `handle.no_sync()`, as with DDP. Otherwise ranks' buffers are
        independent.
    qwz: weights are gathered quantized to int8 (ZeRO++): half the bytes; all ranks compute with the
        dequantized weights.
    hpz: memory of secondary shards, "device" or "cpu" (ZeRO++): the ranks of a node keep the
        gathered weights, one shard each, and gather from them until the weights change, without
        other nodes and drives. None: no secondary shards.
    qgz: gradients are reduced quantized to int4, first inside the node, then over nodes (ZeRO++): a
        quarter of the bytes.
    error_feedback: with qgz, a gradient's quantization error is added to the next gradient. Costs 2
        bytes for each parameter of the model, and 2 for each of this rank's node, in `ram`.
        Checkpoints do not have these errors: after `inf.restore` they are zero.
    mesh: a DeviceMesh over all ranks: one dimension, or (nodes, ranks of a node). None: nodes are
        detected. A mesh of only this rank: the model is not distributed.
    rank_timeout_s: seconds that a collective waits for a missing rank before the other ranks raise.
    update: "deferred": `opt.step()` returns immediately, and the update overlaps with the next
        forward. "backward": each unit is updated as soon as backward has its gradient; no clipping
        by norm, no GradScaler, unless generations=2. "delayed": the update overlaps with the whole
        next step, which computes with the previous parameters (ZeRO-Offload's delayed parameter
        update); forwards without gradients, `state_dict()`, `gather()` and exports wait for the
        updated parameters.
    delayed_warmup: with update="delayed", number of first steps that run as "deferred".
    seed: for stochastic rounding.
    device: compute device: "cpu", "cuda", "cuda:1" or a torch.device. None: the device of the
        model's parameters ("cpu" if all are on the meta device).
    grad_dtype: dtype of accumulated gradients; None: the parameter's.
    reduce_dtype: dtype of gradients in messages between ranks; None: `grad_dtype`. They are summed
        in fp32 in the order of ranks, divided by their number, and rounded once; with several nodes
        of several ranks first so inside each node, then over nodes.
    units: the modules to gather as one unit: modules, their classes' names, or qualified names.
        None: detected.
    unit_bytes_max: larger modules are split into units of their submodules, where possible.
    on_nonfinite: action of `opt.step()` on a gradient with infinity or NaN, before any state
        changes: "raise", "skip" the step, or "ignore".
    verify: "full" verifies the checksum of every byte read. "sample" verifies one piece of 16 per
        section read (at least one), in rotation: a wholly stale or misdirected read is always
        detected, damage to a single piece in one read of 16. "off": no verification.
    io_backend: "auto", "io_uring" or "threads"; a named backend that does not work is an error.
    io: request size, depth and the drives' bandwidths: an `infinity.aio.IoSettings`, a mapping with
        its fields, or the path of a file written by `python -m infinity.bench swap --sweep --json
        FILE`. None: the backend's request size (1 MiB for rings, up to 16 MiB for threads), depth
        32, bandwidths measured when needed.
    update_threads: threads of this rank that verify, update and copy chunks on the CPU. None: if a
        GPU computes, this rank's share of the machine's cores minus one; if the CPU computes, a
        quarter of its processors, divided by the ranks.
    generations: 1 overwrites states in place. 2 keeps the previous step's states (twice the
        capacity), so a step is a transaction: if an update fails, the step is undone on all ranks;
        and update="backward" supports every loop (if `opt.step()` clips, units are updated again
        from the old states; if gradients are not finite, the updates are undone).
        3 to 5 are for durable runs, which retain further commits for
        `inf.restore(damaged="from-older")`. Each needs the capacity of all states; if a drive lacks
        it, fewer are retained, with a warning.
    damaged: with two generations, action if an update finds unreadable states (the step is undone
        first). "raise": StatesLost names parameters, elements and file, and the run ends.
        "from-older": training continues, and these elements get the values and moments before their
        last update, if the drive still has them; a warning names them, and
        `handle.stats().older_chunks` counts them. Needs verify="full", and states that are not in
        RAM.
    durable: True keeps the run in the `nvme` directories: after a crash `inf.restore(model, opt,
        directory)` resumes from the last committed step. An exit without `handle.close()` commits
        the last step on a single rank only. Needs params="nvme" and optim="nvme", and keeps two
        generations of all states there, none resident. If a directory has a run already, no step is
        taken until `inf.restore`; "new" replaces that run at the first step.
    durable_every: steps per commit; a crash loses the steps since the last commit.
    update_on: "cpu": updates run on the CPU, concurrently with the next forward (or backward).
        "device": states are streamed through the GPU inside `opt.step()`, with update="deferred".
        Both give the same bits; "cpu" transfers a fifth of the bytes over the link, and `infinity
        plan` estimates both.

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
        # Later steps must not overwrite the commit, so chunks need a second place.
        if self.durable:
            object.__setattr__(self, "generations", max(self.generations, 2))
        for field in ("delayed_warmup", "seed"):
            value = getattr(self, field)
            if type(value) is not int or value < 0:
                raise ValueError(f"{field}={value!r}: give a whole number, 0 or more")
        object.__setattr__(self, "resident", self._resident())
        # A string is a sequence, too.
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
        """Return the policy for a DeepSpeed configuration; docs/deepspeed-config.md lists the
        meaning of each key.

        config: a mapping, the path of a JSON file, or the result of `inf.read_deepspeed`.
        world_size: ranks; None: of the process group, else of the launcher. auto: values in place
        of "auto", by dotted key; other "auto" values are allowed if no field depends on them.
        overrides: fields that replace the configuration's, or that it lacks, such as nvme= and
        ram=.

        Keys without effect, or with another meaning, are logged once (INFO). Raises: ValueError
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
        # If the CPU computes, activations are already in its memory, as in DeepSpeed.
        on_cpu = str(fields.get("device")).partition(":")[0] == "cpu"
        if on_cpu and fields.get("activations") == "cpu" and "activations" not in overrides:
            fields["activations"] = "device"
        # `resident` of the configuration only applies to its tier "nvme".
        if fields.get("params") != "nvme" and "resident" not in overrides:
            fields.pop("resident", None)
        if "nvme" in (fields.get("params"), fields.get("optim")) and not (
            fields.get("nvme") or os.environ.get("INFINITY_NVME_DIR")
        ):
            section = "offload_param" if fields["params"] == "nvme" else "offload_optimizer"
            raise ValueError(
                f'zero_optimization.{section}.device="nvme" without nvme_path: set nvme_path, '
                "nvme= or $INFINITY_NVME_DIR to a directory"
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
        """Return the settings that must be equal on all ranks, since they affect results or
        collectives.
        """
        return {field: repr(getattr(self, field)) for field in _OF_ALL_RANKS}

    @property
    def accumulates_locally(self) -> bool:
        """True if micro-batches inside `no_sync` accumulate unreduced gradients."""
        return self.accumulate == "local" or (self.accumulate is None and self.zero == 1)

    def _check_together(self) -> None:
        if self.update == "backward" and self.on_nonfinite == "skip" and not self.speculates:
            raise ValueError(
                "update='backward' cannot honour on_nonfinite='skip': when the engine finds a "
                "gradient that is not finite, it has already updated other units. Use "
                "generations=2, on_nonfinite='raise' or 'ignore', or update='deferred'"
            )
        if self.find_unused_parameters and self.update == "backward":
            raise ValueError(
                "update='backward' updates units in the order of the rank's backward, and with "
                "find_unused_parameters=True this order may differ between ranks: use "
                "update='deferred' or 'delayed'"
            )
        self._check_durable()
        if self.update_on == "device" and self.update != "deferred":
            raise ValueError(
                f"update_on='device' updates inside opt.step(), and update={self.update!r} at "
                "other times: use update='deferred', or update_on='cpu'"
            )
        if self.update == "delayed" and self.generations > 1:
            raise ValueError(
                "update='delayed' keeps one generation: forward computes with the parameters of "
                "the step before while the update runs; use update='deferred' or 'backward' with "
                "generations=2, or generations=1"
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
                f"damaged={self.damaged!r} needs the states of an earlier step, and generations=1 "
                "keeps none: set generations=2"
            )
        if self.verify != "full":
            raise ValueError(
                f"damaged={self.damaged!r} uses older states only if all their checksums match: "
                f"set verify='full' instead of {self.verify!r}"
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
                "durable runs need checksums to find states that a crash left incomplete: set "
                "verify='full' or 'sample'"
            )
        if self.durable_every > 1 and self.update == "backward":
            raise ValueError(
                f"durable_every={self.durable_every} overwrites steps in between, and "
                "update='backward' undoes updates: use update='deferred', or durable_every=1"
            )

    @property
    def places(self) -> int:
        """Places of a chunk (on a drive or in memory): 2 if a step is a transaction, else 1."""
        return min(self.generations, 2)

    @property
    def older_commits(self) -> int:
        """Number of commits that a durable run retains in addition to the newest one."""
        return max(self.generations - 2, 0)

    @property
    def speculates(self) -> bool:
        """True if units are updated during backward, and `opt.step()` may undo the updates."""
        return self.update == "backward" and self.generations > 1

    # Properties of the update modes, for the engine and its planners.

    @property
    def consumes_grads(self) -> bool:
        """True if updates in backward consume the last micro-batch's gradients."""
        # The step may repeat a speculative update, so its gradients are retained.
        return self.update == "backward" and not self.speculates

    @property
    def delays(self) -> bool:
        """True if a step's updates run concurrently with the next step's passes."""
        return self.update == "delayed"

    @property
    def updates_in_step(self) -> bool:
        """True if `opt.step()` submits all updates, before any later pass reads states."""
        return self.update == "deferred"

    @property
    def last_unit_first(self) -> bool:
        """True if the updates of a step begin with the last unit."""
        return self.update == "backward"

    @property
    def placement_update(self) -> str:
        """The update mode whose traffic a placement is optimized for."""
        # Speculative updates retain gradients until the step, like deferred ones.
        return "deferred" if self.speculates else self.update

    @property
    def cpu_update(self) -> str | None:
        """The update mode of CPU updates; None for device updates."""
        return self.update if self.update_on == "cpu" else None

    def whole_params(self, *, several: bool) -> bool:
        """Return whether each rank keeps all parameters on its device. several: there are several
        ranks.
        """
        return self.params == "device" and (self.zero < 3 or not several)

    @property
    def resident_parts(self) -> dict[str, float | int]:
        """Shares or bytes of NVMe states to keep in RAM: `resident`; zero in a durable run."""
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
        """`io` or its defaults, without a block size measured with another backend."""
        return (
            self.io.for_backend(self.io_backend)
            if isinstance(self.io, IoSettings)
            else IoSettings()
        )

    def _resident(self) -> Mapping[str, float | int] | None:
        """Parse `resident`: sizes to bytes (int), shares unchanged (float)."""
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
            # An int 1 would be one byte; the user most likely means all.
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
            # Checked before `absolute` adds parent directories, whose names may have braces.
            check_directory_pattern(Path(path))
        paths = tuple(absolute(path, "nvme") for path in given)
        if self.durable and paths and is_directory_pattern(paths[0]):
            raise ValueError(
                f"nvme={[str(path) for path in paths]}: a durable run keeps the manifests of all "
                "ranks in the first directory: its name must be the same on every rank; further "
                "directories may have {rank} in their names"
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
        # Compare types, too: `True == 1`, so durable=0 would be accepted as False.
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return
        known = " or ".join(repr(choice) for choice in choices)
        raise ValueError(f"{field}={value!r} is not known; use {known}")


_logged: set[str] = set()


def _log_once(notes: Sequence[str]) -> None:
    for note in notes:
        if note not in _logged:
            _logged.add(note)
            log.info("DeepSpeed configuration: %s", note)


def _launched(variable: str) -> int | None:
    """Return the number of ranks that a launcher has set in the environment, else None."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _world_size() -> int:
    """Return the ranks of the process group, else of the launcher, else 1."""
    group = torch.distributed
    if group.is_available() and group.is_initialized():
        return group.get_world_size()
    return _launched("WORLD_SIZE") or 1
