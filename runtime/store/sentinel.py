"""Sentinels: where the master of a Redis that fails over is just now, and a client that follows it.

A sentinel that was cut off may still name the master of before. So a process takes no master from a configuration older than one that it has seen.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qsl, urlsplit

from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from rubato.bus.address import is_loopback
from rubato.runtime.store.redis import honour
from rubato.runtime.store.store import StoreError, StoreUnavailable

SCHEMES = ("redis+sentinel://", "rediss+sentinel://")

FORM = "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE"

SENTINEL_PORT = 26379

MAX_SENTINELS = 32

ANSWER_S = 3.0
"""A sentinel that is silent for so long is passed over."""

AGAIN_S = 1.0
"""Between two attempts to listen where no sentinel answers."""

SWITCHED = "+switch-master"
"""What sentinels publish once a replica has become the master."""

LINK: Mapping[str, Any] = {"protocol": 2, "socket_connect_timeout": ANSWER_S, "socket_timeout": None, "socket_keepalive": True}
"""Of a connection to a sentinel: `watch` waits on one for as long as it takes."""

OPTIONS = frozenset({"sentinel_username", "sentinel_password"})
TLS_OPTIONS = frozenset(
    {"ssl_keyfile", "ssl_certfile", "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_path", "ssl_check_hostname", "ssl_ciphers", "ssl_password"}
)
CERT_REQS = ("none", "optional", "required")
"""What may stand behind the `?`; what is of TLS with rediss+sentinel:// alone."""

Told = Callable[[str, str], None]
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]]


class SentinelUrl(NamedTuple):
    """`redis+sentinel://[user:password@]host[:port][,host[:port]…]/service[/db]`; user and password are the master's."""

    hosts: tuple[tuple[str, int], ...]
    service: str
    shown: str
    """The URL without secrets."""
    server: Mapping[str, Any]
    """How redis-py connects to the master."""
    sentinel: Mapping[str, Any]
    """How it connects to a sentinel."""


def parse(url: str) -> SentinelUrl:
    """Raises StoreError, in a sentence without secrets, for what is no such URL."""
    scheme, _, rest = url.partition("://")
    before, _, query = rest.partition("?")
    place, _, path = before.partition("/")
    user, at, names = place.rpartition("@")
    service, _, db = path.partition("/")
    hosts = tuple(_host(each) for each in names.split(","))
    if not service or len(hosts) > MAX_SENTINELS or (db and not db.isdecimal()):
        raise StoreError(f"state.url names no service, up to {MAX_SENTINELS} sentinels and a database's number. Write {FORM}.")
    given = dict(parse_qsl(query))
    tls = {"ssl": True} if scheme.startswith("rediss") else {}
    known = OPTIONS | TLS_OPTIONS if tls else OPTIONS
    if wrong := sorted(given.keys() - known):
        raise StoreError(f"state.url has the option {wrong[0]}. With {scheme}:// there are {', '.join(sorted(known))}.")
    if given.get("ssl_cert_reqs", "none") not in CERT_REQS:
        raise StoreError(f"state.url has an ssl_cert_reqs that there is not. It is one of {', '.join(CERT_REQS)}.")
    try:
        server: dict[str, Any] = {**parse_url(f"redis://{user}{at}host/{db}?{query}"), **tls}
    except ValueError:  # its text may hold the password
        raise StoreError(f"state.url has a user, a password or an option that can't be read. Write signs in it as %XX: {FORM}.") from None
    own = {name.removeprefix("sentinel_"): server.pop(name) for name in OPTIONS & given.keys()}
    del server["host"]
    sentinel = {**own, **tls, **{name: value for name, value in server.items() if name.startswith("ssl_")}}
    return SentinelUrl(hosts, service, f"{scheme}://{names}/{path}", server, sentinel)


def _host(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port or SENTINEL_PORT
    except ValueError as error:
        raise StoreError(f"state.url names no sentinel: {str(error).split(' as ')[0]}. Write {FORM}.") from None
    if not host:
        raise StoreError(f"state.url names no sentinel. Write {FORM}.")
    return host, port


class Sentinels(Sentinel):
    """The sentinels of `where`, asked one after the other. The one that answered last is asked first."""

    def __init__(self, where: SentinelUrl) -> None:
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            where.hosts, sentinel_kwargs={**LINK, "retry": Retry(NoBackoff(), 0), **where.sentinel}
        )
        self.where = where
        self._names = {id(sentinel): f"{host}:{port}" for sentinel, (host, port) in zip(self.sentinels, where.hosts, strict=True)}
        self.newest: Mapping[str, Any] = {"config-epoch": 0}
        """The newest configuration of the master that was seen."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Raises MasterNotFoundError, which is worth another attempt, or StoreUnavailable, which is not. Keeps no connection."""
        try:
            return await self._discover(service_name)
        finally:
            for sentinel in self.sentinels:
                await sentinel.connection_pool.disconnect(inuse_connections=False)

    async def _discover(self, service_name: str) -> tuple[str, int]:
        silent, refused, known, away = list[str](), list[str](), list[str](), list[str]()
        for at, sentinel in enumerate(self.sentinels):
            name = self._names[id(sentinel)]
            try:
                async with asyncio.timeout(ANSWER_S):
                    masters = cast("dict[str, dict[str, Any]]", await cast("Awaitable[Any]", sentinel.sentinel_masters()))
            except (RedisError, OSError) as error:  # a TimeoutError is an OSError
                no_entry = (AuthenticationError, NoPermissionError)
                is_refusal = isinstance(error, no_entry) or isinstance(error.__cause__, no_entry)
                (refused if is_refusal else silent).append(f"{name}: {error or type(error).__name__}")
                continue
            state = masters.get(service_name)
            if state is None:
                known += masters
            elif state["config-epoch"] < self.newest["config-epoch"]:
                away.append(f"{name} names the master of before")
            elif not self.check_master_state(state, service_name):  # pyright: ignore[reportUnknownMemberType]
                away.append(f"{name} sees the master of {service_name} down")
            else:
                self.newest = state
                self.sentinels.insert(0, self.sentinels.pop(at))
                return state["ip"], state["port"]
        if away or (silent and not known and not refused):
            raise MasterNotFoundError("; ".join(away) or f"no sentinel answers: {'; '.join(silent)}")
        if refused:
            raise StoreUnavailable(
                f"the sentinel at {refused[0].split(': ')[0]} refused the password. Set one in state.url: ?sentinel_password=PASSWORD"
            )
        others = ", ".join(sorted(set(known))) or "none"
        raise StoreUnavailable(
            f"the sentinels of {self.where.shown} know no service {service_name!r} (they know: {others}). Correct state.url."
        )


class _MasterPool(SentinelConnectionPool):
    """Connections to the master alone: once another one is found, those to the one before are ended, also those under way."""

    async def get_master_address(self) -> tuple[str, int]:
        before = cast("tuple[str, int] | None", self.master_address)  # pyright: ignore[reportUnknownMemberType]
        found = cast("tuple[str, int]", await super().get_master_address())  # pyright: ignore[reportUnknownMemberType]
        if before not in (None, found):
            await self.disconnect(inuse_connections=True)
        return found


def connect(url: str, **options: Any) -> Redis:
    """A client of the master, wherever it is at the time of a call; `options` are of each connection. Nothing is contacted yet."""
    where = parse(url)
    return Redis.from_pool(_MasterPool(where.service, Sentinels(where), **options, **where.server))


async def watch(url: str, told: Told) -> None:
    """Call `told` with the address of the master before and after, each time that it changes; until cancelled."""
    sentinels = Sentinels(parse(url))
    before, task = "", asyncio.current_task()
    while True:
        for sentinel in tuple(sentinels.sentinels):
            with suppress(RedisError, OSError, StoreError):
                async with sentinel.pubsub(ignore_subscribe_messages=True) as news:  # pyright: ignore[reportUnknownMemberType]
                    await news.subscribe(SWITCHED)
                    while True:
                        now = "{}:{}".format(*await sentinels.discover_master(sentinels.where.service))
                        if before not in ("", now):
                            told(before, now)
                        before = now
                        honour(task, 0)
                        await anext(cast("AsyncIterator[Any]", news.listen()))  # pyright: ignore[reportUnknownMemberType]
        await asyncio.sleep(AGAIN_S)


def way_to_master(url: str) -> Connect | None:
    """How to connect to the master where only this host reaches the sentinels; connections to the master before are closed then."""
    where = parse(url)
    if not all(is_loopback(host) for host, _ in where.hosts) or where.sentinel.get("ssl"):
        return None
    return _Way(Sentinels(where)).connect


class _Way:
    def __init__(self, sentinels: Sentinels) -> None:
        self._sentinels = sentinels
        self._asking = asyncio.Lock()
        self._master: tuple[str, int] | None = None
        self._open: list[asyncio.Transport] = []

    async def connect(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        """Raises OSError where there is no master."""
        async with self._asking:
            try:
                master = await self._sentinels.discover_master(self._sentinels.where.service)
            except (RedisError, StoreError) as error:
                raise ConnectionError(str(error)) from error
            if master != self._master:
                self._close_all()
                self._master = master
        transport, _ = await asyncio.get_running_loop().create_connection(protocol, *master)
        self._open = [*(each for each in self._open if not each.is_closing()), transport]

    def _close_all(self) -> None:
        for each in self._open:
            each.close()
        self._open = []
