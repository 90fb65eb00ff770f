"""What the store refuses, and how it says that it can't be reached."""

from runtime.errors import RubatoError


class StoreError(RubatoError):
    """Base of every error of the store."""


class Fenced(StoreError):
    """The writer's fence is older than one already seen: it was replaced and must stop. Nothing was changed."""


class Forgotten(StoreError):
    """The store no longer has the write before this one: it came back without its newest writes. Nothing was changed."""


class StoreUnavailable(StoreError):
    """The backend could not be reached within the retry budget, or refused the password; names the URL and what to do."""


class StoreFull(StoreUnavailable):
    """The backend answers, but has no room for a change: memory or disk. Nothing was changed; it is worth trying again, for as long as it takes."""


def fenced(name: str, token: int, newest: int) -> Fenced:
    """The same sentence from every implementation, as for those below."""
    return Fenced(f"{name!r} writes with token {token}, but {newest} was seen: a newer one took over")


def forgotten(name: str, token: int, number: int) -> Forgotten:
    return Forgotten(f"{name!r} makes write {number} with token {token}, but the store lost the one before it")


def not_a_number(key: str) -> ValueError:
    return ValueError(f"key {key!r} holds something else than an integer")
