"""The WorkSet's scripts alone, on a Redis of their own, AOF everysec: 16 KiB samples in pipelines of 32 over one connection.

Claimed and committed by the 64. What `rubato_workset.py` measures beside it has an asyncio client that sends each call by itself.
"""

import argparse
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import uvloop
from load import Figures, now_ns, rate, report
from redis import Redis
from rubato_workset import CALLERS, CLAIM_GROUPS, GROUP, GROUPS, SAMPLE_BYTES

from runtime.store.embedded import EmbeddedRedis
from runtime.store.redis_link import CLAIM, Script, script

KEYS = (
    "rubato:{bench}:op:bench",
    "rubato:{bench}:ws:samples",
    "rubato:{bench}:fences",
    "rubato:{bench}:op:bench:dropped",
)
PUT, SEAL, COMMIT, EPOCH = (script("once", "fence", "workset", name) for name in ("put", "seal", "commit", "new_epoch"))


class Sender:
    """Numbers calls as RedisLink does; a script's text goes to the server once."""

    def __init__(self) -> None:
        self._numbers, self._known = count(1), set[str]()

    def send(self, to: Any, what: Script, *args: Any) -> Any:
        """`to` is a client, which returns the reply, or a pipeline."""
        keys = KEYS if what is CLAIM else KEYS[:3]
        call = to.evalsha if what.digest in self._known else to.eval
        text = what.digest if what.digest in self._known else what.text
        self._known.add(what.digest)
        return call(text, len(keys), *keys, next(self._numbers), "buffer", 1, *args)


def measure(client: Any) -> Figures:
    """Samples per second: put, and claim with commit."""
    sender, payload = Sender(), bytes(SAMPLE_BYTES)
    began = now_ns()
    for first in range(0, GROUPS * GROUP, CALLERS):
        pipeline = client.pipeline(transaction=False)
        for number in range(first, first + CALLERS):
            group = number // GROUP
            sender.send(pipeline, PUT, f"g{group}.{number}", f"g{group}", group, b"%d:%b" % (group, payload), b"")
        pipeline.execute()
    figures = {"put_s": rate(GROUPS * GROUP, began)}
    pipeline = client.pipeline(transaction=False)
    for group in range(GROUPS):
        sender.send(pipeline, SEAL, f"g{group}", "trained", GROUP)
    pipeline.execute()
    epoch = sender.send(client, EPOCH, 0)
    began, ended = now_ns(), 0
    for step in range(1, GROUPS // CLAIM_GROUPS + 1):
        bound = sender.send(client, CLAIM, CLAIM_GROUPS, 0, step, epoch)[2]
        pipeline = client.pipeline(transaction=False)
        for group, ids in zip(bound[::3], bound[1::3], strict=True):
            pipeline.hmget(f"{KEYS[1]}:group:{group.decode()}", ids)
        pipeline.execute()
        ended += sender.send(client, COMMIT, step, epoch)
    if ended != GROUPS * GROUP:
        raise RuntimeError(f"{GROUPS * GROUP} samples were put and {ended} committed")
    return figures | {"claim_commit_s": rate(ended, began)}


async def on_a_server(folder: Path) -> Figures:
    server = EmbeddedRedis(folder, "everysec")
    figures = measure(Redis.from_url(await server.start()))
    await server.stop()
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    with tempfile.TemporaryDirectory() as temporary:
        report(parser.parse_args().json, uvloop.run(on_a_server(Path(temporary))))
