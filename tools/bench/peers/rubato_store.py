"""The Store on a Redis of its own, AOF everysec, with the writes that the SampleBuffer makes of 16 KiB samples: 32 callers put at
once, sharing writes as the buffer's journal does; then steps of 64 samples are bound, read and ended.

The server is the `redis-server` on the PATH, or the packaged one; which one is printed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import uvloop
from load import Figures, now_ns, rate, report

from rubato.runtime.store.embedded import EmbeddedRedis
from rubato.runtime.store.redis import RedisStore
from rubato.runtime.store.store import Append, Fence, WriteNumber

SAMPLE_BYTES = 16 * 1024
CALLERS = 32
GROUP = 8
GROUPS = 512
STEP_GROUPS = 8
"""64 samples per step."""
RECORD = bytes(500)
"""As long as the record of a group of eight."""
END = bytes(90)


class Writer:
    """One writer's numbered writes."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._number = 0

    async def write(self, changes: dict[str, bytes | None], append: Append | None = None) -> None:
        self._number += 1
        await self._store.write(changes, fence=Fence("bench", 1), turn=WriteNumber(self._number), append=append)


async def measure(folder: Path) -> Figures:
    """Samples per second: put, and claim with commit."""
    server = EmbeddedRedis(folder, "everysec")
    url = await server.start()
    store = RedisStore(url, "bench")
    print(f"redis: {await store.version()}", file=sys.stderr)
    await store.write({}, fence=Fence("bench", 1))
    writer = Writer(store)
    figures = {"put_s": await _put(writer), "claim_commit_s": await _claim(writer, store)}
    await store.close()
    await server.stop()
    return figures


async def _put(writer: Writer) -> float:
    samples = [(f"g{group}", f"g{group}.{member}") for group in range(GROUPS) for member in range(GROUP)]
    began = now_ns()
    for begin in range(0, len(samples), CALLERS):
        changes: dict[str, bytes | None] = {}
        for group, sample in samples[begin : begin + CALLERS]:
            changes[f"payload/{sample}"] = bytes(SAMPLE_BYTES)
            changes[f"group/{group}"] = RECORD
        await writer.write(changes)
    return rate(len(samples), began)


async def _claim(writer: Writer, store: RedisStore) -> float:
    began, ended = now_ns(), 0
    for first in range(0, GROUPS, STEP_GROUPS):
        groups = [f"g{number}" for number in range(first, first + STEP_GROUPS)]
        payloads = [f"payload/{group}.{member}" for group in groups for member in range(GROUP)]
        if any(payload is None for payload in await store.fetch(payloads)):
            raise RuntimeError(f"a sample of the step that begins with {groups[0]} is gone")
        await writer.write({f"group/{group}": RECORD for group in groups})
        gone = dict.fromkeys([*payloads, *(f"group/{group}" for group in groups)])
        await writer.write(gone, Append("ends", ended + 1, [END] * len(payloads)))
        ended += len(payloads)
    return rate(ended, began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    with tempfile.TemporaryDirectory() as temporary:
        report(parser.parse_args().json, uvloop.run(measure(Path(temporary))))
