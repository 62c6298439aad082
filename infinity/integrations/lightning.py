"""Lightning's Trainer and Fabric over offloaded models: `strategy="infinity"`.

    import infinity.integrations.lightning          # registers the name for both

    trainer = Trainer(strategy=InfinityStrategy(inf.Policy(params="nvme", optim="nvme", nvme=...)))
    fabric = Fabric(strategy=FabricInfinityStrategy(policy))

Ranks are launched as by `ddp`. A module that is not offloaded yet is offloaded as a whole, with the
policy given; one that offloads its net itself (in `configure_model`, where the ranks have met) is
taken as it is. Optimizers of offloaded parameters are infinity's: `inf.AdamW(self.parameters())`.

A checkpoint is a directory:

    trainer.ckpt        what the trainer keeps: loops, callbacks, schedulers, hyper-parameters, and
                        the state of what is not offloaded
    infinity/<i>        states of the i-th offloaded module (`inf.save`), or
    weights/<i>         its values alone (safetensors), for `save_weights_only`

`fit(ckpt_path=)` and its likes take it, and `fabric.load`; `load_from_checkpoint` reads files only:
`inf.export_safetensors` writes what other programs read.

The engine stays open after `fit`, so that the module can be validated, exported, or trained on;
`inf.handle(module).close()` ends it, or the end of the process. (Where the module offloads its net
itself, `inf.handle(module.net)`.)

This is for the package `lightning`; objects of `pytorch_lightning` and `lightning_fabric` are other
classes, and do not know the strategy.
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

# Of DDPStrategy's settings those that are not of its wrapper or its launchers.
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
# Callbacks that would fail in the middle of a run, and what to do instead.
_REFUSED_CALLBACKS = (
    (WeightAveraging, _COPIES),
    (StochasticWeightAveraging, _COPIES),
    (ModelPruning, _SWAPS),
    (BaseFinetuning, _COMPARES),
)


class InfinityStrategy(trainer_strategies.DDPStrategy):
    """Strategy of Lightning's Trainer for offloaded modules, on one process or several.

    policy: for a LightningModule that comes without an offloaded module in it; `device` is set to
    the trainer's. settings: of DDPStrategy, but those of its wrapper and of launchers other than
    "popen" (spawned processes would give back nothing that they trained).

    With policy=None such a module gets `inf.Policy()`. On several ranks every trainable parameter
    has to be offloaded. Refused: callbacks that need a module's values at all times
    (WeightAveraging, StochasticWeightAveraging, ModelPruning, BaseFinetuning), sync_batchnorm
    (convert before offloading), and, where a module optimizes by hand, offloading it as a whole.

    Raises: ValueError naming a setting that it does not take.
    """

    strategy_name = "infinity"

    def __init__(self, policy: inf.Policy | None = None, **settings: Any) -> None:
        _check_settings(type(self).__name__, settings, (*_SETTINGS, "precision_plugin"))
        super().__init__(**settings)
        self._policy = policy
        self._source: Path | None = None  # the checkpoint that is being loaded, if it is ours
        # A checkpoint that was loaded before there was an engine: its entries for what is not
        # offloaded, and whether they must be all.
        self._waiting: tuple[Mapping[str, Any], bool] | None = None
        self._is_set_up = False

    # -- set-up ------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Meet the other ranks, and refuse callbacks that cannot work before any hook runs."""
        super().setup_environment()
        self._waiting, self._is_set_up = None, False
        _check_callbacks(self.lightning_module.trainer.callbacks)
        if getattr(self.cluster_environment, "auto_requeue", False):
            # Its signal handler would save amid a forward, when no engine can.
            self.cluster_environment.auto_requeue = False
            log.warning(
                "SLURM's auto-requeue is off: it saves in the midst of a step, which an offloaded "
                "module cannot; save by ModelCheckpoint(train_time_interval=...), and requeue in "
                "the job's script"
            )

    def setup(self, trainer: Any) -> None:
        """Offload the module, unless it was; build its optimizers when fitting."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True: it would replace layers that are offloaded; call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(net) before the net is offloaded, "
                "as in configure_model"
            )
        module = self.lightning_module
        # The trainer drops gradients when it begins to run; those of an earlier run go now.
        module.zero_grad()
        _prepare(module, self._policy, self.precision_plugin, self.root_device, self.world_size)
        # A loop of the module's own steps inside of `training_step`, and so outside of a forward.
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
        """Build the optimizers anew; those of an earlier run give their parameters back first."""
        for engine in inf.offloaded_modules(self.lightning_module):
            before = _FITTED.get(engine)
            if before is not None:
                before._reset_optimizers_and_schedulers()
                # Optimizers and their schedulers refer to each other.
                gc.collect()
            _FITTED[engine] = self
        super().setup_optimizers(trainer)
        _check_optimizers(self.lightning_module, self.optimizers, "configure_optimizers returned")

    def model_to_device(self) -> None:
        """Move what is not offloaded, such as metrics."""
        self.lightning_module.to(self.root_device)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Enter the context in which modules are built: in CPU memory, for they may not fit the
        device; on the meta device with `empty_init`, for `inf.offload(..., load=)`.
        """
        device = torch.device("meta") if empty_init else contextlib.nullcontext()
        with device, self.precision_plugin.tensor_init_context():
            yield

    def block_backward_sync(self) -> contextlib.ExitStack:
        """Return the context of micro-batches that are not the last of a step."""
        return _no_sync(self.lightning_module)

    # -- checkpoints -------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of what is not offloaded. The rest goes to files of its own."""
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
        """Read what the trainer keeps, of a checkpoint of this strategy or of another."""
        self._source = _source(checkpoint_path)
        path = self._source / _TRAINER_FILE if self._source is not None else checkpoint_path
        found: dict[str, Any] = super().load_checkpoint(path, weights_only=weights_only)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Set the module's values and, when fitting, the states of its optimizers. The trainer
        calls this before `setup`, where it tells `load_checkpoint` of its `weights_only`: what goes
        into an engine waits for one.
        """
        if self._source is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif self._is_set_up:
            self._read_states(checkpoint["state_dict"], strict)
        else:
            self._waiting = checkpoint["state_dict"], strict

    def _read_states(self, plain: Mapping[str, Any], strict: bool) -> None:
        """Read the checkpoint `_source`. plain: what it has of modules that are not offloaded."""
        assert self._source is not None
        module = self.lightning_module
        _load_plain(module, plain, strict=strict)
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        _read_engines(module, self.optimizers if fitting else [], self._source)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, or a link to one."""
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
        """End the run, and leave the module where it is: offloaded, and open."""
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


# The strategy that fitted a module last. Its optimizers hold the parameters.
_FITTED: weakref.WeakKeyDictionary[torch.nn.Module, InfinityStrategy] = (
    weakref.WeakKeyDictionary()
)


class FabricInfinityStrategy(fabric_strategies.DDPStrategy):
    """Strategy of Fabric for offloaded modules, on one process or several.

    Either offload the module after `fabric.launch()`, build `inf.AdamW` on it, and give both to
    `fabric.setup`; or give a plain module to `fabric.setup_module`, which offloads it with `policy`
    (`inf.Policy()` for None), and then the optimizer to `fabric.setup_optimizers`. settings: of
    DDPStrategy, as InfinityStrategy takes them.

    `fabric.save` and `load` take a directory. A module in the state is saved with the optimizers
    that were set up for it; a module that is loaded without its optimizer gets its values alone.

    Raises: ValueError naming a setting that it does not take.
    """

    def __init__(self, policy: inf.Policy | None = None, **settings: Any) -> None:
        _check_settings(type(self).__name__, settings, (*_SETTINGS, "precision"))
        super().__init__(**settings)
        self._policy = policy
        self._backward_sync_control = _BackwardSync()
        # In the order of their set-up, which is the same on all ranks. Weak: an optimizer that its
        # user drops gives its parameters back.
        self._optimizers: list[weakref.ref[Any]] = []
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    # -- set-up ------------------------------------------------------------------------------------

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Offload the module, unless it was."""
        module.zero_grad()
        module = _prepare(module, self._policy, self.precision, self.root_device, self.world_size)
        self._modules.append(weakref.ref(module))
        return _Entrance(module.to(self.root_device))

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[torch.nn.Module, list[Any], Any]:
        """Take an offloaded module with its optimizers. Raises: ValueError for one that is not:
        offloading replaces the parameters which the optimizers hold.
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
        """Note an optimizer, whose states are saved with its module's."""
        for module in _alive(self._modules):
            _check_optimizers(module, [optimizer], "Fabric got")
        if engine_optimizer(optimizer) is not None:
            self._optimizers.append(weakref.ref(engine_optimizer(optimizer)))
        return optimizer

    def module_to_device(self, module: torch.nn.Module) -> None:
        """Move a module, unless `setup_module` is going to offload it."""
        if inf.offloaded_modules(module) or next(module.parameters(), None) is None:
            module.to(self.root_device)

    def module_init_context(self, empty_init: bool | None = None) -> contextlib.ExitStack:
        """Return the context in which modules are built: in CPU memory, for they may not fit the
        device; on the meta device with `empty_init`, for `inf.offload(..., load=)`.
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
        """Set what is in `state` from a checkpoint; return the rest."""
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
        # Modules first: the optimizers' manifests are compared with what these hold then.
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
    """`fabric.no_backward_sync` of offloaded modules."""

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager[object]:
        """Return the context of micro-batches that are not the last of a step."""
        return _no_sync(module) if enabled else contextlib.nullcontext()


# -- modules ---------------------------------------------------------------------------------------


class _Entrance(torch.nn.Module):
    """A module behind which the strategy's trainer runs `training_step` and its likes as the
    `forward` of `module`: inside of a forward all parameters can be used, in any order.
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
    """Return the module, offloaded as a whole unless it has an offloaded module in it.

    Raises: ValueError if it is not offloaded for this device, precision and number of ranks.
    """
    engines = inf.offloaded_modules(module)
    manual = not getattr(module, "automatic_optimization", True)
    if manual and (not engines or engines[0] is module):
        raise ValueError(
            f"{type(module).__name__} optimizes by hand: its training_step takes optimizer steps, "
            "for which no forward of an offloaded module may be under way; so call "
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
    """Return the module as the precision plugin wants it. Raises: ValueError if that would convert
    offloaded parameters.
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
            f"{world}: offload it in configure_model, where the ranks have met, or leave it to "
            "InfinityStrategy(policy)"
        )
    for name, param in engine.named_parameters():
        if param.device != device:
            raise ValueError(
                f"{name} was offloaded for {param.device}, and the trainer computes on {device}: "
                "give inf.Policy(device=self.device) in configure_model, or leave inf.offload to "
                "the strategy"
            )


def _check_reduced(module: torch.nn.Module, engines: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError for trainable parameters which are not offloaded, on several ranks."""
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
    """Return the entries of the state dict that no engine saves: of all that is outside of the
    offloaded modules, and of modules such as metrics in them, which keep states of their own.
    """
    engines = {id(engine) for engine in inf.offloaded_modules(module)}
    found: dict[str, Any] = {}

    def visit(child: torch.nn.Module, prefix: str, inside: bool) -> None:
        inside = inside or id(child) in engines
        saved = child.parameters() if inside else inf.offloaded_modules(child)
        if next(iter(saved), None) is None:
            # An engine saves the buffers of its module, wherever they are in it.
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
    """Set what `_plain_state` returned. Raises: ValueError naming keys that differ (strict)."""
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
    # The directory is about to get another name.
    if not path.is_file():
        raise ValueError(
            f"{type(checkpoint_io).__name__} had not written {path.name} when it returned: "
            "strategy='infinity' wants a checkpoint_io that writes at once"
        )


def _write_engines(
    module: torch.nn.Module, optimizers: Iterable[Any] | None, directory: Path
) -> None:
    """Save all engines in `module`; without optimizers (None) their values alone."""
    for index, engine in enumerate(inf.offloaded_modules(module)):
        if optimizers is None:
            inf.export_safetensors(engine, directory / _WEIGHTS / str(index), names="modules")
        else:
            held = optimizers_of(engine, optimizers) or None
            inf.save(engine, held, directory / STATES / str(index)).wait()


def _read_engines(module: torch.nn.Module, optimizers: Iterable[Any], directory: Path) -> None:
    """Restore all engines in `module`; without optimizers their values alone.

    Raises: ValueError for a checkpoint of another number of offloaded modules.
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
    """Have all ranks write a directory, which takes the place of `path` when it is whole."""
    # A trainer that looks for its last checkpoint, by a part of its name, must not find these.
    tag = hashlib.sha256(path.name.encode()).hexdigest()[:16]
    partial, replaced = path.with_name(f".{tag}.partial"), path.with_name(f".{tag}.replaced")
    if strategy.is_global_zero:
        _remove(partial)  # of a run that broke off
        partial.mkdir(parents=True)
    strategy.barrier()
    try:
        write(partial)
    except BaseException:
        # Other checkpoints have other names: it would never be removed, and may fill the drive.
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
    """Return the directory if this is a checkpoint of ours, or None (a file of another strategy).
    Raises: ValueError for another directory.
    """
    source = Path(path)
    if (source / _TRAINER_FILE).is_file():
        return source
    if source.is_dir():
        raise ValueError(
            f"{path} is no checkpoint of strategy='infinity': it has no {_TRAINER_FILE}; give one "
            "that it wrote, or a checkpoint file"
        )
    return None


# -- what cannot work ------------------------------------------------------------------------------


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
    """Raise ValueError for an optimizer of torch that holds offloaded parameters."""
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
