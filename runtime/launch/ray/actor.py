"""The Ray actor of one host: the host's process is its child. Ray's worker on that node loads this module and little else of ours."""

import asyncio
import fcntl
import importlib
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rubato.runtime.config.sections import DEVICES
from rubato.runtime.launch.children import start_module
from rubato.runtime.launch.folder import MAX_TEMPORARY_BYTES

OUTPUT_BYTES = 64 << 10
"""Of its output the end is kept, for its log on the first host."""

PREFIX = "rubato-host-"
PART_BYTES = 64 << 10
DRAIN_S = 2.0
"""For output that is still on its way when the command has ended."""


class HostActor:
    """Runs one command. Ray starts it once, and ends it with the helper that made it, or with its node; should neither be noticed, it ends
    by itself."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._began, self._over = asyncio.Event(), asyncio.Event()
        self._failed = ""
        self._end = (-int(signal.SIGKILL), "")
        self._renewed = 0.0

    async def run(self, module: str, arguments: Sequence[str], token: str) -> None:
        """The command from its start to its end, in a folder of its own, with the GPUs that Ray gave this actor and no other."""
        loop, ray = asyncio.get_running_loop(), _ray()
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        folder, held = await loop.run_in_executor(None, _own_folder)
        temporary = {"TMPDIR": folder} if len(os.fsencode(folder)) <= MAX_TEMPORARY_BYTES else {}
        output = bytearray()
        try:
            process = await start_module(
                module, *arguments,
                more={DEVICES: ",".join(map(str, gpus)), **temporary}, cwd=folder, start_new_session=True,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{token}\n".encode())
            process.stdin.close()
            self._process = process
            self._began.set()
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(_keep_end(process.stdout, output))
                code = await process.wait()
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait([reading], timeout=DRAIN_S)
                reading.cancel()
            self._end = code, output.decode(errors="replace")
        except OSError as error:
            self._failed = str(error)
        finally:
            self._began.set()
            await loop.run_in_executor(None, lambda: shutil.rmtree(folder, ignore_errors=True))
            os.close(held)
            self._over.set()

    async def started(self) -> tuple[str, str, str]:
        """Once the command runs: the address and the id of its node, and why it could not be started, if so."""
        ray = _ray()
        await self._began.wait()
        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id(), self._failed

    async def ended(self) -> tuple[int, str]:
        """Once the command has ended: its exit code, and the end of what it wrote. It may be asked again."""
        await self._over.wait()
        return self._end

    async def signal(self, number: int) -> None:
        """Hand a signal on to the command. Nothing happens once that has ended."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def renew(self) -> None:
        """The helper is there."""
        self._renewed = asyncio.get_running_loop().time()

    async def lapse(self, lease_s: float) -> None:
        """End the command, give the node back, and end this actor, once no `renew` came for `lease_s`."""
        await self.renew()
        while (left_s := self._renewed + lease_s - asyncio.get_running_loop().time()) > 0:  # noqa: ASYNC110 - silence is no event
            await asyncio.sleep(left_s)
        if self._process is not None:
            await self.signal(signal.SIGKILL)
            await self._over.wait()
        ray = _ray()
        group = ray.util.get_current_placement_group()
        await asyncio.get_running_loop().run_in_executor(None, ray.util.remove_placement_group, group)
        ray.actor.exit_actor()


def _own_folder() -> tuple[str, int]:
    """A new folder, locked by a descriptor of this process; first those are removed whose process was killed before it could."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone
            held = _locked(left)
            shutil.rmtree(left, ignore_errors=True)
            os.close(held)
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        with suppress(OSError):  # another host that begins took it for one of those
            held = _locked(folder)
            if os.path.samestat(os.fstat(held), os.stat(folder)):
                return folder, held


def _locked(folder: str | Path) -> int:
    """Raises OSError where another process holds it."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def _ray() -> Any:
    return importlib.import_module("ray")


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while part := await stream.read(PART_BYTES):
        kept += part
        del kept[:-OUTPUT_BYTES]
