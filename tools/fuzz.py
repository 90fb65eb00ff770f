"""Send mutated frames to a live endpoint and check that it goes on: `python tools/fuzz.py --frames 1000000 --seed 1 [--json FILE]`.

A kernel with one typed actor listens on ipc and on tcp. Strangers with the run's id, so that mutations reach past the handshake,
send what a peer could send, spoilt by a seeded mutator; some send raw bytes below ZMTP. All the while an honest peer asks and must be
answered. Exit 0 only if every ask was answered, nothing of the strangers' raised, and memory stayed within its bound.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).parents[1]))

from rubato.bus.codec import Envelope, EnvelopeKind, encode_body
from rubato.bus.link import PROTOCOL, Greeting, Identity
from rubato.bus.message import Array, Message, Request
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import configure, logger

RUN = "fuzz"
MOST_PER_LINK = 8
"""Mutated frames per connection at most; the first bad one ends it for us, the others must change nothing."""
NOISE_EVERY = 50
"""Every so many connections, one that speaks no ZMTP."""
ASK_EVERY = 8
GROWTH_BYTES = 200 * 1024 * 1024
"""Of resident memory over the whole session, allocators' slack included."""


class Stepped(Message, frozen=True):
    length: int


class Step(Request[Stepped], frozen=True):
    """A body with every kind of field that our messages have."""

    action: str
    tokens: list[int] = []
    scores: dict[str, float] = {}
    image: Array | None = None


class Target(Actor):
    role = "target"

    @handler(concurrency=64)
    async def step(self, request: Step) -> Stepped:
        return Stepped(len(request.action))


class Honest(Actor):
    role = "honest"


def corpus(incarnation: int) -> list[list[bytes]]:
    """Whole messages as peers send them: each a list of parts."""
    tag, body, _ = encode_body(Step("left", [1, 2, 3], {"a": 0.5}))
    image = Array("float32", (64, 512), memoryview(bytes(64 * 512 * 4)))
    _, with_image, buffers = encode_body(Step("right", image=image))
    table = msgspec.msgpack.encode([len(each) for each in buffers])

    def frame(*kinds: int, what: msgspec.Raw = body, tag: str = tag) -> bytes:
        sent = [Envelope(k, 7, "target-1", incarnation, tag, 10**6, b"t" * 16, what, "s") for k in kinds]
        return msgspec.msgpack.encode(sent)

    return [
        [frame(EnvelopeKind.ASK)],
        [frame(EnvelopeKind.TELL, EnvelopeKind.TELL, EnvelopeKind.ASK)],
        [frame(EnvelopeKind.ASK, what=with_image), table, *map(bytes, buffers)],
        [frame(EnvelopeKind.CANCEL), b""],
        [frame(EnvelopeKind.CREDIT)],
        [frame(EnvelopeKind.OK, tag="Stepped")],
        [frame(*range(17))],
        [frame(EnvelopeKind.TELL, tag="Finish")[:-1] + b"\xc0"],
        [greeting()],
    ]


def greeting() -> bytes:
    body = msgspec.msgpack.encode(Greeting(PROTOCOL, RUN, "stranger-1", 1))
    return msgspec.msgpack.encode([Envelope(EnvelopeKind.HELLO, 0, "", 0, "", 0, b"", msgspec.Raw(body))])


class Mutator:
    """Spoils messages; the same seed spoils them alike."""

    def __init__(self, seed: int, corpus: list[list[bytes]]) -> None:
        self._rng = random.Random(seed)
        self._corpus = corpus

    def message(self) -> list[bytes]:
        """Half of them are well-formed on every level but what the fields hold; the others are spoilt byte by byte."""
        if self._rng.random() < 0.5:
            return [msgspec.msgpack.encode([self._envelope() for _ in range(self._rng.choice((1, 1, 2, 9)))])]
        parts = [bytes(part) for part in self._rng.choice(self._corpus)]
        for _ in range(self._rng.choice((1, 1, 1, 2, 4))):
            if self._rng.random() < 0.15:
                parts = self._shuffle(parts)
            at = self._rng.randrange(len(parts))
            parts[at] = self._spoil(bytearray(parts[at]))
        return parts

    def _envelope(self) -> list[object]:
        rng = self._rng
        target = rng.choice(("target-1", "target-1", "honest-1", "", "x" * 2000))
        tag = rng.choice(("Step", "Step", "Stepped", "Drained", "Finish", "", "unknown"))
        numbers = (rng.choice((0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63))) for _ in range(4))
        identity, incarnation, budget_us, credit = numbers
        fields = [rng.choice((1, 1, 2, 11, 12, rng.randrange(-2, 20))), identity, target, incarnation, tag, budget_us]
        fields += [rng.randbytes(rng.choice((0, 16))), rng.choice(("", "key")), credit, self._value(0), "stranger-1"]
        return fields

    def _value(self, depth: int) -> object:
        rng = self._rng
        kind = rng.randrange(8 if depth < 6 else 6)
        if kind == 6:
            return [self._value(depth + 1) for _ in range(rng.randrange(5))]
        if kind == 7:
            names = ("action", "tokens", "scores", "image", "type", "x")
            return {rng.choice(names): self._value(depth + 1) for _ in range(rng.randrange(5))}
        extension = msgspec.msgpack.Ext(rng.randrange(-3, 6), rng.randbytes(rng.randrange(20)))
        return (None, rng.getrandbits(63), rng.random(), "left", rng.randbytes(9), extension)[kind]

    def noise(self) -> bytes:
        return self._rng.randbytes(self._rng.randrange(1, 300))

    def _shuffle(self, parts: list[bytes]) -> list[bytes]:
        chosen = self._rng.randrange(4)
        if chosen == 0:
            return parts + [parts[-1]] * self._rng.randrange(1, 8)
        if chosen == 1 and len(parts) > 1:
            return parts[:-1]
        if chosen == 2:
            return [*parts, self.noise()]
        return self._rng.sample(parts, len(parts))

    def _spoil(self, data: bytearray) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        elif kind == 3 and data:
            data[at % len(data)] = rng.choice(b"\xc1\xdc\xdd\xde\xdf\xc4\xc6\xd9\xdb\xc9\xcf\xd3\xff\x00\x80\x90")
        elif kind == 4:  # a length that promises far more than there is
            data[at : at + 5] = rng.choice((b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9")) + rng.randbytes(4)
        elif kind == 5:
            data[at:at] = bytes([rng.choice(b"\x91\x81")]) * rng.randrange(1, 3000)
        else:
            other = rng.choice(self._corpus)[0]
            data[at:] = other[rng.randrange(len(other)) :]
        return bytes(data)


class Session:
    """One endpoint under attack."""

    def __init__(self, frames: int, seed: int, folder: Path) -> None:
        self._frames = frames
        self._store, self._folder = MemoryStore(), folder
        self._target, self._public = self._kernel(Target, "target-1", "tcp://127.0.0.1:*")
        self._honest, _ = self._kernel(Honest, "honest-1", "")
        self._mutator = Mutator(seed, corpus(self._target.incarnation))
        self._rng = random.Random(seed + 1)
        self.asked = self.answered = self.connections = 0
        self.grew_bytes = 0
        self.raised: list[str] = []

    @property
    def refused(self) -> dict[str, int]:
        return dict(self._public.refusals.counts)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: self.raised.append(f"{told.get('message')}: {told.get('exception')!r}"))
        async with asyncio.TaskGroup() as tasks:
            for kernel in (self._target, self._honest):
                tasks.create_task(kernel.serve())
                await kernel.ready.wait()
            with zmq.Context() as context:
                await self._attack(context)
            await self._ask()
            self._honest.stop()
            self._target.stop()

    async def _attack(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        await self._ask()
        before = resident_bytes()
        sent = 0
        while sent < self._frames:
            self.connections += 1
            burst = min(self._rng.randint(1, MOST_PER_LINK), self._frames - sent)
            sent += burst
            if self.connections % NOISE_EVERY == 0:
                self._shout()
            address = self._rng.choice((self._public.address, self._public.public_address))
            with context.socket(zmq.DEALER) as stranger:
                stranger.linger = 2000
                stranger.connect(address)
                if self._rng.random() < 0.9:
                    stranger.send(greeting())
                for _ in range(burst):
                    stranger.send_multipart(self._mutator.message())
            if self.connections % ASK_EVERY == 0:
                await self._ask()
        await self._ask()
        self.grew_bytes = resident_bytes() - before

    def _shout(self) -> None:
        host, _, port = self._public.public_address.removeprefix("tcp://").partition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(self._mutator.noise())

    async def _ask(self) -> None:
        self.asked += 1
        reply = await self._honest.ref("target-1").ask(Step("x" * (self.asked % 50)), timeout=60)
        self.answered += reply.length == self.asked % 50

    def _kernel(self, actor: type[Actor], name: str, public: str) -> tuple[Kernel, ZmqTransport]:
        transport = ZmqTransport(Identity(RUN, name, 1), f"ipc://{self._folder}/{name}", public=public)
        run = RunInfo(RUN, self._folder, 1, 1)
        kernel = Kernel(
            actor, ActorConfig(), name=name, incarnation=1, run=run, transport=transport, store=self._store,
            blobs=MemoryBlobStore(), log=logger("fuzz"),
        )  # fmt: skip
        return kernel, transport


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz a live endpoint with mutated frames.")
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory(prefix="rubato-fuzz-") as folder:
        configure(Path(folder) / "fuzz.jsonl", actor="fuzz")
        began = perf_counter()

        async def run() -> Session:
            session = Session(given.frames, given.seed, Path(folder))
            await session.run()
            return session

        done = asyncio.run(run())
        log = (Path(folder) / "fuzz.jsonl").read_text().splitlines()
        raised = [*done.raised, *(line for line in log if '"handler_failed"' in line)]
    took_s = perf_counter() - began
    told = {
        "frames": given.frames, "seed": given.seed, "connections": done.connections, "refused": done.refused,
        "asked": done.asked, "answered": done.answered, "raised": len(raised), "grew_mib": round(done.grew_bytes / 2**20, 1),
        "frames_s": round(given.frames / took_s),
    }  # fmt: skip
    print(json.dumps(told), *raised[:5], sep="\n")
    if given.json:
        given.json.write_text(json.dumps(told))
    return 0 if done.answered == done.asked and not raised and done.grew_bytes < GROWTH_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
