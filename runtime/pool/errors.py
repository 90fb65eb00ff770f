"""How a call into user code ends without a result; each name says whose fault it was and whether to try again."""

from typing import ClassVar


class PoolError(Exception):
    """Base of all of them; the message is half a sentence for the user."""

    reason: ClassVar[str] = "lost"
    """One word for counters and tables."""


class WorkerTimeout(PoolError):
    """This call ran past its deadline; its process was killed."""

    reason = "timeout"


class WorkerKilled(PoolError):
    """The process ended because of something else while this call waited: safe to retry, but the instance is gone."""


class NoWorker(PoolError):
    """The system refused to start a process."""


class WorkerDied(PoolError):
    """The process ended while this call ran, and the call is to blame."""


class WorkerExited(WorkerDied):
    """It left by itself, with an exit code."""

    reason = "exited"


class WorkerCrashed(WorkerDied):
    """It died of a signal."""

    reason = "crashed"


class ChannelBroken(WorkerDied):
    """User code closed the socket of its worker, or wrote to it."""

    reason = "broke_channel"


class OutputFlood(WorkerDied):
    """It printed more than `Limits.max_output_bytes` during one call."""

    reason = "too_much_output"


class LeftProcesses(WorkerDied):
    """The function returned and left processes running that nothing waits for."""

    reason = "left_processes"


class UserCodeRaised(PoolError):
    """User code raised: `kind` is the exception's type, `text` its repr, `where` the last frame as `file:line in function`."""

    reason = "raised"

    def __init__(self, kind: str, text: str, where: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.where = where

    @property
    def at_limit(self) -> bool:
        """Whether it may have met a limit of its process: what filled that is still there, so the process is replaced."""
        return self.kind in ("MemoryError", "BlockingIOError") or "can't start new thread" in self.text


class OutOfMemory(UserCodeRaised):
    """It raised MemoryError: `Limits.memory_mb`."""

    reason = "memory"


class BadResult(PoolError):
    """The result can't be sent back: not representable."""

    reason = "wrong_type"


class ResultTooLarge(BadResult):
    """The result has more than `Limits.max_reply_bytes`."""

    reason = "too_large"


class TargetMissing(PoolError):
    """The import path of the user code leads nowhere; the message is a whole sentence."""

    reason = "missing"
