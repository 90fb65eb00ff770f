"""A client written from docs/bus.md alone: `zmq` and `msgpack`, no line of Rubato, against an actor in a process of its own.

Where addresses come from is tried on a live job, with `redis` beside them.
"""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
import redis
import zmq

from tests.faulty_job import write_tokenizer
from tests.jobs import ACTING, clean_environment, rubato

ROOT = Path(__file__).parents[2]

SERVER = """
import asyncio, sys
from pathlib import Path
from rubato.bus.link import Identity
from rubato.bus.message import Ack, Array, Buffer, Message, Request
from rubato.bus.zmq import ZmqTransport
from rubato.runtime.actor import Actor, RunInfo, handler
from rubato.runtime.config import ActorConfig
from rubato.runtime.memory import MemoryBlobStore
from rubato.runtime.kernel import Kernel
from rubato.runtime.observe.log import logger
from rubato.runtime.memory import MemoryStore

class Echoed(Message, frozen=True):
    text: str
    number: int

class Echo(Request[Echoed], frozen=True):
    text: str
    number: int = 7

class Note(Message, frozen=True):
    text: str

class Count(Request[Echoed], frozen=True):
    pass

class Doubled(Message, frozen=True):
    values: Array

class Double(Request[Doubled], frozen=True):
    raw: Buffer

class Hang(Request[Ack], frozen=True):
    pass

class Fail(Request[Ack], frozen=True):
    pass

class Server(Actor):
    role = "server"
    notes = cancelled = 0

    @handler
    async def echo(self, request: Echo) -> Echoed:
        return Echoed(request.text, request.number)

    @handler
    async def note(self, message: Note) -> None:
        self.notes += 1

    @handler
    async def count(self, request: Count) -> Echoed:
        return Echoed(f"cancelled {self.cancelled}", self.notes)

    @handler
    async def double(self, request: Double) -> Doubled:
        return Doubled(Array("uint8", (2, len(request.raw)), bytes(request.raw) * 2))

    @handler(concurrency=4)
    async def hang(self, request: Hang) -> Ack:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Ack()

    @handler
    async def fail(self, request: Fail) -> Ack:
        raise ValueError("no luck")

async def main(address):
    kernel = Kernel(
        Server, ActorConfig(), name="server-1", incarnation=5, run=RunInfo("the-run", Path("."), 1, 1),
        transport=ZmqTransport(Identity("the-run", "server-1", 5, "5ca1ab1e5ca1ab1e"), address), store=MemoryStore(),
        blobs=MemoryBlobStore(), log=logger("test"),
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(kernel.serve())
        await kernel.ready.wait()
        print("ready", flush=True)

asyncio.run(main(sys.argv[1]))
"""

# What follows is a foreign client. Numbers and field orders are those of docs/bus.md.

ASK, TELL, OK, ERROR, EXPIRED, WRONG_INCARNATION, NO_ACTOR = 1, 2, 3, 4, 5, 6, 7
BAD_BODY, CANCEL, CREDIT, HELLO, WELCOME, REFUSED = 10, 11, 12, 13, 14, 15
ARRAY_BESIDE, BUFFER_BESIDE = 2, 4
PROTOCOL = 2
PAGE = (ROOT / "docs" / "bus.md").read_text()
WINDOW_MESSAGES, WINDOW_BYTES = map(int, re.search(r"at\s+first\s+(\d+)\s+messages\s+and\s+(\d+)\s+bytes", PAGE).groups())


class Client:
    def __init__(self, context: zmq.Context, address: str, **greeting) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 20_000
        self.socket.connect(address)
        self.ids = itertools.count(1)
        self.messages, self.size_bytes = WINDOW_MESSAGES, WINDOW_BYTES
        self.granted = 0
        self.replies: dict[int, tuple[list, list[bytes]]] = {}
        hello = {"protocol": PROTOCOL, "run": "the-run", "name": "foreign-1", "incarnation": 1} | greeting
        self.send(HELLO, body=list(hello.values()))

    def send(self, kind, number=0, tag="", body=None, incarnation=5, budget_us=0, target="server-1", buffers=()):
        envelope = [kind, number, target if kind < HELLO else "", incarnation if kind < HELLO else 0, tag, budget_us]
        envelope += [b"", body, "foreign-1" if kind in (ASK, TELL) else ""]
        parts = [msgpack.packb([envelope])]
        if buffers:
            parts += [msgpack.packb([len(b) for b in buffers]), *buffers]
        self.socket.send_multipart(parts)

    def pay(self, body, buffers=()) -> None:
        """Wait until the receiver has granted enough for one more message."""
        cost = min(len(msgpack.packb(body)) + sum(map(len, buffers)), WINDOW_BYTES // 2)
        while self.messages < 1 or self.size_bytes < cost:
            self.receive()
        self.messages -= 1
        self.size_bytes -= cost

    def receive(self) -> list:
        """Take in one frame; its envelopes."""
        frame, *beside = self.socket.recv_multipart()
        envelopes = msgpack.unpackb(frame, strict_map_key=False)
        for envelope in envelopes:
            if envelope[0] == CREDIT:
                messages, size_bytes = envelope[7]
                self.messages += messages
                self.size_bytes += size_bytes
                self.granted += messages
            elif envelope[0] < CREDIT:
                self.replies[envelope[1]] = (envelope, beside[1:] if envelope is envelopes[-1] else [])
        return envelopes

    def tell(self, tag, body) -> None:
        self.pay(body)
        self.send(TELL, 0, tag, body)

    def ask(self, tag, body, *, buffers=(), budget_us=10_000_000, **fields):
        """The reply's envelope and the buffers beside it."""
        number = next(self.ids)
        self.pay(body, buffers)
        self.send(ASK, number, tag, body, budget_us=budget_us, buffers=buffers, **fields)
        return self.reply(number)

    def reply(self, number):
        while number not in self.replies:
            self.receive()
        return self.replies.pop(number)


# The tests.


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    address = f"ipc://{tmp_path_factory.mktemp('bus')}/server"
    process = subprocess.Popen([sys.executable, "-c", SERVER, address], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield address
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def connect(address):
    context = zmq.Context()
    clients = []

    def made(**greeting):
        clients.append(Client(context, address, **greeting))
        return clients[-1]

    yield made
    for client in clients:
        client.socket.close()
    context.term()


def test_hello_is_answered_by_the_actors_own(connect):
    client = connect()

    ((kind, *_, body, _),) = client.receive()

    assert kind == WELCOME
    assert body[:4] == [PROTOCOL, "the-run", "server-1", 5]


def test_an_ask_is_answered_under_its_number(connect):
    client = connect()

    (kind, number, actor, incarnation, tag, *_, body, _), _ = client.ask("Echo", ["hello", 3])
    appended_field_left_out, _ = client.ask("Echo", ["hello"])

    assert (kind, number, actor, incarnation, tag, body) == (OK, 1, "server-1", 5, "Echoed", ["hello", 3])
    assert appended_field_left_out[7] == ["hello", 7]


def test_tells_far_beyond_the_window_all_arrive_when_credit_is_honoured(connect):
    client = connect()
    num = 3 * WINDOW_MESSAGES
    before = client.ask("Count", [])[0][7][1]

    for _ in range(num):
        client.tell("Note", ["x" * 500])
    after = client.ask("Count", [])[0][7][1]

    assert after - before == num
    assert client.granted >= num - WINDOW_MESSAGES


def test_large_buffers_travel_beside_the_envelope(connect):
    client = connect()
    raw = bytes(range(256)) * 400

    (kind, *_, tag, _, _, body, _), beside = client.ask(
        "Double", [msgpack.ExtType(BUFFER_BESIDE, msgpack.packb([0, len(raw)]))], buffers=[raw]
    )

    assert (kind, tag) == (OK, "Doubled")
    assert body[0].code == ARRAY_BESIDE
    assert msgpack.unpackb(body[0].data) == ["uint8", [2, len(raw)], 0]
    assert b"".join(beside) == raw * 2


def test_what_can_not_be_carried_out_is_answered_by_kind(connect):
    client = connect()

    failed, _ = client.ask("Fail", [])
    bad, _ = client.ask("Echo", [17, "text"])
    unknown, _ = client.ask("Nonsense", [])
    wrong_incarnation, _ = client.ask("Echo", ["x"], incarnation=4)
    any_incarnation, _ = client.ask("Echo", ["x"], incarnation=0)
    no_actor, _ = client.ask("Echo", ["x"], target="server-2")
    expired, _ = client.ask("Echo", ["x"], budget_us=1)

    assert failed[0] == ERROR
    assert failed[7] == "server-1: ValueError: no luck"
    assert bad[0] == unknown[0] == BAD_BODY
    assert wrong_incarnation[0] == WRONG_INCARNATION
    assert any_incarnation[0] == OK
    assert no_actor[0] == NO_ACTOR
    assert expired[0] == EXPIRED


def test_a_cancelled_ask_is_not_answered_and_its_work_ends(connect):
    client = connect()
    client.pay([])
    client.send(ASK, 99, "Hang", [], budget_us=60_000_000)
    before = client.ask("Count", [])[0][7][0]

    client.send(CANCEL, 99)
    after = client.ask("Count", [])[0][7][0]

    assert (before, after) == ("cancelled 0", "cancelled 1")
    assert 99 not in client.replies


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        ({"run": "another"}, "foreign-1 belongs to run 'another', server-1 belongs to run 'the-run'"),
        ({"protocol": 0}, "foreign-1 speaks protocol 0, server-1 speaks 2"),
        ({"schema": "0000000000000000"}, "foreign-1 has other message types (0000000000000000) than server-1 (5ca1ab1e5ca1ab1e)"),
    ],
    ids=["run", "protocol", "schema"],
)
def test_a_greeting_that_does_not_fit_is_refused_with_a_sentence(connect, greeting, said):
    client = connect(**greeting)
    client.send(ASK, 1, "Echo", ["x"])

    ((kind, *_, body, _),) = client.receive()

    assert kind == REFUSED
    assert said in body
    client.socket.rcvtimeo = 300
    with pytest.raises(zmq.Again):
        client.receive()


def test_a_client_that_states_the_schema_it_was_told_is_welcome(connect):
    ((*_, body, _),) = connect().receive()

    ((kind, *_),) = connect(schema=body[4]).receive()

    assert kind == WELCOME


# A live job, found by section 1.

START_S = 60.0


@pytest.fixture
def job(tmp_path):
    """The folder of a run that stands until it is ended; its process."""
    (tmp_path / "acting.yaml").write_text(ACTING)
    write_tokenizer(tmp_path / "model")
    settings = [f"model.path={tmp_path / 'model'}", "run.steps=100000", "engine.scripted.vocab_size=257"]
    command = [sys.executable, "-m", "rubato.runtime.cli", "launch", "acting.yaml", *settings, "--run-dir", "run"]
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=clean_environment(), stdout=out, stderr=out)
    try:
        yield tmp_path / "run", process
    finally:
        rubato("stop", "--run", tmp_path / "run", "--now", cwd=tmp_path)
        try:
            process.wait(30)
        finally:
            process.kill()
            process.wait()


def leases(store, run):
    """Name → what stands in each lease that has not lapsed."""
    place = f"rubato:{{{run}}}:lease"
    names = [name for name in store.hkeys(f"{place}:values") if name.startswith(b"actor/")]
    seconds, micros = store.time()
    until = dict(store.zrange(f"{place}:until", 0, -1, withscores=True))
    values = zip(names, store.hmget(f"{place}:values", names), strict=True) if names else ()
    return {
        name.decode().removeprefix("actor/"): msgpack.unpackb(value) for name, value in values if until[name] > seconds * 1_000_000 + micros
    }


def ready_engine(folder, process):
    """Run id and lease of `engine-1`, once it may be asked."""
    for _ in range(int(START_S / 0.2)):
        if (folder / "run.json").exists() and (url := json.loads((folder / "run.json").read_bytes())["state_url"]):
            run = json.loads((folder / "run.json").read_bytes())["id"]
            with redis.Redis.from_url(url, protocol=2) as store:
                lease = leases(store, run).get("engine-1", {})
            if lease.get("state") == "ready":
                return run, lease
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
    raise AssertionError(f"engine-1 was not ready within {START_S} s")


@pytest.mark.slow
def test_an_actor_of_a_live_job_is_found_and_asked(job):
    run, lease = ready_engine(*job)

    context = zmq.Context()
    client = Client(context, lease["address"], run=run)
    whom = {"target": lease["name"], "incarnation": lease["incarnation"]}
    (kind, _, actor, incarnation, tag, *_, body, _), _ = client.ask("Inspect", [], **whom)
    unknown, _ = client.ask("Nonsense", [], **whom)
    client.socket.close()
    context.term()

    assert (kind, actor, incarnation, tag) == (OK, "engine-1", lease["incarnation"], "EngineStatus")
    assert body[0][0] == "engine-1"
    assert unknown[0] == BAD_BODY
    assert (lease["role"], lease["public"], lease["node"]) == ("engine", "", "node-1")
