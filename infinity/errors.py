"""The errors that infinity raises.

A user's mistake is a `ValueError` that names the value and the fix. An I/O fault is an `AioError`
with path, offset, length, operation and errno. `assert` is only for bugs of infinity.
"""

from __future__ import annotations

import dataclasses
import os


class InfinityError(Exception):
    """Base class of infinity's errors."""


class ParameterReleased(InfinityError, RuntimeError):
    """A parameter was accessed while its values are offloaded.

    The message names the parameter, its tier, and the call that gathers it.
    """


class ReplacedOutsideEngine(InfinityError, RuntimeError):
    """A module's parameter was replaced after the engine had set it."""


class WeightWritten(InfinityError, RuntimeError):
    """Forward wrote to an offloaded parameter: the write is lost. The message names the right
    call.
    """


class ReleasedInBackward(InfinityError, RuntimeError):
    """Backward reached a released parameter without a hook: a tensor has left a call undetected.
    The message names the parameter and the fix; the gradients of this backward are incomplete.
    """


class SecondOrderUnsupported(InfinityError, RuntimeError):
    """`create_graph=True`: the graph of a gradient would need released parameters."""


class GraphCaptureUnsupported(InfinityError, RuntimeError):
    """A gather or a copy during the capture of a CUDA graph, whose replay would use addresses that
    are no longer the parameters'.
    """


class NonFiniteGradient(InfinityError, RuntimeError):
    """`opt.step()` found a gradient with infinity or NaN; no state has changed."""


class BudgetError(InfinityError, ValueError):
    """The RAM budget is too small; the message states the smallest working budget and its uses.

    smallest_bytes: the smallest working budget.
    """

    def __init__(self, message: str, *, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class MemoryLimitError(InfinityError, MemoryError):
    """The plan and its overhead need more than the available memory of the machine or of a cgroup
    of this process, where the kernel would kill the process; or a matrix of `Muon` more than the
    device's. No memory was allocated.

    limit: its description. needed_bytes: of all ranks that share it. left_bytes: available bytes.
    """

    def __init__(self, message: str, *, limit: str, needed_bytes: int, left_bytes: int) -> None:
        super().__init__(message)
        self.limit = limit
        self.needed_bytes = needed_bytes
        self.left_bytes = left_bytes


class SlicesError(InfinityError, ValueError):
    """A model or a batch cannot run in slices (`inf.microbatched`); the message names the cause and
    the fix. A loop over micro-batches, without `inf.microbatched`, supports every model.
    """


class WeightsError(InfinityError, ValueError):
    """Weights to load do not fit the model, or their file is damaged.

    The message names the tensor, its file, its bytes and the fix. Nothing was loaded. path: the
    file or directory, or "". tensors: names of the wrong tensors, if any.
    """

    def __init__(self, message: str, *, path: str = "", tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.tensors = tensors


class EngineClosed(InfinityError, RuntimeError):
    """The model's engine was closed; its parameters can no longer be gathered."""


class StateInvalid(InfinityError, RuntimeError):
    """A fault left states of some parameters partly written; they must be loaded again before
    use.
    """


@dataclasses.dataclass(frozen=True)
class DamagedRange:
    """Elements [start, stop) of a parameter whose states could not be read.

    name: the parameter's, or "buffers" or "extra" of a checkpoint (no elements), which were wholly
    unreadable. path, offset, length: of the failed read. reason: its error. After
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
    """A drive cannot read the only copy of some states (with two generations, `Policy.damaged`).
    All other states are of the last commit. Every later call raises this error.

    damaged: the parameters, their elements, and the files.
    """

    def __init__(self, message: str, *, damaged: tuple[DamagedRange, ...]) -> None:
        super().__init__(message)
        self.damaged = damaged


class StepUndone(InfinityError, RuntimeError):
    """A fault in an optimizer update; with two generations its step was undone on all ranks, and
    training may continue.

    Its `__cause__` is this rank's fault, or a PeerFailed that names the ranks with a fault.
    """


class RankError(InfinityError, RuntimeError):
    """Base class of errors caused by another rank's failure: `PeerFailed`, `RankFailed`."""


class PeerFailed(RankError):
    """Another rank raised in a collective call, so this rank raises, too.

    The message has that rank's error. The ranks can still communicate, unlike after `RankFailed`,
    which ends the engine.
    """


class RankFailed(RankError):
    """A rank has died, failed, left, or does not arrive; collectives cannot continue.

    The engine has ended: every later call raises this error. Compare `PeerFailed`.

    rank: the failed rank, or None if unknown (may be this rank). ranks: all known failed ranks.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks = ranks or (() if rank is None else (rank,))


class RanksDiverged(RankFailed):
    """Ranks have reached different collectives: their programs use different units, another order,
    or different values.
    """


class ProcessGroupChanged(InfinityError, RuntimeError):
    """The size of torch.distributed's process group has changed since the model was offloaded: its
    ranks would train different models.
    """


class AioError(InfinityError, OSError):
    """An I/O operation failed.

    `op` is "read", "write", "fsync", "open", "allocate", "link", "rename" or "unlink"; offset and
    length are bytes in the file at `path`. chunk: the executor's id of the failed job's chunk; -1:
    none.
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
        # OSError only sets these in its two-argument form, which would also change the message.
        self.errno = errno
        self.path = path
        self.op = op
        self.offset = offset
        self.length = length
        self.chunk = chunk

    def __str__(self) -> str:
        return str(self.args[0])


class ShortTransferError(AioError):
    """A transfer moved fewer bytes than requested, even after it was resumed."""


class ChecksumError(AioError):
    """The bytes read do not match their checksum, even after a second read."""


class SwapFullError(AioError):
    """The swap directory has no space; the message says how many bytes are missing."""


class DeviceFailedError(AioError):
    """The drive returned a permanent error."""


class DriveLostError(DeviceFailedError):
    """A drive of the run is lost: it fails every request, or its file system is no longer mounted
    at its directory. The engine has ended: every later call raises this error.

    directory: the drive's directory in `Policy.nvme`; device: its name. step, source: of the last
    complete save elsewhere, or else of the last commit, with the directory for `inf.restore`; None
    and "" without either. `errno`, `path`, `op`, `offset`, `length`: of the failed request.
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
    """A driver call of the compute device failed: a copy, or pinning memory; the message has its
    code.
    """


class AioClosedError(AioError):
    """The executor was closed, or belongs to the parent of a forked process."""


class AioCancelledError(AioError):
    """`Ticket.cancel` cancelled the fetch before the drive had begun it."""
