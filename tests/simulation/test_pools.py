"""A job whose role has pools, in one loop: who is in which, with what config, as actors come, die and are drained by pool."""

import asyncio

import pytest

from rubato.runtime.actor import Actor
from rubato.runtime.config import ActorConfig, Section
from rubato.runtime.config.compose import from_mapping
from rubato.runtime.embed import embed
from rubato.runtime.errors import LaunchError
from rubato.runtime.launch.agent_messages import AddActors, Added, DrainActors, NotAdded, RestartActors
from rubato.runtime.memory import MemoryStore
from rubato.runtime.registry import list_actors
from tests.virtual import virtual


class SpeedSection(Section):
    slots: int = 8


class Worker(Actor):
    role = "worker"
    least = 1

    class Config(ActorConfig):
        speed: SpeedSection = SpeedSection()

    async def on_start(self):
        self.metrics.gauge("slots", self.config.speed.slots)

    async def on_drain(self):
        await asyncio.sleep(3.0)


class Plain(Actor):
    role = "plain"


POOLS = {"fast": {"count": 2, "hardware": "h800", "set": {"speed.slots": 64}}, "slow": {"count": 1, "hardware": "h20"}}
JOB = {"actors": {"worker": {"class": f"{__name__}:Worker", "pools": POOLS}, "plain": {"class": f"{__name__}:Plain"}}}


class Pools:
    """The running job."""

    def __init__(self, job, store) -> None:
        self.job, self._store = job, store

    async def ask(self, request):
        return await self.job.ref("node-1").ask(request, timeout=60.0)

    async def seen(self):
        """Pool, hardware class and slots of each actor in the Store, by name."""
        await asyncio.sleep(2.0)  # two beats: what they publish is in the Store
        found = [record for record in await list_actors(self._store) if record.role != "node"]
        return {r.name: (r.pool, r.hardware, r.metrics.get("slots")) for r in found}


@pytest.fixture
def job(tmp_path):
    """Opens the job; for use on the virtual loop."""

    class Opened:
        async def __aenter__(self):
            store = MemoryStore()
            self._embedded = embed(from_mapping(JOB), tmp_path / "run", store=store)
            return Pools(await self._embedded.__aenter__(), store)

        async def __aexit__(self, *error):
            return await self._embedded.__aexit__(*error)

    return Opened()


FAST, SLOW, PLAIN = ("fast", "h800", 64), ("slow", "h20", 8), ("", "", None)


@virtual
async def test_each_actor_is_in_its_pool_with_the_pool_s_config(job):
    async with job as pools:
        assert await pools.seen() == {"plain-1": PLAIN, "worker-1": FAST, "worker-2": FAST, "worker-3": SLOW}


@virtual
async def test_actors_are_added_to_a_pool_and_stay_in_it_when_they_start_again(job):
    async with job as pools:
        added = await pools.ask(AddActors("worker", 2, pool="slow"))
        again = await pools.ask(RestartActors(("worker-4",)))
        seen = await pools.seen()

    assert (added, again) == (Added(("worker-4", "worker-5")), Added(("worker-4",)))
    assert (seen["worker-4"], seen["worker-5"]) == (SLOW, SLOW)


@virtual
async def test_a_pool_is_drained_as_a_whole_and_asking_again_says_the_same(job):
    async with job as pools:
        drained = await pools.ask(DrainActors((), "fast"))
        seen = await pools.seen()
        again = await pools.ask(DrainActors((), "fast"))
        more = await pools.ask(AddActors("worker", 1, pool="fast"))
        one_and_a_pool = await pools.ask(DrainActors(("plain-1",), "fast"))
        left = await pools.seen()

    assert (drained.names, again.names) == (("worker-1", "worker-2"), ())
    assert drained.drained_s == 3.0
    assert seen == {"plain-1": PLAIN, "worker-3": SLOW}
    assert (more, one_and_a_pool.names) == (Added(("worker-4",)), ("plain-1", "worker-4"))
    assert left == {"worker-3": SLOW}


@virtual
async def test_what_still_drains_keeps_its_name_and_its_place(job):
    async with job as pools, asyncio.TaskGroup() as tasks:
        draining = tasks.create_task(pools.ask(DrainActors((), "slow")))
        await asyncio.sleep(1.0)
        added = await pools.ask(AddActors("worker", 1, pool="fast"))
        assert not draining.done()
        await draining
        seen = await pools.seen()

    assert added == Added(("worker-4",))
    assert (seen["worker-4"], "worker-3" in seen) == (FAST, False)


REFUSED = [
    (AddActors("worker", 1), "worker has the pools fast, slow. Say which with --pool."),
    (AddActors("worker", 1, pool="slo"), "slo is not a pool of worker. Did you mean slow?"),
    (AddActors("plain", 1, pool="slow"), "plain has no pools, so there is no slow. Leave --pool out."),
    (DrainActors((), "fasst"), "fasst is not a pool of this run. Did you mean fast?"),
    (DrainActors((), "x"), "x is not a pool of this run. Its pools are fast, slow."),
]


@virtual
async def test_a_pool_that_is_not_there_is_refused_in_one_sentence(job):
    async with job as pools:
        for request, sentence in REFUSED:
            assert await pools.ask(request) == NotAdded(sentence)
        await pools.ask(DrainActors((), "fast"))
        last = await pools.ask(DrainActors((), "slow"))

    assert last.why.startswith("worker-3 can't be drained: a run needs at least 1 worker.")


@virtual
async def test_one_process_can_not_be_pinned_in_parts(tmp_path):
    tree = {"actors": {"worker": {"class": f"{__name__}:Worker", "pools": {"fast": {"cores": 1}}}}}

    with pytest.raises(LaunchError, match=r"^actors.worker.pools.fast gives its processes GPUs, cores or an environment"):
        async with embed(from_mapping(tree), tmp_path / "run"):
            raise AssertionError("it began")
    assert not (tmp_path / "run").exists()
