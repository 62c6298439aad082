"""The errors that infinity raises, in one place.

A user's mistake is a `ValueError` that names the value and the fix. An operating fault is an
`AioError` that carries path, offset, length, operation and errno. `assert` is left for our own
bugs.
"""

from __future__ import annotations

import dataclasses
import os


class InfinityError(Exception):
    """Base class of everything that infinity raises on purpose."""


class ParameterReleased(InfinityError, RuntimeError):
    """A parameter was touched while its values rest elsewhere.

    The message names the parameter, the tier it rests on, and the call that gathers it.
    """


class ReplacedOutsideEngine(InfinityError, RuntimeError):
    """A module's parameter slot no longer holds the parameter that the engine put there."""


class WeightWritten(InfinityError, RuntimeError):
    """Forward wrote to an offloaded parameter: the write is lost, and the message says where it
    belongs."""


class ReleasedInBackward(InfinityError, RuntimeError):
    """Backward came to a released parameter past all hooks: a tensor has left a call unseen. The
    message names the parameter and what to do; the gradients of this backward are incomplete."""


class SecondOrderUnsupported(InfinityError, RuntimeError):
    """`create_graph=True`: the graph of a gradient would need parameters that are released by then.
    """


class GraphCaptureUnsupported(InfinityError, RuntimeError):
    """A gather or a copy while a CUDA graph is captured: the graph would replay addresses that
    parameters have left by then."""


class NonFiniteGradient(InfinityError, RuntimeError):
    """`opt.step()` met a gradient that is not finite; no state was touched."""


class BudgetError(InfinityError, ValueError):
    """The RAM budget is too small; the message states the smallest that works and what takes it.

    smallest_bytes: that budget.
    """

    def __init__(self, message: str, *, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class MemoryLimitError(InfinityError, MemoryError):
    """The machine, or a cgroup of this process, leaves less memory than the plan and what lies
    beside it need; the kernel would end the process. Nothing was taken.

    limit: which, in words. needed_bytes: of all ranks that share it. left_bytes: what it leaves.
    """

    def __init__(self, message: str, *, limit: str, needed_bytes: int, left_bytes: int) -> None:
        super().__init__(message)
        self.limit = limit
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes


class SlicesError(InfinityError, ValueError):
    """A model or a batch cannot run in slices (`inf.microbatched`); the message names what stands
    in the way, and the fix. A loop over micro-batches, without it, takes any model."""


class WeightsError(InfinityError, ValueError):
    """Weights that should be loaded do not fit the model, or their file is damaged.

    The message names the tensor, its file, its bytes and the fix. Nothing was loaded. path: the
    file or directory, if there is one. tensors: their names, where some are to blame.
    """

    def __init__(self, message: str, *, path: str = "", tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.tensors = tensors


class EngineClosed(InfinityError, RuntimeError):
    """The model's engine was closed; its parameters can no longer be gathered."""


class StateInvalid(InfinityError, RuntimeError):
    """A fault left states of some parameters half written; they must be loaded again before use."""


@dataclasses.dataclass(frozen=True)
class DamagedRange:
    """Elements [start, stop) of a parameter whose states could not be read.

    name: the parameter's, or "buffers" or "extra" of a checkpoint (no elements), of which none
    could be read. path, offset, length: of the read that failed. reason: its error. After
    `inf.restore(damaged=)` the range has the values and moments that the model had, or those of the
    older commit whose step `reason` says (damaged="from-older").
    """

    name: str
    start: int
    stop: int
    path: str
    offset: int
    length: int
    reason: str


class StatesLost(StateInvalid):
    """A drive can no longer give back states that nothing else has; with two generations
    (`Policy.damaged`). All others are those of the last commit. Every later call raises it.

    damaged: the parameters, their elements, and the files.
    """

    def __init__(self, message: str, *, damaged: tuple[DamagedRange, ...]) -> None:
        super().__init__(message)
        self.damaged = damaged


class StepUndone(InfinityError, RuntimeError):
    """A fault in an optimizer update; with two generations its step was undone, on several ranks on
    all of them, and training may go on.

    Its cause is the fault of this rank, or a PeerFailed that says which ranks had one.
    """


class RankError(InfinityError, RuntimeError):
    """Base class of the errors that the failure of another rank causes: `PeerFailed`, `RankFailed`.
    """


class PeerFailed(RankError):
    """Another rank raised in a call that all ranks make together, and so does this one.

    The error of that rank says why. The ranks still answer each other. Compare `RankFailed`, after
    which they do not, and the engine is over.
    """


class RankFailed(RankError):
    """A rank has died, failed, left, or does not come; collectives cannot go on.

    The engine is over: every later call raises this error. Compare `PeerFailed`.

    rank: the one that failed, where it is known (this rank's own number, if it is this one).
    ranks: all that are known, where several do not come.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks = ranks or (() if rank is None else (rank,))


class RanksDiverged(RankFailed):
    """Ranks have come to different collectives: their programs use other units, in another order,
    or step with other values."""


class ProcessGroupChanged(InfinityError, RuntimeError):
    """torch.distributed has a process group of another size than when the model was offloaded: its
    ranks would train models that differ."""


class AioError(InfinityError, OSError):
    """An I/O operation failed.

    `op` is "read", "write", "open", "allocate" or "close"; offset and length are bytes in the file
    at `path`. chunk: the executor's id of the chunk whose job failed; -1: of no job.
    """

    def __init__(
        self,
        message: str,
        *,
        errno: int = 0,
        path: str = "",
        op: str = "",
        offset: int = 0,
        length: int = 0,
        chunk: int = -1,
    ) -> None:
        transfer = f"{op} of {length} bytes at offset {offset}" if length else op
        where = f"{transfer} of {path}" if path else op
        cause = f" [errno {errno}: {os.strerror(errno)}]" if errno else ""
        text = f"{message}: {where}{cause}" if where else f"{message}{cause}"
        super().__init__(text)
        # OSError fills these only from its two-argument form, which would also rewrite the message.
        self.errno = errno
        self.path = path
        self.op = op
        self.offset = offset
        self.length = length
        self.chunk = chunk

    def __str__(self) -> str:
        return str(self.args[0])


class ShortTransferError(AioError):
    """A transfer moved fewer bytes than asked, also after it was resumed."""


class ChecksumError(AioError):
    """Bytes read differ from bytes written, also after one more read."""


class SwapFullError(AioError):
    """The swap path has no room; the message says how much is missing."""


class DeviceFailedError(AioError):
    """The drive returned an error that a retry does not mend."""


class DriveLostError(DeviceFailedError):
    """A drive of the run is gone: it fails every request, or its file system is not where it was.
    The engine is over: every later call raises this error.

    directory: the drive's, of `Policy.nvme`, and device: its name. step, source: the last whole
    save elsewhere, or else the last commit, and the directory that `inf.restore` takes; None and ""
    where there is neither. `errno`, `path`, `op`, `offset`, `length`: the request that met it.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: AioError,
        directory: str,
        device: str,
        step: int | None,
        source: str,
    ) -> None:
        super().__init__(
            message,
            errno=cause.errno or 0,
            path=cause.path,
            op=cause.op,
            offset=cause.offset,
            length=cause.length,
        )
        self.directory = directory
        self.device = device
        self.step = step
        self.source = source


class DeviceCopyError(AioError):
    """The driver of the device that computes refused or failed a copy, or pinning memory for
    copies; the message has its code."""


class AioClosedError(AioError):
    """The executor was closed, or belongs to the parent of a forked process."""


class AioCancelledError(AioError):
    """The fetch was given up (`Ticket.cancel`) before the drive had begun it."""
