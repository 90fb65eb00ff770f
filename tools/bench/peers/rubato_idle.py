"""An actor process that does nothing: how soon it is ready after it was started, and what memory it holds then.

It imports what `rubato.runtime.node` imports. Its store is in its own memory, so the time to open a connection to Redis is not in the figure.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from load import Figures, now_ns, report  # noqa: E402

SETTLED_S = 1.5
"""After the first heartbeat."""


async def serve(folder: Path) -> None:
    """The idle process itself."""
    import rubato.runtime.node  # noqa: F401 - its imports are what an actor process holds
    from rubato.bus.link import Identity
    from rubato.bus.zmq import ZmqTransport
    from rubato.runtime.actor import Actor, RunInfo
    from rubato.runtime.config import ActorConfig
    from rubato.runtime.kernel import Kernel
    from rubato.runtime.memory import MemoryBlobStore, MemoryStore
    from rubato.runtime.observe.log import logger

    kernel = Kernel(
        Actor,
        ActorConfig(),
        name="idle-1",
        incarnation=1,
        run=RunInfo("bench", folder, 0, 0),
        transport=ZmqTransport(Identity("bench", "idle-1", 1), f"ipc://{folder}/idle"),
        store=MemoryStore(),
        blobs=MemoryBlobStore(),
        log=logger("bench"),
    )
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        serving.cancel()


async def measure(folder: Path) -> Figures:
    """`ready_s` and `rss_mib`."""
    began = now_ns()
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", str(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    await child.stdout.readline()
    ready_s = (now_ns() - began) / 1e9
    await asyncio.sleep(SETTLED_S)
    pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
    child.kill()
    await child.wait()
    return {"ready_s": ready_s, "rss_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--serve", type=Path)
    arguments = parser.parse_args()
    if arguments.serve:
        import uvloop

        uvloop.run(serve(arguments.serve))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            report(arguments.json, asyncio.run(measure(Path(temporary))))
