"""A run keeps the hosts that its config asks for, over any placer: here one that a script answers for, on virtual time."""

import asyncio
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from rubato.runtime.actor import Actor
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.errors import ConfigError, LaunchError
from rubato.runtime.host import Ending
from rubato.runtime.launch.agent import JobOutcome
from rubato.runtime.launch.host_list import HostRow, host_rows, name_key
from rubato.runtime.launch.placer import BACKENDS, HostSpec, PlacedHosts, join_command, placed_hosts, placer_problems, specs_of
from rubato.runtime.memory import MemoryStore
from rubato.runtime.registry import ActorRecord
from rubato.runtime.store.store import StoreUnavailable
from tests.contract.placers import ScriptedPlacer
from tests.virtual import virtual

ACTOR = "rubato.runtime.actor:Actor"
JOB = {
    "bus": {"host": "127.0.0.1"},
    "actors": {
        "engine": {"class": ACTOR, "pools": {"near": {"count": 1}, "far": {"count": 0, "gpus": 2, "cores": 1, "labels": ["h20"]}}},
        "env": {"class": ACTOR},
    },
    "launch": {"hosts": {"remote": {"count": 2, "pools": {"far": 3, "env": 4}}}},
}


class Agent:
    """What of a node agent the hosts are kept with: its tasks, its user and the job's outcome."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.spawn, self.screen, self.store, self.job = tasks.create_task, self, MemoryStore(), from_mapping(JOB)
        self.over = asyncio.get_running_loop().create_future()
        self.notices: list[str] = []
        self.ended: list[str] = []
        self.hosts = SimpleNamespace(ended=self.ended.append)

    def notice(self, text: str, *, good: bool = False) -> None:
        self.notices.append(text)

    def end(self, outcome: JobOutcome) -> None:
        if not self.over.done():
            self.over.set_result(outcome)


@asynccontextmanager
async def keeping(spec: HostSpec, limit_s: float = 300.0):
    placer = ScriptedPlacer()
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(tasks)
        hosts = PlacedHosts(placer, {spec.name: spec}, "token", agent, limit_s)  # type: ignore[arg-type]
        hosts.begin()
        await asyncio.sleep(1.0)
        yield placer, agent, hosts
        await hosts.end()
    assert placer.hosts == []
    assert placer.waiting == 0


@virtual
async def test_every_host_is_asked_for_with_all_that_it_brings():
    async with keeping(HostSpec("far", 2, {"far": 3}, {"env": 4}, labels=("h20", "ib"))) as (placer, _, _):
        commands = [host.join for host in placer.hosts]

    assert [command.arguments for command in commands] == [
        ("add", f"host.name=far-{number}", 'host.labels=["h20", "ib"]', "--pools", "far=3,env=4", "--join", "-") for number in (1, 2)
    ]
    assert all("token" not in command.arguments for command in commands)
    assert commands[0].token == "token"


@virtual
async def test_a_host_that_is_lost_or_dies_is_asked_for_anew():
    async with keeping(HostSpec("far", 1)) as (placer, agent, _):
        placer.hosts[0].ends(Ending("lost", "its node went away", lost=True))
        await asyncio.sleep(1.0)
        placer.hosts[0].ends(Ending.of(1, "it broke"))
        await asyncio.sleep(2.0)
        again = len(placer.hosts)

    assert again == 1
    assert len(placer.asked) == 3
    assert agent.notices == [
        "the host far-1 is gone (lost) after 1.0 s: its node went away; asking for another in 0.5 s (1 of 5)",
        "the host far-1 is gone (exit 1) after 0.5 s: it broke; asking for another in 1.0 s (2 of 5)",
    ]
    assert not agent.over.done()


@virtual
async def test_a_host_that_left_in_order_is_not_asked_for_again():
    async with keeping(HostSpec("far", 1)) as (placer, agent, _):
        placer.hosts[0].signal(signal.SIGTERM)
        await asyncio.sleep(100.0)

    assert len(placer.asked) == 1
    assert agent.notices == []


@virtual
async def test_the_list_of_hosts_says_what_has_become_of_each():
    async with keeping(HostSpec("far", 2, {"far": 3}, {"env": 4})) as (placer, agent, _):
        placed = await host_rows(agent.store)
        placer.hosts[0].ends(Ending("lost", "its node went away", lost=True))
        await asyncio.sleep(0.1)
        lost = await host_rows(agent.store)
        await asyncio.sleep(2.0)
        node = ActorRecord("node-2", "node", "ipc://2", 1, 7, "vm", "ready", public="tcp://10.0.0.6:1")
        engines = [ActorRecord(f"engine-{i}", "engine", "", 1, 8, "vm", "ready", node="node-2", pool="far") for i in (1, 2)]
        for record in (node, *engines):
            await agent.store.lease(f"actor/{record.name}", 1, msgspec.msgpack.encode(record), 60.0)
        await agent.store.write({name_key("node-2"): b"far-1"})
        joined = await host_rows(agent.store)

    row = HostRow("far-1", "here", "scripted-1", {"far": 3, "env": 4}, "placed")
    assert placed == [row, structs.replace(row, name="far-2", id="scripted-2")]
    assert [(row.name, row.state) for row in lost] == [("far-1", "lost"), ("far-2", "placed")]
    assert joined[0] == HostRow(
        "far-1", "here", "scripted-3", {"far": 2}, "ready", "node-2", "vm", "tcp://10.0.0.6:1", ["engine-1", "engine-2"]
    )
    assert joined[1:] == placed[1:]


@virtual
async def test_while_the_store_is_away_what_becomes_of_hosts_is_kept_and_the_newest_stands(monkeypatch):
    async with keeping(HostSpec("far", 1)) as (placer, agent, _):
        writing, away = agent.store.write, asyncio.Event()

        async def write(changes):
            if not away.is_set():
                raise StoreUnavailable("away")
            await writing(changes)

        monkeypatch.setattr(agent.store, "write", write)
        placer.hosts[0].ends(Ending("lost", "its node went away", lost=True))
        await asyncio.sleep(3.0)
        before = await host_rows(agent.store)
        away.set()
        await asyncio.sleep(3.0)
        after = await host_rows(agent.store)

    assert [(row.id, row.state) for row in before] == [("scripted-1", "placed")]
    assert [(row.id, row.state) for row in after] == [("scripted-2", "placed")]


@virtual
async def test_a_host_that_can_not_be_placed_ends_the_job_with_the_reason():
    async with keeping(HostSpec("none", 1, gpus=9)) as (_, agent, _):
        outcome = await agent.over

    assert outcome == JobOutcome("failed", "the host none-1 can't be had (not placed): no node has 9 GPUs", "none-1")


@virtual
async def test_a_host_that_does_not_come_in_time_ends_the_job_and_is_no_longer_asked_for():
    async with keeping(HostSpec("later", 1), limit_s=60.0) as (placer, agent, _):
        outcome = await agent.over
        waiting = placer.waiting

    assert "none came within 60 s (launch.place_timeout_s)" in outcome.sentence
    assert waiting == 0


@virtual
async def test_a_host_in_place_of_a_lost_one_is_asked_for_until_it_comes():
    async with keeping(HostSpec("later", 1), limit_s=60.0) as (placer, agent, _):
        placer.room.set()
        await asyncio.sleep(1.0)
        placer.room.clear()
        placer.hosts[0].ends(Ending("lost", lost=True))
        await asyncio.sleep(500.0)
        asked, over = len(placer.asked), agent.over.done()
        placer.room.set()
        await asyncio.sleep(10.0)
        back = len(placer.hosts)

    assert asked > 5
    assert not over
    assert back == 1


@virtual
async def test_a_host_that_is_lost_again_and_again_ends_the_job():
    async with keeping(HostSpec("far", 1)) as (placer, agent, _):
        while not agent.over.done():
            for host in tuple(placer.hosts):
                host.ends(Ending.of(1, "it broke"))
            await asyncio.sleep(0.1)

    assert len(placer.asked) == 6
    assert agent.over.result().sentence == "the host far-1 can't be had after 6 attempts (exit 1): it broke"


@virtual
async def test_a_run_that_is_over_waits_for_no_host_and_ends_the_deaf():
    clock = asyncio.get_running_loop().time
    async with keeping(HostSpec("far", 1)) as (placer, _, hosts):
        host = placer.hosts[0]
        host.join = host.join._replace(arguments=("deaf",))
        hosts.host.start("far-2", hosts.host._hosted["far-1"].budget)
        began = clock()

    ended = await host.ended()
    assert ended.code == -9
    assert clock() - began < 15.0  # of virtual seconds: it is killed LEAVE_S after it was asked to go


class Faulty(ScriptedPlacer):
    async def place(self, spec, join):
        raise RuntimeError("its engine is gone")


@virtual
async def test_a_placer_that_raises_ends_the_job_and_is_closed(tmp_path):
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(tasks)
        config = from_mapping(JOB, ["launch.backend=tests.unit.runtime.launch.test_placed_hosts:Faulty"])
        async with placed_hosts(config, Path(tmp_path), "token", agent):  # type: ignore[arg-type]
            outcome = await agent.over

    assert outcome.sentence == "the host remote-1 can't be had (not placed): RuntimeError: its engine is gone"


class Forgetful(ScriptedPlacer):
    async def place(self, spec, join):
        await super().place(spec, join)


class Impatient(ScriptedPlacer):
    async def place(self, spec, join):
        raise TimeoutError("the queue of its engine did not answer within 3 s")


@virtual
@pytest.mark.parametrize(
    ("placer", "why"),
    [
        (Forgetful, "place() of launch.backend returned None, which is no PlacedHost: its id is no text. Mend the placer."),
        (Impatient, "TimeoutError: the queue of its engine did not answer within 3 s"),
    ],
)
async def test_what_is_wrong_with_a_placer_is_said_in_its_own_words(tmp_path, placer, why):
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(tasks)
        config = from_mapping(JOB, [f"launch.backend={__name__}:{placer.__name__}"])
        async with placed_hosts(config, tmp_path, "token", agent):  # type: ignore[arg-type]
            outcome = await agent.over

    assert outcome == JobOutcome("failed", f"the host remote-1 can't be had (not placed): {why}", "remote-1")


async def cling() -> None:
    """What no cancellation ends."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


class Clinging(ScriptedPlacer):
    async def place(self, spec, join):
        await cling()


@virtual
async def test_a_placer_that_does_not_let_go_ends_the_job_and_holds_it_up_no_longer(tmp_path):
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(tasks)
        config = from_mapping(JOB, [f"launch.backend={__name__}:Clinging"])
        async with placed_hosts(config, tmp_path, "token", agent):  # type: ignore[arg-type]
            outcome = await agent.over

    said = "place() of launch.backend does not let go: it was cancelled, and did not end within 20 s"
    assert outcome.sentence == f"the host remote-1 can't be had (not placed): {said}"


@virtual
async def test_a_run_that_is_over_does_not_wait_for_a_placer_that_does_not_let_go(tmp_path):
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(tasks)
        config = from_mapping(JOB, [f"launch.backend={__name__}:Clinging"])
        async with placed_hosts(config, tmp_path, "token", agent):  # type: ignore[arg-type]
            await asyncio.sleep(5.0)

    assert not agent.over.done()


class Keeping(ScriptedPlacer):
    """Gives no host back."""

    async def place(self, spec, join):
        host = await super().place(spec, join)
        host.signal = lambda number: None
        host.ended = host.release = cling
        return host

    async def close(self):
        await cling()


@virtual
async def test_a_run_that_is_over_ends_though_its_placer_gives_no_host_back(tmp_path):
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(tasks)
        config = from_mapping(JOB, [f"launch.backend={__name__}:Keeping"])
        async with placed_hosts(config, tmp_path, "token", agent):  # type: ignore[arg-type]
            await asyncio.sleep(5.0)

    assert not agent.over.done()


class Careless(ScriptedPlacer):
    """Raises wherever the launcher does not wait for a result."""

    async def place(self, spec, join):
        host = await super().place(spec, join)
        release = host.release

        async def released():
            await release()
            raise RuntimeError("once more")

        host.release = released
        return host

    async def close(self):
        await super().close()
        raise RuntimeError("it was closed already")


@virtual
async def test_a_placer_that_raises_as_it_gives_hosts_back_spoils_no_run(tmp_path):
    async with asyncio.TaskGroup() as tasks:
        agent = Agent(tasks)
        config = from_mapping(JOB, ["launch.backend=tests.unit.runtime.launch.test_placed_hosts:Careless"])
        async with placed_hosts(config, Path(tmp_path), "token", agent):  # type: ignore[arg-type]
            await asyncio.sleep(5.0)

    assert not agent.over.done()


class Unmade:
    def __init__(self, config, folder):
        raise RuntimeError("no cluster")


async def test_a_placer_that_can_not_be_made_is_one_sentence(tmp_path):
    config = from_mapping(JOB, ["launch.backend=tests.unit.runtime.launch.test_placed_hosts:Unmade"])

    with pytest.raises(LaunchError, match=r"test_placed_hosts:Unmade can't be made: RuntimeError: no cluster"):
        async with placed_hosts(config, tmp_path, "token", None):  # type: ignore[arg-type]
            pass


@virtual
async def test_a_host_that_was_killed_is_not_said_to_be_out_of_reach_nor_quoted():
    async with keeping(HostSpec("far", 1)) as (placer, agent, _):
        await agent.store.write({name_key("node-2"): b"far-1", name_key("node-3"): b"far-2"})
        placer.hosts[0].ends(Ending.of(-9, "node-2 joined the run with engine-2"))
        await asyncio.sleep(1.0)

    assert agent.notices == ["the host far-1 is gone (signal 9) after 1.0 s; asking for another in 0.5 s (1 of 5)"]
    assert agent.ended == ["node-2"]


@virtual
async def test_of_two_nodes_of_one_name_the_older_is_lost():
    async with keeping(HostSpec("far", 1)) as (_, agent, _):
        for number in (2, 3):
            record = ActorRecord(f"node-{number}", "node", f"ipc://{number}", number, 7, "vm", "ready")
            await agent.store.lease(f"actor/{record.name}", number, msgspec.msgpack.encode(record), 60.0)
            await agent.store.write({name_key(record.name): b"far-1"})
        rows = await host_rows(agent.store)

    assert [(row.name, row.state, row.id) for row in rows] == [("node-2", "lost", "vm"), ("far-1", "ready", "scripted-1")]


# -- from the config ------------------------------------------------------------------------------------------------


def test_a_host_must_have_what_its_pools_need_together():
    specs = specs_of(from_mapping(JOB))

    assert specs == {"remote": HostSpec("remote", 2, {"far": 3}, {"env": 4}, gpus=6, cpus=3, labels=("h20",))}
    assert join_command(specs["remote"], "remote-1", "secret").token == "secret"


@pytest.mark.parametrize(
    ("more", "gpus", "cpus", "labels"),
    [
        ([], 6, 3, ("h20",)),
        (["gpus=8", "cpus=32", "labels=[ib]"], 8, 32, ("ib", "h20")),
        (["gpus=1", "cpus=1", "labels=[h20]"], 6, 3, ("h20",)),
    ],
)
def test_a_host_is_asked_for_with_what_its_pools_need_at_least(more, gpus, cpus, labels):
    found = specs_of(from_mapping(JOB, [f"launch.hosts.remote.{each}" for each in more]))["remote"]

    assert (found.gpus, found.cpus, found.labels) == (gpus, cpus, labels)


def test_a_job_without_hosts_needs_no_placer():
    config = from_mapping(JOB, ["launch.hosts={}", "launch.backend=nowhere:Placer"])

    assert placer_problems(config) == []
    assert specs_of(config) == {}


@pytest.mark.parametrize("name", ["a\n", "a b", "node", "-a"])
def test_what_can_not_name_hosts_is_refused(name):
    with pytest.raises(ConfigError):
        from_mapping({**JOB, "launch": {"hosts": {name: {"pools": {"env": 1}}}}})


def test_the_number_of_an_allocation_is_its_address():
    assert from_mapping(JOB, ["launch.address=12345"]).launch.address == "12345"


class Only(Actor):
    most = 1


def test_hosts_that_bring_more_of_a_role_than_a_run_may_have_are_told_before_anything_starts():
    job = {**JOB, "actors": {**JOB["actors"], "only": {"class": f"{__name__}:Only"}}}
    job["launch"] = {"hosts": {"far": {"count": 2, "pools": {"only": 1}}}}

    assert placer_problems(from_mapping(job)) == ["launch.hosts brings 2 only beside 1 of the launching host: a run has at most 1"]


def test_a_backend_that_is_not_there_is_told_before_anything_starts():
    found = placer_problems(from_mapping(JOB, ["launch.backend=nowhere:Placer"]))

    assert found == [f"launch.backend: nowhere:Placer does not exist: there is no module nowhere. Or name one of {', '.join(BACKENDS)}."]


WRONG = [
    (["launch.hosts.remote.pools={fa: 1}"], "launch.hosts.remote.pools has fa, which is no pool of this job, nor a role without"),
    (["launch.hosts.remote.pools={engine: 1}"], "launch.hosts.remote.pools has engine, which is no pool of this job"),
    (["bus.host=''"], "launch.hosts needs bus.host, the address at which they reach this host"),
    (["launch.hosts.remote.pools={}"], "launch.hosts.remote.pools"),
    (["launch.hosts.remote.count=0"], "launch.hosts.remote.count"),
    (["launch.hosts={'a b': {pools: {far: 1}}}"], "a b can't be a name of hosts"),
    (["launch.hosts={node: {pools: {far: 1}}}"], "node can't be a name of hosts: node-1 is the launching one"),
]


@pytest.mark.parametrize(("overrides", "sentence"), WRONG)
def test_hosts_that_can_not_be_meant_are_refused(overrides, sentence):
    with pytest.raises(ConfigError) as refused:
        from_mapping(JOB, overrides)

    assert sentence in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
