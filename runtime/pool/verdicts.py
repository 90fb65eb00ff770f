"""Names how a call failed: from what its worker replied, or from how its process ended."""

import signal

import msgspec

from runtime.pool import worker as pool_worker
from runtime.pool.errors import (
    BadResult,
    ChannelBroken,
    LeftProcesses,
    OutOfMemory,
    PoolError,
    ResultTooLarge,
    TargetMissing,
    UserCodeRaised,
    WorkerCrashed,
    WorkerDied,
    WorkerExited,
)


def error_of(outcome: int, payload: bytes) -> PoolError:
    """Of a reply that is not DONE. Raises msgspec.MsgspecError or UnicodeDecodeError for garbage."""
    if outcome == pool_worker.RAISED:
        kind, text, where = msgspec.msgpack.decode(payload, type=tuple[str, str, str])
        return (OutOfMemory if kind == "MemoryError" else UserCodeRaised)(kind, text, where)
    kinds = {
        pool_worker.MISSING: TargetMissing,
        pool_worker.TOO_LARGE: ResultTooLarge,
        pool_worker.LEFT: LeftProcesses,
    }
    return kinds.get(outcome, BadResult)(payload.decode())


def ending(code: int, *, cut: bool) -> WorkerDied:
    """Why a process ended by itself; `cut`: it lost its socket first, and may have been ended for that."""
    if cut and code in (-signal.SIGTERM, -signal.SIGKILL):
        return ChannelBroken("closed its worker's own socket")
    if code >= 0:
        return WorkerExited(f"its process ended with exit code {code}")
    try:
        return WorkerCrashed(f"its process died of {signal.Signals(-code).name}")
    except ValueError:
        return WorkerCrashed(f"its process died of signal {-code}")
