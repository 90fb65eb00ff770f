"""CPU time of the gateway for one chat completion, beside a bare starlette server that answers the same requests from memory.

python tools/bench/gateway.py [--calls 4096] [--sessions 256] [--repeat 5] [--json FILE] [key.sub=value …]

A job of live processes, with a scripted engine that answers at once, has a gateway. Agents hold `--sessions` sessions open and talk in all of them
at once: each takes `TURNS` turns, brings its whole conversation every time, and completes; then the next ones open. The peer is a process of the
same uvicorn: it decodes the body and answers with what the gateway once answered (tools/bench/peers/fixed_chat.py). Both get the same
requests from one client, in turns. The client repeats what `openai`'s sends, which is recorded first, byte for byte but for session, key and
conversation: a client of its own would be the dearest thing on two cores.

`cpu_us_per_call` is CPU time of the gateway's process, all threads, while agents talk; proxy, engine and client have processes of their own.
`starlette_us_per_call` is the same of the peer's, and both are medians of `--repeat`. `cpu_us_per_session` is what opening and completing one takes
beside its calls. `rss_slope_b_per_call` is the slope of the gateway's memory over the calls after the first third, which warm up.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rubato.actors.training.base_model import make  # noqa: E402
from rubato.runtime.launch.connection import connect  # noqa: E402
from rubato.runtime.registry import list_actors  # noqa: E402
from tools.bench.paced_job import job  # noqa: E402

TURNS = 8
GROUP = 2
JOB: dict[str, Any] = {
    "run": {"name": "gateway", "steps": 1_000_000},
    "actors": {
        "sample_buffer": {"class": "rubato.actors.samples.buffer:SampleBuffer"},
        "llm_proxy": {"class": "rubato.actors.proxy.proxy:LLMProxy"},
        "engine": {"class": "rubato.actors.engines.worker:EngineWorker"},
        "trainer": {"class": "rubato.actors.training.trainer:Trainer"},
        "gateway": {"class": "rubato.actors.gateway.gateway:Gateway"},
    },
    "engine": {"kind": "scripted", "max_len": 8192, "scripted": {"token_s": 0.0, "stop_share": 0.0}},
    "rollout": {"max_turns": TURNS, "max_new_tokens": 16, "max_len": 8192},
    "train": {"kind": "scripted", "group_size": GROUP, "scripted": {"step_s": 0.0, "weights_mib": 0.01}},
    "staleness": {"alpha": 2},
    "check": {"enabled": False},
    "eval": {"every": 0, "final_num_tasks": 0},
    "checkpoint": {"every": 1000},
    "report": {"finish": ""},
}
SYSTEM = "up FFHP left down GHFF right PFFH up " * 12
WORDS = ("left", "down", "right", "up", "FFHP", "GHFF", "PFFH", "HHGP")
NUM_WORDS = 40
"""Of an observation: 200 characters, of which the quickstart's tokenizer makes 80 tokens; of other words it makes one of each character."""

SESSION, KEY = "s" * 24, "k" * 36
"""Of the recorded request, to be replaced."""

ANSWER_S, END_S = 60.0, 10.0


class Recorded(NamedTuple):
    """A request of `openai`'s client."""

    head: str
    body: dict[str, Any]

    def bytes_for(self, session: str, key: str, messages: Sequence[Any]) -> bytes:
        """The same in another session, with another conversation."""
        body = _json({**self.body, "messages": messages})
        lines = self.head.replace(SESSION, session).replace(KEY, key).split("\r\n")
        lines = [f"Content-Length: {len(body)}" if line.lower().startswith("content-length:") else line for line in lines]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _json(told: Any) -> bytes:
    """As `openai` writes it."""
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


async def recorded() -> Recorded:
    """What the client sends for one chat completion. Raises ValueError where it can't be repeated."""
    import openai

    got: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n")
        body = await reader.readexactly(_length_in(head))
        told = _json({"id": "1", "object": "chat.completion", "created": 0, "model": "any", "choices": []})
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(told) + told)
        got.set_result((head, body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/sessions/{SESSION}/v1", api_key=KEY) as client:
            await client.chat.completions.create(model="any", messages=[{"role": "system", "content": SYSTEM}])
        head, body = await got
    found = Recorded(head.decode(), json.loads(body))
    if found.bytes_for(SESSION, KEY, found.body["messages"]) != head + b"\r\n\r\n" + body:
        raise ValueError("what openai's client sends can't be repeated byte for byte: mend Recorded.bytes_for")
    return found


def _length_in(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    raise ValueError(f"a message without a length: {head[:200]!r}")


class Connection(asyncio.Protocol):
    """One connection that is kept, and one request at a time on it."""

    def __init__(self) -> None:
        self._got = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def to(cls, port: int) -> "Connection":
        return (await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port))[1]

    async def ask(self, request: bytes) -> dict[str, Any]:
        """The answer. Raises SystemExit for one that is no success."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the server closed the connection")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_S):
            status, body = await self._answer
        if status != 200:
            raise SystemExit(f"answered {status}: {body[:500].decode()}")
        return json.loads(body)

    async def post(self, path: str, key: str, told: Any) -> dict[str, Any]:
        body = _json(told)
        head = f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self.ask(head.encode() + body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return
        whole = end + 4 + _length_in(bytes(self._got[:end]))
        if len(self._got) >= whole and self._answer is not None:
            status, body = int(self._got[9:12]), bytes(self._got[end + 4 : whole])
            del self._got[:whole]
            self._answer.set_result((status, body))


class Server(NamedTuple):
    """One side of the comparison."""

    pid: int
    port: int

    @asynccontextmanager
    async def connections(self, num: int) -> AsyncGenerator[Sequence[Connection]]:
        """For one measurement: a server closes those that nobody used for some seconds."""
        opened = [await Connection.to(self.port) for _ in range(num)]
        try:
            yield opened
        finally:
            for connection in opened:
                connection.close()

    def cpu_s(self) -> float:
        """Of the process, by its clock: /proc counts in ticks of 10 ms."""
        return time.clock_gettime(~self.pid << 3 | 2)


class Agents:
    """They say something else each time."""

    def __init__(self, request: Recorded, seed: int) -> None:
        self._request, self._random, self._num = request, random.Random(seed), count()

    def _observation(self) -> dict[str, str]:
        return {"role": "user", "content": f"{next(self._num)} " + " ".join(self._random.choices(WORDS, k=NUM_WORDS))}

    async def talk(self, connection: Connection, session: str, key: str) -> dict[str, Any]:
        """One session's turns; the last answer."""
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        answer: dict[str, Any] = {}
        for _ in range(TURNS):
            messages.append(self._observation())
            answer = await connection.ask(self._request.bytes_for(session, key, messages))
            messages.append(answer["choices"][0]["message"])
        return answer

    async def talk_in(self, server: Server, connections: Sequence[Connection], sessions: Sequence[tuple[str, str]]) -> float:
        """CPU seconds of the server while all sessions take their turns."""
        before = server.cpu_s()
        async with asyncio.TaskGroup() as tasks:
            for connection, (session, key) in zip(connections, sessions, strict=True):
                tasks.create_task(self.talk(connection, session, key))
        return server.cpu_s() - before


class Measured:
    """CPU µs per call of each measurement, and memory over calls."""

    def __init__(self) -> None:
        self.gateway_us: list[float] = []
        self.session_us: list[float] = []
        self.starlette_us: list[float] = []
        self.memory: list[tuple[int, int]] = []
        """(calls so far, resident bytes)."""
        self.calls = 0

    def slope(self) -> float:
        """Bytes per call, by least squares."""
        kept = [each for each in self.memory if each[0] >= self.calls / 3]
        return statistics.linear_regression(*zip(*kept, strict=True)).slope if len(kept) > 1 else 0.0


async def by_gateway(agents: Agents, server: Server, admin_key: str, sessions: int, waves: int, found: Measured) -> None:
    """Sessions open, talk, and complete, `waves` times."""
    talking = other = 0.0
    for _ in range(waves):
        async with server.connections(sessions) as connections:
            before = server.cpu_s()
            opened = await _all(lambda c, _: c.post("/sessions", admin_key, {}), connections)
            ids = [told["session_id"] for told in opened]
            spent = await agents.talk_in(server, connections, [(told["session_id"], told["api_key"]) for told in opened])
            await _all(lambda c, at, ids=ids: c.post(f"/sessions/{ids[at]}/complete", admin_key, {"reward": at % GROUP}), connections)
            talking, other = talking + spent, other + server.cpu_s() - before - spent
        found.calls += sessions * TURNS
        found.memory.append((found.calls, psutil.Process(server.pid).memory_info().rss))
    found.gateway_us.append(1e6 * talking / waves / sessions / TURNS)
    found.session_us.append(1e6 * other / waves / sessions)


async def by_starlette(agents: Agents, server: Server, sessions: int, waves: int, found: Measured) -> None:
    """The same calls of the peer, in sessions that it takes no notice of."""
    spent = 0.0
    for _ in range(waves):
        async with server.connections(sessions) as connections:
            spent += await agents.talk_in(server, connections, [(SESSION, KEY)] * sessions)
    found.starlette_us.append(1e6 * spent / waves / sessions / TURNS)


async def _all(ask: Callable[[Connection, int], Any], connections: Sequence[Connection]) -> list[dict[str, Any]]:
    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(connection, at)) for at, connection in enumerate(connections)]
    return [task.result() for task in asking]


@asynccontextmanager
async def starlette(answer: dict[str, Any], sessions: int) -> AsyncGenerator[Server]:
    """The peer, which answers with `answer`."""
    command = [sys.executable, str(ROOT / "tools/bench/peers/fixed_chat.py"), str(sessions)]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(_json(answer) + b"\n")
        port = int(await process.stdout.readline())
        yield Server(process.pid, port)
    finally:
        process.terminate()
        async with asyncio.timeout(END_S):
            await process.wait()


async def gateway_of(folder: Path) -> tuple[Server, str]:
    """A run's gateway, and its admin key."""
    async with asyncio.timeout(ANSWER_S):
        while not (folder / "gateway.json").exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.1)
    told = json.loads((folder / "gateway.json").read_text())
    async with connect(folder, types=False) as run:
        (pid,) = [actor.pid for actor in await list_actors(run.store) if actor.role == "gateway"]
    return Server(pid, int(told["url"].rpartition(":")[2])), told["admin_key"]


async def measure(calls: int, sessions: int, repeat: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Both servers, in turns."""
    waves, found = max(1, round(calls / sessions / TURNS)), Measured()
    request = await recorded()
    with tempfile.TemporaryDirectory(prefix="rubato-gateway-") as scratch:
        model = Path(scratch) / "model"
        await asyncio.to_thread(make, model, 1, lambda what, share: None, steps=0)
        sized = [f"model.path={model}", f"env.concurrency={sessions}", f"engine.num_slots={sessions}"]
        sized += [f"train.batch_groups={-(-sessions // GROUP)}", f"gateway.max_waiting={sessions}"]
        async with job("gateway", JOB, [*sized, *overrides]) as folder:
            gateway, key = await gateway_of(folder)
            one, two = Agents(request, 1), Agents(request, 2)
            async with gateway.connections(1) as (first,):
                opened = await first.post("/sessions", key, {})
                answer = await one.talk(first, opened["session_id"], opened["api_key"])
                await first.post(f"/sessions/{opened['session_id']}/complete", key, {"reward": 1})
            async with starlette(answer, sessions) as bare:
                await by_gateway(one, gateway, key, sessions, 1, Measured())
                await by_starlette(two, bare, sessions, 1, Measured())
                for _ in range(repeat):
                    await by_gateway(one, gateway, key, sessions, waves, found)
                    await by_starlette(two, bare, sessions, waves, found)
    ours, theirs = statistics.median(found.gateway_us), statistics.median(found.starlette_us)
    return {
        "cpu_us_per_call": ours,
        "starlette_us_per_call": theirs,
        "ratio": ours / theirs,
        "sessions": sessions,
        "rss_slope_b_per_call": found.slope(),
        "cpu_us_per_session": statistics.median(found.session_us),
        "calls": found.calls,
        "rss_mib": [round(rss / 2**20, 1) for _, rss in (found.memory[0], found.memory[-1])],
        "each": {"gateway": found.gateway_us, "starlette": found.starlette_us},
    }


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write the figures where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=4096, help="of each measurement of either server")
    parser.add_argument("--sessions", type=int, default=256, help="that are open and talk at once")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of either server, in turns")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    asked = parser.parse_args(argv)
    found = asyncio.run(measure(asked.calls, asked.sessions, asked.repeat, asked.overrides))
    print(
        f"gateway {found['cpu_us_per_call']:.0f} µs a call, bare starlette {found['starlette_us_per_call']:.0f}: ratio {found['ratio']:.2f}; "
        f"{found['sessions']} sessions at once, {found['cpu_us_per_session']:.0f} µs to open and complete one; "
        f"memory {found['rss_slope_b_per_call']:+.0f} B a call over {found['calls']} calls"
    )
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
