"""How a call into user code ends without a result; each name says whose fault it was and whether to try again."""


class PoolError(Exception):
    """Base of all of them; the message is half a sentence for the user."""


class WorkerTimeout(PoolError):
    """This call ran past its deadline; its process was killed."""


class WorkerKilled(PoolError):
    """The process ended because of something else while this call waited: safe to retry, but the instance is gone."""


class WorkerDied(PoolError):
    """The process ended by itself while this call ran."""


class UserCodeRaised(PoolError):
    """User code raised: `kind` is the exception's type, `text` its repr, `where` the last frame as `file:line in function`."""

    def __init__(self, kind: str, text: str, where: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text
        self.where = where


class BadResult(PoolError):
    """The result can't be sent back: too large, or not representable."""


class TargetMissing(PoolError):
    """The import path of the user code leads nowhere; the message is a whole sentence."""
