"""The WorkSet on a Redis of its own, AOF everysec: 16 KiB samples, 32 callers at once, claimed and committed by the 64.

The server is the `redis-server` on the PATH, or the packaged one; which one is printed.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import uvloop
from load import Figures, now_ns, rate, report

from runtime.store.embedded import EmbeddedRedis
from runtime.store.redis import RedisStore
from runtime.store.workset import Item, WorkSet

SAMPLE_BYTES = 16 * 1024
CALLERS = 32
GROUP = 8
GROUPS = 512
CLAIM_GROUPS = 8
"""64 samples per step."""


async def measure(folder: Path) -> Figures:
    """Samples per second: put, and claim with commit."""
    server = EmbeddedRedis(folder, "everysec")
    url = await server.start()
    store = RedisStore(url, "bench")
    print(f"redis: {await store.version()}", file=sys.stderr)
    workset = store.workset("samples")
    figures = {"put_s": await _put(workset)}
    async with asyncio.TaskGroup() as tasks:
        for number in range(GROUPS):
            tasks.create_task(workset.seal(f"g{number}", "trained"))
    figures["claim_commit_s"] = await _claim(workset)
    await store.close()
    await server.stop()
    return figures


async def _put(workset: WorkSet) -> float:
    items = iter(
        [
            Item(f"g{group}.{member}", f"g{group}", group, bytes(SAMPLE_BYTES))
            for group in range(GROUPS)
            for member in range(GROUP)
        ]
    )

    async def put() -> None:
        for item in items:
            await workset.put(item)

    began = now_ns()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CALLERS):
            tasks.create_task(put())
    return rate(GROUPS * GROUP, began)


async def _claim(workset: WorkSet) -> float:
    epoch = await workset.new_epoch()
    began, seen = now_ns(), 0
    for step in range(1, GROUPS // CLAIM_GROUPS + 1):
        claimed = await workset.claim(CLAIM_GROUPS, 0, step, epoch)
        seen += sum(len(items) for _, items in claimed.groups)
        await workset.commit(step, epoch)
    if seen != GROUPS * GROUP:
        raise RuntimeError(f"{GROUPS * GROUP} samples were put and {seen} claimed")
    return rate(seen, began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    with tempfile.TemporaryDirectory() as temporary:
        report(parser.parse_args().json, uvloop.run(measure(Path(temporary))))
