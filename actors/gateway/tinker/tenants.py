"""Who may ask, and the sessions of their clients."""

import asyncio
import secrets
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from rubato.actors.gateway.session import Refused
from rubato.actors.gateway.tinker.journal import Book
from rubato.runtime.errors import ConfigError

PREFIX = "tml-"
"""Of keys: the SDK takes no others."""

OWN_TENANT = "own"
"""The one whose key the run makes."""

MOST_KEYS_BYTES = 1024 * 1024

OVER_KEPT = 4096


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


class Tenants:
    """By their keys."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._tenants = {_digest(key): tenant for key, tenant in keys.items()}

    def by(self, key: str) -> str:
        """The tenant whose key it is. Raises Refused."""
        tenant = self._tenants.get(_digest(key))
        if tenant is None:
            raise Refused(401, "invalid_api_key", "the API key is none of this server's")
        return tenant


def read_keys(path: Path) -> dict[str, str]:
    """Tenant by key. Blocks; raises ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_KEYS_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"tinker.keys={path} can't be read: {why}.") from None
    if len(text) > MOST_KEYS_BYTES:
        raise ConfigError(f"tinker.keys={path} has more than {MOST_KEYS_BYTES:,} characters.")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not words[1].startswith(PREFIX) or len(words[1]) < len(PREFIX) + 16:
            raise ConfigError(f"tinker.keys={path}, line {number}: a line is TENANT KEY, and a key is {PREFIX} and 16 characters at least.")
        if words[1] in found:
            raise ConfigError(f"tinker.keys={path}, line {number}: the key is that of a line before.")
        found[words[1]] = words[0]
    if not found:
        raise ConfigError(f"tinker.keys={path} has no keys: a line is TENANT KEY.")
    return found


def _digest(key: str) -> bytes:
    """A table of digests tells by no time how much of a key is right."""
    return blake2b(key.encode(errors="replace"), digest_size=16).digest()


class Session(msgspec.Struct, frozen=True):
    """Of one client."""

    id: str
    tenant: str
    name: str = ""
    over: bool = False


class _Heard(NamedTuple):
    session: Session
    at: float


class Sessions:
    """Those that run, and when each was heard of last."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._loop = asyncio.get_running_loop()
        self._heard: dict[str, _Heard] = {}
        self._over: dict[str, str] = {}
        """Tenants of those that are over, by id."""

    def load(self) -> None:
        """What a server of before left. Blocks."""
        for each in self.book.read():
            self.close(each) if each.over else self.open(each)
        self.book.rewrite([*(heard.session for heard in self._heard.values()), *self._ended()])

    def _ended(self) -> list[Session]:
        return [Session(name, tenant, over=True) for name, tenant in self._over.items()]

    def open(self, session: Session) -> None:
        self._heard[session.id] = _Heard(session, self._now())

    def close(self, session: Session) -> None:
        self._heard.pop(session.id, None)
        self._over[session.id] = session.tenant
        while len(self._over) > OVER_KEPT:
            del self._over[next(iter(self._over))]

    def runs(self, name: str) -> bool:
        return name in self._heard

    def found(self, tenant: str, name: str) -> Session:
        """It is heard of now. Raises Refused."""
        heard = self._heard.get(name)
        if heard is None or heard.session.tenant != tenant:
            if self._over.get(name) == tenant:
                raise Refused(410, "session_over", f"the session {name[:128]} is over")
            raise Refused(404, "unknown_session", f"there is no session {name[:128]!r}")
        self._heard[name] = _Heard(heard.session, self._now())
        return heard.session

    def heard_of(self, name: str) -> None:
        """By a request of it."""
        if (heard := self._heard.get(name)) is not None:
            self._heard[name] = _Heard(heard.session, self._now())

    def silent(self, for_s: float) -> list[Session]:
        """Those that nothing was heard of for so long."""
        return [heard.session for heard in self._heard.values() if heard.at + for_s <= self._now()]

    def _now(self) -> float:
        return self._loop.time()
