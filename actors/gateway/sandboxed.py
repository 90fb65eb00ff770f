"""Agents in sandboxes, by `env.sandbox`: of the network each has the sessions' address, at a loopback of its own, and nothing else."""

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rubato.actors.envs.section import EnvSection
from rubato.actors.gateway.command import PIPES
from rubato.actors.gateway.server import SessionServer
from rubato.actors.sandbox import sandbox_of
from rubato.runtime.bubblewrap import sandboxed

INLET = Path(__file__).with_name("inlet.py")
"""What runs in the sandbox before the agent does."""

MOST_CONNECTIONS = 64
"""Of one sandbox, at once."""


class AgentSandbox:
    """Starts each process in a sandbox of its own."""

    most_output = 8 * 2**20
    """Bytes that an agent may print, on either output."""

    def __init__(self, section: EnvSection, server: SessionServer, port: Callable[[], int]) -> None:
        """By the section's keys `sandbox…`. `server` answers in the sandbox at `port`, which is that outside too."""
        self._section, self._server, self._port = section, server, port

    @asynccontextmanager
    async def start(self, words: Sequence[str], variables: Mapping[str, str], shown: Path) -> AsyncGenerator[asyncio.subprocess.Process]:
        """The process of a command, which may read the file `shown`, and answers to its requests while the block runs. Raises OSError."""
        sandbox = sandbox_of(self._section)
        sandbox = sandbox._replace(read=(*sandbox.read, str(shown)))
        if sandbox.network:
            argv, env = sandboxed(words, sandbox, variables)
            yield await asyncio.create_subprocess_exec(*argv, env=env, **PIPES)
            return
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                fd = theirs.fileno()
                begun = (sys.executable, "-I", "-S", str(INLET), str(fd), str(self._port()), *words)
                argv, env = sandboxed(begun, sandbox, variables)
                process = await asyncio.create_subprocess_exec(*argv, env=env, pass_fds=(fd,), **PIPES)
            async with asyncio.TaskGroup() as tasks:
                answering = tasks.create_task(self._answer(ours))
                try:
                    yield process
                finally:
                    answering.cancel()

    async def _answer(self, handed: socket.socket) -> None:
        """What is asked at the sandbox's own socket, which comes over `handed`."""
        handed.setblocking(False)
        loop, comes = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(handed, comes.set)
        try:
            await comes.wait()
        finally:
            loop.remove_reader(handed)
        _, fds, _, _ = socket.recv_fds(handed, 1, 1)
        if fds:  # else the sandbox did not come about
            with socket.socket(fileno=fds[0]) as listening:
                await self._server.answer_on(listening, MOST_CONNECTIONS)
