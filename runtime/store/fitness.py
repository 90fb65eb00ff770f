"""Whether a run can use a server of the user's, and what may lose samples there: asked once, at launch."""

from collections.abc import Iterable
from urllib.parse import parse_qsl, urlsplit

from redis.exceptions import RedisError

from rubato.runtime.config.sections import StateSection
from rubato.runtime.errors import LaunchError
from rubato.runtime.store.redis import MIN_REPLICAS, PATIENCE_S, SENTINELS, Figures, RedisStore, checked
from rubato.runtime.store.refusals import IS_CLUSTER
from rubato.runtime.store.store import StoreError, StoreUnavailable

CONTACT_S = 3.0
"""For the first contact: a wrong address is told then."""

KEEP_BOTH = "min-replicas-to-write 1, and on its replicas too"


def problems(state: StateSection) -> Iterable[str]:
    """What shows in the config alone, a sentence each."""
    if state.url and (flaw := flaw_of_url(state.url)):
        yield flaw
    if state.durability == "replicated" and not state.url:
        yield "state.durability=replicated needs a server with a replica. Set state.url too, or take always."
    if state.durability == "always" and state.fails_over:
        yield "state.durability=always holds for one server, and a failover may lose writes. Take replicated or everysec."


def flaw_of_url(url: str) -> str:
    """What is wrong with the form of `state.url`, in a sentence without secrets; empty where it can be used."""
    try:
        checked(url)
    except StoreError as error:
        return str(error)
    if url.startswith(SENTINELS):
        return ""
    from rubato.runtime.store.sentinel import CERT_REQS, TLS_OPTIONS

    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = {"redis": {"db"}, "rediss": {"db", *TLS_OPTIONS}, "unix": {"db", "username", "password"}}[parts.scheme]
    if wrong := sorted(given.keys() - known):
        return f"state.url has the option {wrong[0]}. With {parts.scheme}:// there are {', '.join(sorted(known))}."
    path = "" if parts.scheme == "unix" else parts.path.strip("/")
    if not all(each == "" or (each.isascii() and each.isdecimal()) for each in (path, given.get("db", "0"))):
        return f"state.url names a database that is no number. Write {parts.scheme}://HOST:PORT/0, or leave it out."
    if given.get("ssl_cert_reqs", "none") not in CERT_REQS:
        return f"state.url has an ssl_cert_reqs that there is not. It is one of {', '.join(CERT_REQS)}."
    return ""


async def examine(url: str, run_id: str, state: StateSection) -> list[str]:
    """What may lose samples on the server at `url`, a sentence each. Raises LaunchError where a run can't use it."""
    store = RedisStore(url, run_id, patience_s=CONTACT_S)
    try:
        figures = await store.figures()
        if said := refusal(figures, state):
            raise LaunchError(said)
        await store.get("config")
        return [*concerns(figures, state), *(await late(url) if state.fails_over else [])]
    except StoreUnavailable as error:
        raise LaunchError(str(error)) from error
    finally:
        await store.close()


def failed_over(state: StateSection, before: str, now: str) -> str:
    """What the user is told of it."""
    lost = "What it had acknowledged is there"
    if state.durability != "replicated":
        lost = f"With state.durability={state.durability} what it acknowledged just before may be lost; samples found missing run again"
    return f"the Store failed over from {before} to {now}. {lost}"


def refusal(figures: Figures, state: StateSection) -> str:
    """Why not, in a sentence; empty where it can. `figures` are the server's, which `state.url` names."""
    if figures.get("cluster_enabled") == 1:
        return IS_CLUSTER
    if state.durability != "replicated":
        return ""
    if MIN_REPLICAS not in figures:
        return (
            "state.durability=replicated needs a master that takes no writes once it is cut off from its replicas, and state.url names one "
            f"that does. Set there: {KEEP_BOTH}."
        )
    if not figures[MIN_REPLICAS]:
        return "state.durability=replicated needs a replica, and the server that state.url names has none. Start one, or take everysec."
    return ""


def concerns(figures: Figures, state: StateSection) -> list[str]:
    """What may lose samples there, a sentence each."""
    found: list[str] = []
    if figures.get("aof_enabled") == 0:
        found.append(
            "state.url names a server that keeps no append-only file: where it restarts, the run loses what was written since its "
            "last snapshot. Set there: appendonly yes"
        )
    policy = figures.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        found.append(
            f"state.url names a server that may throw away what the run wrote once its memory is full (maxmemory-policy {policy}). "
            "Set there: maxmemory-policy noeviction"
        )
    if state.fails_over and state.durability != "replicated" and MIN_REPLICAS not in figures:
        found.append(
            "state.url names a master that goes on taking writes while it is cut off from its replicas: a failover loses them all. "
            f"Set there: {KEEP_BOTH}"
        )
    return found


async def late(url: str) -> list[str]:
    """A sentence where the sentinels notice a dead master only after calls have given up."""
    from rubato.runtime.store.sentinel import Sentinels, parse

    sentinels = Sentinels(where := parse(url))
    try:
        await sentinels.discover_master(where.service)
    except RedisError:  # none of them answers any more: nothing is known of how they are set
        return []
    after_s = sentinels.newest["down-after-milliseconds"] / 1000
    if after_s < PATIENCE_S / 2:
        return []
    return [
        f"the sentinels take {after_s:.0f} s to see that a master is gone, and calls of the run last {PATIENCE_S:.0f} s: its actors would be "
        f"restarted. Set there: SENTINEL SET {where.service} down-after-milliseconds 5000"
    ]
