"""What can go wrong between two processes; each error says which outcome the caller may assume."""


class BusError(Exception):
    """Base of every error that crosses the bus."""


class BadAddress(BusError):
    """An address is malformed, taken, or not allowed; nothing was bound or connected."""


class BadKeys(BusError):
    """Keys are damaged, or this machine can't use them; nothing was bound or connected."""


class BadFrame(BusError):
    """A frame, envelope, body or array failed its checks; nothing was allocated for it and nothing ran."""


class LinkRefused(BusError):
    """The peer may not speak on this link (another run, another protocol, no HELLO); the link ends. `kind` is for counting."""

    def __init__(self, sentence: str, kind: str = "greeting") -> None:
        super().__init__(sentence)
        self.kind = kind


class AskFailed(BusError):
    """Base of the ways an ask ends without a reply; `ran` says whether the handler may have run."""

    ran: bool | None = None


class NotSent(AskFailed):
    """The request never left this process (no such actor, no credit before the deadline): safe to retry."""

    ran = False


class Refused(AskFailed):
    """The receiver declined before running the handler (wrong incarnation, no such actor, full, expired): safe to retry elsewhere."""

    ran = False


class Failed(AskFailed):
    """The handler ran and raised; the message carries its error. Retrying will most likely fail again."""

    ran = True


class Unknown(AskFailed):
    """The link was lost or the deadline passed after sending: it may have run. Only idempotent requests are retried."""

    ran = None
