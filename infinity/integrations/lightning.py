"""Lightning's Trainer and Fabric with offloaded models: `strategy="infinity"`.

    import infinity.integrations.lightning          # registers the name with both

    trainer = Trainer(strategy=InfinityStrategy(inf.Policy(params="nvme", optim="nvme", nvme=...)))
    fabric = Fabric(strategy=FabricInfinityStrategy(policy))

Ranks are launched as with `ddp`. The strategy offloads a whole module with the given policy, unless
the module has offloaded a net itself (in `configure_model`, where the process group exists).
Offloaded parameters need infinity's optimizers: `inf.AdamW(self.parameters())`.

A checkpoint is a directory:

    trainer.ckpt        loops, callbacks, schedulers, hyper-parameters, and the state of modules
                        that are not offloaded
    infinity/<i>        states of the i-th offloaded module (`inf.save`), or
    weights/<i>         its values alone (safetensors), with `save_weights_only`

`fit(ckpt_path=)`, `validate(ckpt_path=)` and so on load it, and so does `fabric.load`.
`load_from_checkpoint` reads only files; `inf.export_safetensors` writes files for other programs.

The engine stays open after `fit`, so that the module can be validated, exported, or trained again;
`inf.handle(module).close()` closes it, else the end of the process does. (If the module offloads
its net itself: `inf.handle(module.net)`.)

This works with the package `lightning`. `pytorch_lightning` and `lightning_fabric` have separate
classes that do not know the strategy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import logging
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.fabric.strategies as fabric_strategies
import lightning.pytorch.strategies as trainer_strategies
import torch
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn

import infinity as inf
from infinity._embedding import (
    STATES,
    check_methods,
    engine_optimizer,
    has_states,
    optimizers_of,
    share_values,
)
from infinity.errors import ParameterReleased

log = logging.getLogger("infinity")

__all__ = ["FabricInfinityStrategy", "InfinityStrategy"]

_TESTED = "2.6.6"
_TRAINER_FILE = "trainer.ckpt"
_WEIGHTS = "weights"

_OVERRIDDEN = (
    "setup_environment", "setup", "setup_optimizers", "model_to_device",
    "tensor_init_context", "block_backward_sync", "lightning_module_state_dict", "save_checkpoint",
    "load_checkpoint", "load_model_state_dict", "remove_checkpoint", "on_train_end", "teardown",
    "_reset_optimizers_and_schedulers",
)  # fmt: skip
_OVERRIDDEN_FABRIC = (
    "setup_module", "setup_module_and_optimizers", "setup_optimizer", "module_to_device",
    "module_init_context", "save_checkpoint", "load_checkpoint", "load_module_state_dict",
)  # fmt: skip
check_methods(trainer_strategies.DDPStrategy, _OVERRIDDEN, "lightning", _TESTED)
check_methods(fabric_strategies.DDPStrategy, _OVERRIDDEN_FABRIC, "lightning", _TESTED)

# DDPStrategy's settings, without those of the DDP wrapper and of launchers.
_SETTINGS = (
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io",
    "process_group_backend", "timeout",
)  # fmt: skip
_COPIES = (
    "it copies the module, and the values of an offloaded module are not in memory; an average can "
    "be made of checkpoints, after inf.export_safetensors"
)
_SWAPS = "it puts other parameters in the place of the module's; prune before offloading"
_COMPARES = (
    "it compares parameters by their values when it unfreezes some; call requires_grad_() and "
    "optimizer.add_param_group(...) in a callback of your own"
)
# Callbacks that would fail during the run, each with the reason and an alternative.
_REFUSED_CALLBACKS = (
    (WeightAveraging, _COPIES),
    (StochasticWeightAveraging, _COPIES),
    (ModelPruning, _SWAPS),
    (BaseFinetuning, _COMPARES),
)


class InfinityStrategy(trainer_strategies.DDPStrategy):
    """Strategy of Lightning's Trainer for offloaded modules, on one process or several.

    policy: for a LightningModule that contains no offloaded module; None: `inf.Policy()`. Without
    `device` it gets the trainer's. settings: DDPStrategy's, except those of the DDP wrapper and of
    launchers other than "popen" (a spawned process could not return what it trained).

    On several ranks every trainable parameter must be offloaded. Refused: callbacks that need a
    module's values at all times (WeightAveraging, StochasticWeightAveraging, ModelPruning,
    BaseFinetuning), sync_batchnorm (convert before offloading), and offloading a whole module that
    uses manual optimization.

    Raises: ValueError naming an unknown setting.
    """

    strategy_name = "infinity"

    def __init__(self, policy: inf.Policy | None = None, **settings: Any) -> None:
        _check_settings(type(self).__name__, settings, (*_SETTINGS, "precision_plugin"))
        super().__init__(**settings)
        self._policy = policy
        self._source: Path | None = None  # the checkpoint being loaded, if a strategy here wrote it
        # (state dict of modules that are not offloaded, strict) of a checkpoint that was loaded
        # before the engine existed.
        self._waiting: tuple[Mapping[str, Any], bool] | None = None
        self._is_set_up = False

    # -- set-up ------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Create the process group, and refuse unsupported callbacks before any hook runs."""
        super().setup_environment()
        self._waiting, self._is_set_up = None, False
        _check_callbacks(self.lightning_module.trainer.callbacks)
        if getattr(self.cluster_environment, "auto_requeue", False):
            # Its signal handler may save during a forward, when an engine cannot save.
            self.cluster_environment.auto_requeue = False
            log.warning(
                "SLURM's auto-requeue is off: it would save in the middle of a step, when an "
                "offloaded module cannot be saved; save by ModelCheckpoint("
                "train_time_interval=...), and requeue in the job's script"
            )

    def setup(self, trainer: Any) -> None:
        """Offload the module, unless it is offloaded; build its optimizers when fitting."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True: it would replace layers that are offloaded; call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(net) before the net is offloaded, "
                "as in configure_model"
            )
        module = self.lightning_module
        # Drop gradients of an earlier run now: the trainer does it only when its loop starts.
        module.zero_grad()
        _prepare(module, self._policy, self.precision_plugin, self.root_device, self.world_size)
        # With manual optimization `training_step` steps the optimizer: illegal inside a forward.
        self.model = _Entrance(module) if module.automatic_optimization else module
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._is_set_up = True
        if self._waiting is not None:
            self._read_states(*self._waiting)
            self._waiting = None

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the optimizers. First release the parameters from an earlier run's optimizers."""
        for engine in inf.offloaded_modules(self.lightning_module):
            before = _FITTED.get(engine)
            if before is not None:
                before._reset_optimizers_and_schedulers()
                # Optimizers and schedulers form reference cycles.
                gc.collect()
            _FITTED[engine] = self
        super().setup_optimizers(trainer)
        _check_optimizers(self.lightning_module, self.optimizers, "configure_optimizers returned")

    def model_to_device(self) -> None:
        """Move modules that are not offloaded, such as metrics."""
        self.lightning_module.to(self.root_device)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Enter the context in which modules are built: in CPU memory, since they may not fit on
        the device; with `empty_init` on meta, for `inf.offload(..., load=)`.
        """
        device = torch.device("meta") if empty_init else contextlib.nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    def block_backward_sync(self) -> contextlib.ExitStack:
        """Return the context for every micro-batch of a step but the last."""
        return _no_sync(self.lightning_module)

    # -- checkpoints -------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of modules that are not offloaded. Engines write their own files."""
        return _plain_state(self.lightning_module)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, a directory. All ranks call it. Blocks until it is whole."""
        if storage_options is not None:
            raise TypeError(
                f"storage_options={storage_options!r}: a checkpoint with strategy='infinity' is a "
                "directory in a file system, and takes none"
            )

        def write(directory: Path) -> None:
            if self.is_global_zero:
                _write_trainer(self.checkpoint_io, checkpoint, directory)
            optimizers = self.optimizers if "optimizer_states" in checkpoint else None
            _write_engines(self.lightning_module, optimizers, directory)

        _write_directory(self, _local(self.broadcast(str(filepath))), write)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the trainer's part of a checkpoint that this or another strategy wrote."""
        self._source = _source(checkpoint_path)
        path = self._source / _TRAINER_FILE if self._source is not None else checkpoint_path
        found: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Set the module's values and, when fitting, the states of its optimizers. If the trainer
        calls this before `setup`, the values wait until the engine exists.
        """
        if self._source is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif self._is_set_up:
            self._read_states(checkpoint["state_dict"], strict)
        else:
            self._waiting = checkpoint["state_dict"], strict

    def _read_states(self, plain: Mapping[str, Any], strict: bool) -> None:
        """Load the checkpoint `_source`. plain: its state of modules that are not offloaded."""
        assert self._source is not None
        module = self.lightning_module
        _load_plain(module, plain, strict=strict)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        _read_engines(module, self.optimizers if fitting else [], self._source)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, or a symbolic link to one."""
        if self.is_global_zero:
            path = Path(filepath)
            if path.is_symlink():
                path.unlink()
            else:
                self.checkpoint_io.remove_checkpoint(filepath)

    # -- the end -----------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Wait for the last step's updates, and raise their faults."""
        for engine in inf.offloaded_modules(self.lightning_module):
            inf.handle(engine).flush()

    def teardown(self) -> None:
        """End the run. The module stays offloaded, and its engine open."""
        self.model = self.lightning_module
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name "infinity"."""
        strategy_registry.register(
            cls.strategy_name, cls, description="Offloaded modules (infinity)", override=True
        )


# The strategy that fitted each module last: its optimizers hold the parameters.
_FITTED: weakref.WeakKeyDictionary[torch.nn.Module, InfinityStrategy] = (
    weakref.WeakKeyDictionary()
)


class FabricInfinityStrategy(fabric_strategies.DDPStrategy):
    """Strategy of Fabric for offloaded modules, on one process or several.

    Either offload the module after `fabric.launch()`, build `inf.AdamW` on it, and pass both to
    `fabric.setup`. Or pass a plain module to `fabric.setup_module`, which offloads it with `policy`
    (None: `inf.Policy()`), and then its optimizer to `fabric.setup_optimizers`. settings: as
    InfinityStrategy's.

    `fabric.save` writes a directory, and `fabric.load` reads it. A module in the state is saved
    with the optimizers set up for it; if loaded without its optimizer, only its values are set.

    Raises: ValueError naming an unknown setting.
    """

    def __init__(self, policy: inf.Policy | None = None, **settings: Any) -> None:
        _check_settings(type(self).__name__, settings, (*_SETTINGS, "precision"))
        super().__init__(**settings)
        self._policy = policy
        self._backward_sync_control = _BackwardSync()
        # In the order of set-up, the same on all ranks. Weak: an optimizer that the script drops
        # must release its parameters.
        self._optimizers: list[weakref.ref[Any]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    # -- set-up ------------------------------------------------------------------------------------

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Offload the module, unless it is offloaded."""
        module.zero_grad()
        module = _prepare(module, self._policy, self.precision, self.root_device, self.world_size)
        self._modules.append(weakref.ref(module))
        return _Entrance(module.to(self.root_device))

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], Any]:
        """Set up an offloaded module with its optimizers. Raises: ValueError for a module that is
        not offloaded: offloading now would replace the parameters that the optimizers hold.
        """
        if not inf.offloaded_modules(module):
            raise ValueError(
                f"fabric.setup(module, optimizer): {type(module).__name__} is not offloaded, and "
                "would leave its optimizer behind; call inf.offload(module, policy) after "
                "fabric.launch() and build inf.AdamW(module.parameters()) on it, or "
                "fabric.setup_module(module) first and fabric.setup_optimizers(optimizer) then"
            )
        ready: tuple[torch.nn.Module, list[Any], Any] = super().setup_module_and_optimizers(
            module, optimizers, scheduler
        )
        return ready

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Record an optimizer: `save_checkpoint` saves its states with its module's."""
        for module in _alive(self._modules):
            _check_optimizers(module, [optimizer], "Fabric got")
        if engine_optimizer(optimizer) is not None:
            self._optimizers.append(weakref.ref(engine_optimizer(optimizer)))
        return optimizer

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move a module to the device, unless `setup_module` will offload it."""
        if inf.offloaded_modules(module) or next(module.parameters(), None) is None:
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.ExitStack:
        """Return the context in which modules are built: in CPU memory, since they may not fit on
        the device; with `empty_init` on meta, for `inf.offload(..., load=)`.
        """
        stack = contextlib.ExitStack()
        if empty_init:
            stack.enter_context(torch.device("meta"))
        stack.enter_context(self.precision.module_init_context())
        return stack

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002
    ) -> None:
        """Write a checkpoint, a directory. All ranks call it. Blocks until it is whole."""
        state = {name: _inside(value) for name, value in state.items()}
        offloaded = _offloaded_in(state)
        if storage_options is not None or filter:
            raise ValueError(
                f"storage_options={storage_options!r}, filter={filter!r}: a checkpoint with "
                "strategy='infinity' is a directory in a file system, with all of a module; keep "
                "chosen values with inf.export_safetensors"
            )
        kept = {
            name: _plain_state(value) if name in offloaded else value
            for name, value in state.items()
        }
        kept = self._convert_stateful_objects_in_state(kept, filter={})

        def write(directory: Path) -> None:
            if self.is_global_zero:
                _write_trainer(self.checkpoint_io, kept, directory)
            for name, module in offloaded.items():
                _write_engines(module, _alive(self._optimizers), directory / name)

        _write_directory(self, _local(self.broadcast(str(path))), write)

    def load_module_state_dict(
        self, module: torch.nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        """Set a module's values from a state dict."""
        super().load_module_state_dict(_inside(module), state_dict, strict=strict)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load the entries of `state` from a checkpoint; return the checkpoint's other entries."""
        source = _source(path)
        if source is None:
            found: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return found
        if isinstance(state, (torch.nn.Module, torch.optim.Optimizer)):
            raise ValueError(
                f"{path} is a checkpoint with names: give a dictionary, such as "
                "{'model': model, 'optimizer': optimizer}"
            )
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(
            source / _TRAINER_FILE, weights_only=weights_only
        )
        given: dict[str, Any] = state or {}
        state = {name: _inside(value) for name, value in given.items()}
        missing = [name for name in state if name not in checkpoint]
        if strict and missing:
            raise KeyError(
                f"{', '.join(missing)} not in the checkpoint {path}; leave it out of the state, or "
                "give strict=False"
            )
        offloaded = _offloaded_in(state)
        optimizers = [engine_optimizer(value) for value in state.values()]
        # Modules first: optimizers' manifests are then compared with the restored states.
        both = state.keys() & checkpoint.keys()
        for name in sorted(both, key=lambda name: name not in offloaded):
            value, saved = state[name], checkpoint.pop(name)
            if name in offloaded:
                _load_plain(value, saved, strict=strict)
                own = optimizers_of(value, optimizers)
                _read_engines(value, _alive(self._optimizers) if own else [], source / name)
            elif isinstance(value, torch.nn.Module):
                self.load_module_state_dict(value, saved, strict=strict)
            elif callable(getattr(value, "load_state_dict", None)):
                value.load_state_dict(saved)
            else:
                given[name] = saved
        return checkpoint

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register the name "infinity"."""
        strategy_registry.register(
            "infinity", cls, description="Offloaded modules (infinity)", override=True
        )


class _BackwardSync(_BackwardSyncControl):
    """Implements `fabric.no_backward_sync` for offloaded modules."""

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context for every micro-batch of a step but the last."""
        return _no_sync(module) if enabled else contextlib.nullcontext()


# -- modules ---------------------------------------------------------------------------------------


class _Entrance(torch.nn.Module):
    """Wrapper through which the trainer calls `training_step`, `validation_step` and so on as the
    `forward` of `module`: inside a forward all parameters can be used, in any order.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)


def _inside(value: Any) -> Any:
    return value.module if isinstance(value, _Entrance) else value


def _prepare(
    module: torch.nn.Module,
    policy: inf.Policy | None,
    precision: Any,
    device: torch.device,
    world: int,
) -> torch.nn.Module:
    """Offload the module unless it contains an offloaded module, and return it.

    Raises: ValueError if it was offloaded for another device, precision or number of ranks.
    """
    engines = inf.offloaded_modules(module)
    manual = not getattr(module, "automatic_optimization", True)
    if manual and (not engines or engines[0] is module):
        raise ValueError(
            f"{type(module).__name__} uses manual optimization: its training_step takes optimizer "
            "steps, which an offloaded module does not allow inside its forward; so call "
            "inf.offload(net, policy) in configure_model on each net that training_step calls, not "
            "on the module around it"
        )
    if not engines:
        module = precision.convert_module(module)
        if world > 1:
            share_values((*module.parameters(), *module.buffers()), device)
        policy = policy or inf.Policy()
        if policy.device is None:
            policy = dataclasses.replace(policy, device=device)
        engines = [inf.offload(module, policy)]
    else:
        module = _converted(module, precision)
    for engine in engines:
        _check_engine(engine, device, world)
    if world > 1:
        _check_reduced(module, engines)
    return module


def _converted(module: torch.nn.Module, precision: Any) -> torch.nn.Module:
    """Apply the precision plugin to the module. Raises: ValueError if it would convert offloaded
    parameters.
    """
    try:
        converted: torch.nn.Module = precision.convert_module(module)
    except ParameterReleased as error:
        raise ValueError(
            f"precision={precision.precision!r}: the module was offloaded with another dtype; "
            "build the net in configure_model, which makes it with that dtype, or leave "
            "inf.offload to the strategy"
        ) from error
    return converted


def _check_engine(engine: torch.nn.Module, device: torch.device, world: int) -> None:
    here = inf.handle(engine).comm.world
    if here != world:
        raise ValueError(
            f"{type(engine).__name__} was offloaded for {here} rank(s), and the trainer runs "
            f"{world}: offload it in configure_model, when the process group exists, or leave it "
            "to InfinityStrategy(policy)"
        )
    for name, param in engine.named_parameters():
        if param.device != device:
            raise ValueError(
                f"{name} was offloaded for {param.device}, and the trainer computes on {device}: "
                "give inf.Policy(device=self.device) in configure_model, or leave inf.offload to "
                "the strategy"
            )


def _check_reduced(module: torch.nn.Module, engines: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError for trainable parameters that are not offloaded: no engine reduces their
    gradients.
    """
    held = {id(param) for engine in engines for param in engine.parameters()}
    left = [
        name
        for name, param in module.named_parameters()
        if param.requires_grad and id(param) not in held
    ]
    if left:
        raise ValueError(
            f"{', '.join(left[:3])} of {type(module).__name__}: not offloaded, so nothing would "
            "reduce the gradients over ranks; offload the module as a whole (leave it to the "
            "strategy), or call requires_grad_(False)"
        )


def _no_sync(module: torch.nn.Module) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for engine in inf.offloaded_modules(module):
        stack.enter_context(inf.handle(engine).no_sync())
    return stack


def _plain_state(module: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict's entries that no engine saves: of modules outside the offloaded ones,
    and inside these, states that are neither parameters nor buffers (metrics have some).
    """
    engines = {id(engine) for engine in inf.offloaded_modules(module)}
    found: dict[str, Any] = {}

    def visit(child: torch.nn.Module, prefix: str, inside: bool) -> None:
        inside = inside or id(child) in engines
        saved = child.parameters() if inside else inf.offloaded_modules(child)
        if next(iter(saved), None) is None:
            # An engine saves all buffers inside its module.
            left_out = {f"{prefix}{name}" for name, _ in child.named_buffers()} if inside else ()
            state = child.state_dict(prefix=prefix)
            found.update((name, value) for name, value in state.items() if name not in left_out)
            return
        if not inside:
            child._save_to_state_dict(found, prefix, False)
        elif type(child).get_extra_state is not torch.nn.Module.get_extra_state:
            found[f"{prefix}_extra_state"] = child.get_extra_state()
        for name, grandchild in child.named_children():
            visit(grandchild, f"{prefix}{name}.", inside)

    visit(module, "", False)
    return found


def _load_plain(module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load the entries of `_plain_state`. Raises: ValueError naming keys that differ (strict)."""
    wanted = _plain_state(module).keys()
    if strict and wanted != state.keys():
        raise ValueError(
            f"the checkpoint has other entries than {type(module).__name__}: missing "
            f"{sorted(wanted - state.keys())}, unexpected {sorted(state.keys() - wanted)}"
        )
    if state:
        module.load_state_dict(state, strict=False)


def _offloaded_in(state: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.nn.Module) and inf.offloaded_modules(value)
    }


# -- checkpoints -----------------------------------------------------------------------------------


def _write_trainer(checkpoint_io: Any, checkpoint: dict[str, Any], directory: Path) -> None:
    path = directory / _TRAINER_FILE
    checkpoint_io.save_checkpoint(checkpoint, path)
    # The directory will be renamed, so the file must exist now.
    if not path.is_file():
        raise ValueError(
            f"{type(checkpoint_io).__name__} had not written {path.name} when it returned: "
            "strategy='infinity' needs a checkpoint_io that writes before it returns"
        )


def _write_engines(
    module: torch.nn.Module, optimizers: Iterable[Any] | None, directory: Path
) -> None:
    """Save all engines in `module`; with optimizers=None, only their values."""
    for index, engine in enumerate(inf.offloaded_modules(module)):
        if optimizers is None:
            inf.export_safetensors(engine, directory / _WEIGHTS / str(index), names="modules")
        else:
            held = optimizers_of(engine, optimizers) or None
            inf.save(engine, held, directory / STATES / str(index)).wait()


def _read_engines(module: torch.nn.Module, optimizers: Iterable[Any], directory: Path) -> None:
    """Restore all engines in `module`; without optimizers, only their values.

    Raises: ValueError if the checkpoint has another number of offloaded modules.
    """
    engines = inf.offloaded_modules(module)
    there = sum(1 for _ in (directory / (STATES if has_states(directory) else _WEIGHTS)).iterdir())
    if there != len(engines):
        raise ValueError(
            f"{directory} has the states of {there} offloaded modules, and "
            f"{type(module).__name__} has {len(engines)}: offload the same modules"
        )
    for index, engine in enumerate(engines):
        if has_states(directory):
            held = optimizers_of(engine, optimizers) or None
            inf.restore(engine, held, directory / STATES / str(index))
        else:
            inf.load_safetensors(engine, directory / _WEIGHTS / str(index))


def _write_directory(strategy: Any, path: Path, write: Callable[[Path], None]) -> None:
    """Have all ranks write a new directory, and rename it to `path` when it is complete."""
    # A hash, because trainers search for the last checkpoint by a part of its name, and must not
    # find a partial or a replaced one.
    tag = hashlib.sha256(path.name.encode()).hexdigest()[:16]
    partial, replaced = path.with_name(f".{tag}.partial"), path.with_name(f".{tag}.replaced")
    if strategy.is_global_zero:
        _remove(partial)  # left by a run that was killed
        partial.mkdir(parents=True)
    strategy.barrier()
    try:
        write(partial)
    except BaseException:
        # Remove the partial directory here: perhaps no later save has its name and removes it.
        if strategy.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    strategy.barrier()
    if strategy.is_global_zero:
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            _remove(replaced)
            path.rename(replaced)
        partial.rename(path)
        _remove(replaced)
    strategy.barrier()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _local(path: str) -> Path:
    if "://" in path:
        raise ValueError(
            f"{path}: a checkpoint of offloaded modules is a directory that all ranks see; give a "
            "path in a file system, and copy it from there"
        )
    return Path(path)


def _source(path: Any) -> Path | None:
    """Return the path if it is a checkpoint directory of this module; None for a file (another
    strategy's checkpoint). Raises: ValueError for any other directory.
    """
    source = Path(path)
    if (source / _TRAINER_FILE).is_file():
        return source
    if source.is_dir():
        raise ValueError(
            f"{path} is not a checkpoint of strategy='infinity': it has no {_TRAINER_FILE}; give "
            "a directory that the strategy has written, or a checkpoint file"
        )
    return None


# -- unsupported settings --------------------------------------------------------------------------


def _check_settings(name: str, settings: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ValueError(
            f"{name}({', '.join(unknown)}=...): it takes policy, {', '.join(known)}; the engine "
            "stands in for DDP's wrapper (find_unused_parameters and broadcast_buffers are fields "
            "of inf.Policy), and ranks are launched by 'popen' or from outside"
        )


def _check_callbacks(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        for refused, why in _REFUSED_CALLBACKS:
            if isinstance(callback, refused):
                raise ValueError(
                    f"callback {type(callback).__name__} does not work with offloaded modules: "
                    f"{why}"
                )


def _check_optimizers(module: torch.nn.Module, optimizers: Iterable[Any], met: str) -> None:
    """Raise ValueError for a torch optimizer that holds offloaded parameters."""
    names = {
        id(param): name
        for engine in inf.offloaded_modules(module)
        for name, param in engine.named_parameters()
    }
    for optimizer in optimizers:
        if engine_optimizer(optimizer) is not None:
            continue
        held = [
            names[id(param)]
            for group in optimizer.param_groups
            for param in group["params"]
            if id(param) in names
        ]
        if held:
            kind = type(optimizer)
            raise ValueError(
                f"{met} {kind.__module__}.{kind.__qualname__} over {held[0]}, which is offloaded: "
                "its states have no values to begin with; return inf.AdamW(self.parameters(), "
                "lr=...), inf.SGD, inf.Lion, or inf.Elementwise over a class of torch"
            )


def _alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [found for ref in refs if (found := ref()) is not None]


InfinityStrategy.register_strategies(trainer_strategies.StrategyRegistry)
FabricInfinityStrategy.register_strategies(fabric_strategies.STRATEGY_REGISTRY)
