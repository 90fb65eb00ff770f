"""What the simulation found in the runtime, each as a test of its own."""

import asyncio

import msgspec
import pytest

from rubato.bus.errors import Refused
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.runtime.actor import RunInfo
from rubato.runtime.config import ActorConfig
from rubato.runtime.errors import ActorFailed
from rubato.runtime.kernel import Kernel
from rubato.runtime.memory import MemoryBlobStore, MemoryStore
from rubato.runtime.observe.log import logger
from rubato.runtime.registry import list_actors
from rubato.sim.simtest import setup
from rubato.sim.simtest.faults import DEFAULT
from rubato.sim.simtest.network import FaultPlan, FaultyNetwork
from rubato.sim.simtest.run import Bench, faults_of, run
from rubato.sim.virtual import run_virtual
from tests.simulation.test_kernel import Client, Echo, Server

pytestmark = pytest.mark.slow

THEN = [kind for kind in DEFAULT if kind not in ("moves", "rank_lost")]
"""What seeds drew when they were found."""


def played(bench, seed, kinds, rounds=1):
    """The job and the faults that the seed drew when it was found."""
    then = setup.draw(seed, sessions=False)._replace(tail=False, drops=False)
    return run(bench, seed, faults_of(seed, kinds, rounds, setup=then), setup=then)


class SlowLeases(MemoryStore):
    """A renewal takes effect half a second after it was asked for."""

    async def lease(self, name, token, value, ttl_s):
        await asyncio.sleep(0.5)
        return await super().lease(name, token, value, ttl_s)


class LateReplies(MemoryStore):
    """A renewal takes effect at once; `asleep_s` passes before the next one is answered, as if the process had been stopped."""

    asleep_s = 0.0

    async def lease(self, name, token, value, ttl_s):
        held = await super().lease(name, token, value, ttl_s)
        asleep_s, self.asleep_s = self.asleep_s, 0.0
        await asyncio.sleep(asleep_s)
        return held


def made(actor_class, name, network, store, folder):
    return Kernel(
        actor_class,
        ActorConfig(),
        name=name,
        incarnation=1,
        run=RunInfo("test", folder, 7, 1),
        transport=MemoryTransport(Identity("test", name, 1), network),
        store=store,
        blobs=MemoryBlobStore(),
        log=logger("rubato.test"),
    )


def test_an_actor_that_lives_is_found_again_soon_after_its_link_broke(tmp_path):
    async def main():
        network, store = FaultyNetwork(FaultPlan(seed=1)), MemoryStore()
        server, client = (made(c, n, network, store, tmp_path) for c, n in ((Server, "server-1"), (Client, "client-1")))
        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(kernel.serve()) for kernel in (server, client)]
            await server.ready.wait()
            await client.ref("server-1").ask(Echo("before"), timeout=1)
            network.snap("client-1", "server-1", "the link broke")
            await asyncio.sleep(0.1)
            assert client.directory.find("server-1") is None

            reply = await client.ref("server-1").ask(Echo("after"), timeout=4)

            for task in serving:
                task.cancel()
        return reply.text

    assert run_virtual(main) == "after"


def test_a_renewal_under_way_does_not_bring_the_lease_of_a_stopped_actor_back(tmp_path):
    async def main():
        store = SlowLeases()
        kernel = made(Server, "server-1", MemoryNetwork(), store, tmp_path)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(kernel.serve())
            await kernel.ready.wait()
            await asyncio.sleep(0.6)  # the first beat's renewal is on its way
            kernel.stop()
        await asyncio.sleep(1.0)
        return await list_actors(store)

    assert run_virtual(main) == []


def test_an_actor_stopped_in_the_middle_of_a_renewal_does_not_take_its_name_from_its_successor(tmp_path):
    async def main():
        store = LateReplies()
        sleeper = made(Server, "server-1", MemoryNetwork(), store, tmp_path)
        with pytest.RaisesGroup(pytest.RaisesExc(ActorFailed, match="took the name"), flatten_subgroups=True):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sleeper.serve())
                await sleeper.ready.wait()
                store.asleep_s = 12.0
                await asyncio.sleep(11.5)  # its lease has lapsed
                assert await store.lease("actor/server-1", 7, b"the successor", 60.0)
        return await store.leases("actor/")

    assert run_virtual(main)["actor/server-1"].token == 7


def test_messages_for_another_incarnation_cost_no_credit(tmp_path):
    async def main():
        network, store = MemoryNetwork(), MemoryStore()
        server, client = (made(c, n, network, store, tmp_path) for c, n in ((Server, "server-1"), (Client, "client-1")))
        async with asyncio.TaskGroup() as tasks:
            serving = [tasks.create_task(kernel.serve()) for kernel in (server, client)]
            await server.ready.wait()
            await client.ref("server-1").ask(Echo("here"), timeout=1)
            stale = next(record for record in await list_actors(store) if record.name == "server-1")
            wrong = msgspec.structs.replace(stale, incarnation=9)
            for _ in range(200):
                with pytest.raises(Refused):
                    await client.courier.ask(wrong, Echo("gone"), asyncio.get_running_loop().time() + 1.0)
            for task in serving:
                task.cancel()

    run_virtual(main)


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.close()


def test_a_buffer_frozen_in_the_middle_of_a_write_to_the_ledger_leaves_one_line_per_end(bench):
    """Once "samples.jsonl has 138 lines for 132 ends". tests/unit/actors/samples/test_ledger.py stops a zombie at each such place."""
    outcome = played(bench, 14330221, [kind for kind in THEN if kind != "store_loss"])

    assert outcome.violation is None


@pytest.mark.parametrize(
    "seed", [65000227, 1795360089, 1795348492, 1795345386, 710105, 5100254, 7300009, 7300592, 8800838, 8801005, 1795407518, 1795416424]
)
def test_seeds_that_found_a_fault_with_a_store_that_forgets(bench, seed):
    """Once: a zombie buffer that put a sample; a sample acknowledged after the Store had lost it; an attempt answered to nobody; a
    group sealed without the samples that the Store forgot; no tickets for steps to be trained anew at the end of the run; an attempt given
    out again, answered with what the first one had sampled; a step bound to other groups after the Store forgot which it had; an
    incarnation drawn twice; a group that grew too old while it was being sealed, whose slot nobody freed; a zombie
    that took its name from a living successor; engines that held weights of which buffer and trainer knew nothing any more. And
    once a false alarm: a process that stood still as it started found its successor at its address, which no two processes share outside."""
    outcome = played(bench, seed, THEN)

    assert outcome.violation is None


@pytest.mark.parametrize("seed", [41000403, 41000612, 41000991])
def test_seeds_that_found_a_fault_with_three_times_the_faults(bench, seed):
    """Once: a checkpoint without the receipts of steps that its trainer's predecessor had claimed; a trainer that went by a version
    which the buffer had forgotten, and published nothing. And once a false alarm: α was lowered while the store was losing steps bound before."""
    outcome = played(bench, seed, THEN, 3)

    assert outcome.violation is None


def test_a_trainer_that_was_replaced_may_train_in_vain_on_a_batch_that_the_store_forgot(bench):
    """A false alarm once: a trainer stood still with the batch of step 10, the Store lost that claim, its successor bound step 10 to other
    groups, and the first one trained on its own as it went on, before it heard that it had been replaced."""
    seed = 77100176
    then = setup.draw(seed)._replace(drops=False)

    assert run(bench, seed, faults_of(seed, DEFAULT, 3, setup=then), setup=then).violation is None


def test_a_seed_that_found_a_fault_with_moves_and_a_store_that_forgets(bench):
    """Once: a buffer that died and whose Store forgot twice knew nothing of weights that engines held, so it refused whatever they sampled;
    the trainer, told of them by the buffer before, waited for a batch and never published again."""
    seed = 1795546250

    assert run(bench, seed, faults_of(seed, DEFAULT)).violation is None


@pytest.mark.parametrize("seed", [2243067, 9600119, 9600204, 9600256, 9600831])
def test_seeds_that_found_a_fault_with_three_times_the_faults_and_lost_ranks(bench, seed):
    """Once: rollouts that had tickets of a version whose step the Store forgot, or tokens of one, waited for it, and its batch for them; the
    Store forgot two successors of a frozen buffer, and what it acknowledged then was not known to the second. And false alarms: some groups of a step
    were written again after α was lowered; an answer of a session was written in the instant in which another request was told that it is over."""
    assert run(bench, seed, faults_of(seed, DEFAULT, 3)).violation is None
