"""How a call into user code ends without a result; each name says whose fault it was and whether to try again."""


class PoolError(Exception):
    """Base of all of them; the message is half a sentence for the user."""

    reason = "lost"
    """One word for counters and tables."""


class WorkerTimeout(PoolError):
    """This call ran past its deadline; its process was killed."""

    reason = "timeout"


class WorkerKilled(PoolError):
    """The process ended because of something else while this call waited: safe to retry, but the instance is gone."""


class NoWorker(PoolError):
    """The system refused to start a process."""


class WorkerDied(PoolError):
    """The process ended while this call ran, and the call is to blame.

    `reason`: it `exited` by itself or `crashed`, of a signal; user code closed the worker's socket or wrote to it (`broke_channel`),
    printed more than `WorkerLimits.max_output_bytes` during one call (`too_much_output`), or returned and left processes running
    that nothing waits for (`left_processes`).
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text)
        self.reason = reason


class UserCodeRaised(PoolError):
    """User code raised: `kind` is the exception's type, `text` its repr, `where` the last frame as `file:line in function`."""

    def __init__(self, kind: str, text: str, where: str) -> None:
        super().__init__(text)
        self.reason = "memory" if kind == "MemoryError" else "raised"
        self.kind = kind
        self.text = text
        self.where = where

    @property
    def at_limit(self) -> bool:
        """Whether it may have met a limit of its process: what filled that is still there, so the process is replaced."""
        return self.kind in ("MemoryError", "BlockingIOError") or "can't start new thread" in self.text


class BadResult(PoolError):
    """The result can't be sent back: not representable, or `too_large`, beyond `WorkerLimits.max_reply_bytes`."""

    def __init__(self, text: str, reason: str = "wrong_type") -> None:
        super().__init__(text)
        self.reason = reason


class TargetMissing(PoolError):
    """The import path of the user code leads nowhere; the message is a whole sentence."""

    reason = "missing"
