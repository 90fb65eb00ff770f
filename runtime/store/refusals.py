"""What is said of a server that can't be used, or takes no more writes: the one sentence for it, wherever it is noticed."""

from collections.abc import Sequence

from redis.exceptions import NoPermissionError

from rubato.runtime.store.redis import Figures

NEARLY = 0.99
"""Of its memory: a server that refuses writes stays just below its limit as often as above it."""

WANTS = {
    "OOM": ("has used all memory it may (maxmemory)", "Give it more"),
    "MISCONF": ("could not write to its disk", "Free space there"),
    "NOREPLICAS": ("has no replica that takes its writes", "Start one"),
}


IS_CLUSTER = (
    "state.url names a Redis Cluster, which a run does not use: its state is one slot, and fails over by Sentinel. "
    "Name a single server, or redis+sentinel://HOST:PORT/SERVICE."
)


def scheme(url: str, schemes: Sequence[str]) -> str:
    """It is none of `schemes`. No more of the URL is said: it may hold a password."""
    given, found, _ = url.partition("://")
    if given == "redis+cluster":
        return IS_CLUSTER
    said = f"starts with {given}://" if found else "names no protocol"
    return f"state.url {said}; write one of {', '.join(schemes)} and the server's address."


def refused(url: str, error: Exception) -> str:
    """The user or its password is not taken."""
    if isinstance(error, NoPermissionError):
        return f"{url} does not allow its user a command: {error}. Give the user the rights in docs/security.md."
    return f"{url} refused the password. Set state.url with one, or leave state.url out to use the embedded server."


def away(url: str, seconds: float, error: Exception) -> str:
    """All attempts of `seconds` met `error`."""
    return (
        f"{url} could not be reached for {seconds:.0f} s ({error or type(error).__name__}). "
        "Start that server or correct state.url, or leave state.url out to use the embedded server."
    )


def stranger(url: str) -> str:
    """It speaks another protocol."""
    return f"{url} is taken by a server that is not Redis. Correct state.url, or leave it out to use the embedded server."


def out_of_room(url: str, want: str) -> str:
    """The sentence; `want` is how the server begins its refusal."""
    what, remedy = WANTS[want]
    return f"the Store at {url} {what} and refuses writes. The run pauses. {remedy}: the run goes on by itself"


def full(url: str, figures: Figures) -> str:
    """Why the server at `url` takes no more writes, in a sentence; empty while it does."""
    if figures.get("aof_last_write_status") == "err":
        return out_of_room(url, "MISCONF")
    most, used = figures.get("maxmemory"), figures.get("used_memory")
    if isinstance(most, int) and isinstance(used, int) and 0 < NEARLY * most <= used:
        return out_of_room(url, "OOM")
    return ""
