"""What a run leaves behind: the hash of everything that happened, and, where asked for, the log of it."""

import hashlib
from collections.abc import Callable
from typing import Any

from rubato.bus.link import Frame


class Record:
    """The trace hash covers every frame that landed, every link's end, every call the store carried out and every answer to an agent."""

    def __init__(self, now: Callable[[], float], *, keep: bool) -> None:
        self.now = now
        self.keep = keep
        self.lines: list[str] = []
        self._digest = hashlib.blake2b(digest_size=8)
        self.num_events = 0

    def frame(self, sender: str, receiver: str, what: Frame | str) -> None:
        self.num_events += 1
        head = f"{self.now():.6f}{sender}>{receiver}"
        self._digest.update(head.encode())
        self._digest.update(what.encode() if isinstance(what, str) else what.data)
        if self.keep and isinstance(what, str):
            self.say(f"{sender} -> {receiver}: link ends: {what}")

    def call(self, process: str, method: str, args: tuple[Any, ...]) -> None:
        self.num_events += 1
        named = args[: {"lease": 2, "append": 1}.get(method, len(args))]  # an actor's record holds a process id
        self._digest.update(f"{self.now():.6f}{process}.{method}{named!r}".encode())
        if self.keep and method.startswith("samples."):
            self.say(f"store: {process}.{method}{args!r:.160}")

    def asked(self, agent: str, what: str, answer: str) -> None:
        """An agent's request is over."""
        self.num_events += 1
        self._digest.update(f"{self.now():.6f}{agent} {what}: {answer}".encode())
        if self.keep:
            self.say(f"{agent}: {what}: {answer}")

    def say(self, text: str) -> None:
        if self.keep:
            self.lines.append(f"{self.now():10.4f} {text}")

    @property
    def hash(self) -> str:
        return self._digest.hexdigest()


class Log:
    """Stands for structlog's logger: keeps lines where the record does, and tells of handlers that broke."""

    def __init__(self, record: Record, name: str, broke: Callable[[str], None]) -> None:
        self._record, self._name, self._broke = record, name, broke

    def bind(self, **_: Any) -> "Log":
        return self

    def debug(self, event: str, **fields: Any) -> None:
        """Left out."""

    def info(self, event: str, **fields: Any) -> None:
        if self._record.keep:
            self._record.say(f"{self._name}: {event} {_shown(fields)}")

    def error(self, event: str, **fields: Any) -> None:
        self.info(event, **fields)
        if event in ("handler_failed", "rollout_crashed"):
            self._broke(f"{event} {_shown(fields)}")

    warning = info
    exception = error


def _shown(fields: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in fields.items() if key != "exc_info")
