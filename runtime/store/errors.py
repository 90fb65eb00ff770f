"""What the store refuses, and how it says that it can't be reached."""

from runtime.errors import RubatoError


class StoreError(RubatoError):
    """Base of every error of the store."""


class Fenced(StoreError):
    """The writer's fence is older than one already seen: it was replaced and must stop. Nothing was changed."""


class StaleEpoch(StoreError):
    """A claim or commit came under an older epoch than the newest: another claimer took over. Nothing was changed."""


class OutOfOrder(StoreError):
    """A commit skipped a step, or a claim asked for a step that is committed already or skipped one. Nothing was changed."""


class StoreUnavailable(StoreError):
    """The backend could not be reached within the retry budget, or refused the password; names the URL and what to do."""


class StoreFull(StoreUnavailable):
    """The backend answers, but has no room for a change: memory or disk. Nothing was changed; it is worth trying again, for as long as it takes."""


def fenced(name: str, token: int, newest: int) -> Fenced:
    """The same sentence from every implementation, as for those below."""
    return Fenced(f"{name!r} writes with token {token}, but {newest} was seen: a newer one took over")


def stale_epoch(epoch: int, newest: int) -> StaleEpoch:
    return StaleEpoch(f"epoch {epoch} acts, but {newest} is the newest: another claimer took over")


def skipped(step: int, committed: int) -> OutOfOrder:
    return OutOfOrder(f"step {step} was committed, but {committed + 1} comes next")


def claimed_late(step: int, committed: int) -> OutOfOrder:
    return OutOfOrder(f"step {step} was claimed, but {committed} is committed already")


def claimed_early(step: int, committed: int) -> OutOfOrder:
    return OutOfOrder(
        f"step {step} was claimed, but step {step - 1} is not bound and {committed} is the last that is committed: "
        "the store forgot a claim, or the claimer one of its steps"
    )


def not_a_number(key: str) -> ValueError:
    return ValueError(f"key {key!r} holds something else than an integer")
