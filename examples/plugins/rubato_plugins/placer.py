"""HostPlacer: runs what joins a host behind a prefix, such as `ssh gpu-7`, `srun -N1` or `docker run -i image`.

    HOST_PREFIX="srun -N1" rubato launch CONFIG bus.host=10.0.0.5 launch.backend=rubato_plugins.placer:Prefixed \\
        launch.hosts='{remote: {count: 2, pools: {far: 8}}}'
"""

import asyncio
import itertools
import os
import shlex
import sys
from pathlib import Path

from rubato.runtime.config import Config
from rubato.runtime.launch.children import die_with_parent
from rubato.runtime.launch.here import LocalHost
from rubato.runtime.launch.placer import HostSpec, JoinCommand, NotPlaced


class Prefixed:
    """The prefix's own process stands for the host: it hands signals on, and ends as the command does."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._prefix = shlex.split(os.environ.get("HOST_PREFIX", ""))
        self._folder, self._numbers = folder, itertools.count(1)
        self.hosts: set[LocalHost] = set()

    async def place(self, spec: HostSpec, join: JoinCommand) -> LocalHost:
        if spec.labels:
            raise NotPlaced(f"a prefix can't choose a host by its labels {', '.join(spec.labels)}: leave them out.")
        log = self._folder / f"{spec.name}.{next(self._numbers)}.log"
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *self._prefix, sys.executable, "-m", join.module, *join.arguments,
                stdin=asyncio.subprocess.PIPE, stdout=file, stderr=file, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(f"{join.token}\n".encode())
        process.stdin.close()
        host = LocalHost(process, log, self.hosts.discard)
        self.hosts.add(host)
        return host

    async def close(self) -> None:
        for host in tuple(self.hosts):
            await host.release()
