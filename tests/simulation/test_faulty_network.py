import asyncio
import math

import msgspec
import pytest

from rubato.bus.codec import Envelope, EnvelopeKind
from rubato.bus.link import Identity
from rubato.bus.memory import MemoryNetwork, MemoryTransport
from rubato.sim.simtest.network import HEARTBEAT_S, FaultPlan, FaultyNetwork, Partition
from rubato.sim.virtual import run_virtual


def run(work):
    return run_virtual(lambda: work)


def tell(number: int) -> Envelope:
    return Envelope(EnvelopeKind.TELL, number, "engine-1", 1, "Note", 0, b"", msgspec.Raw(b"\xc0"))


class Pair:
    """A sender and a receiver over a faulty network, and everything each of them saw, with the time."""

    def __init__(self, plan: FaultPlan | None) -> None:
        self.network = FaultyNetwork(plan) if plan else MemoryNetwork()
        self.proxy = MemoryTransport(Identity("run", "proxy-1", 1), self.network)
        self.engine = MemoryTransport(Identity("run", "engine-1", 1), self.network)
        self.seen: list[tuple[str, float, object]] = []

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for name, transport in (("proxy", self.proxy), ("engine", self.engine)):
            await transport.start(
                lambda d, name=name: self.seen.append((name, loop.time(), (d.peer, d.envelope.id))),
                lambda peer, reason, _, name=name: self.seen.append((f"{name} down", loop.time(), (peer, reason))),
            )

    def of(self, kind: str) -> list:
        return [what for name, _, what in self.seen if name == kind]

    def times(self, kind: str) -> list[float]:
        return [when for name, when, _ in self.seen if name == kind]


async def talk(plan: FaultPlan | None, messages: int = 200, gap_s: float = 0.01) -> Pair:
    pair = Pair(plan)
    await pair.start()
    for number in range(messages):
        pair.proxy.post(pair.engine.address, tell(number))
        await asyncio.sleep(gap_s)
    await asyncio.sleep(60)
    return pair


ROUGH = {"delay_s": (0.0, 0.3), "stall_rate": 0.05, "stall_s": (0.1, 1.0), "break_rate": 0.03}


def test_without_a_plan_everything_arrives_at_once():
    pair = run(talk(None))

    assert [number for _, number in pair.of("engine")] == list(range(200))
    assert pair.of("proxy down") == []


@pytest.mark.parametrize("seed", range(20))
def test_on_every_link_a_prefix_arrives_in_order_and_each_loss_is_said_once_to_both_sides(seed):
    pair = run(talk(FaultPlan(seed=seed, **ROUGH)))

    arrived = [number for _, number in pair.of("engine")]
    links = list(dict.fromkeys(peer for peer, _ in pair.of("engine")))
    lost = [peer for peer, _ in pair.of("engine down")]
    assert arrived == sorted(set(arrived))
    assert len(lost) == len(set(lost))
    assert set(links) - set(lost) <= {links[-1]}
    assert len(pair.of("proxy down")) >= len(lost)
    assert len(pair.seen) > 100


def test_the_same_seed_replays_exactly_and_another_one_differs():
    first, again, other = (run(talk(FaultPlan(seed=seed, **ROUGH))).seen for seed in (1, 1, 2))

    assert first == again
    assert first != other


def test_delays_hold_frames_back_within_their_range():
    pair = run(talk(FaultPlan(seed=3, delay_s=(0.2, 0.3)), messages=1))

    assert 0.2 <= pair.times("engine")[0] <= 0.31


def test_nothing_goes_wrong_any_more_after_until():
    pair = run(talk(FaultPlan(seed=4, break_rate=1.0, until_s=1.0)))

    arrived = [number for _, number in pair.of("engine")]
    assert set(range(101, 200)) <= set(arrived)
    assert all(when <= 1.1 for when in pair.times("proxy down"))


def test_a_short_partition_delays_one_direction_and_leaves_the_other_open():
    cut = Partition(sender="proxy-*", receiver="engine-*", start_s=1.0, end_s=4.0)

    async def both_ways() -> Pair:
        pair = Pair(FaultPlan(seed=5, partitions=(cut,)))
        await pair.start()
        pair.proxy.post(pair.engine.address, tell(1))
        await asyncio.sleep(2)
        (peer, _), *_ = pair.of("engine")
        pair.proxy.post(pair.engine.address, tell(2))
        pair.engine.post(peer, tell(3))
        await asyncio.sleep(10)
        return pair

    pair = run(both_ways())

    assert pair.times("engine") == pytest.approx([0.0, 4.0])
    assert pair.times("proxy") == pytest.approx([2.0])
    assert pair.of("proxy down") == []


def test_a_partition_that_outlasts_the_heartbeats_breaks_the_link_for_both_even_when_idle():
    cut = Partition(sender="engine-1", receiver="*", start_s=1.0, end_s=100.0)

    async def idle() -> Pair:
        pair = Pair(FaultPlan(seed=6, partitions=(cut,)))
        await pair.start()
        pair.proxy.post(pair.engine.address, tell(1))
        await asyncio.sleep(3)
        (peer, _), *_ = pair.of("engine")
        pair.engine.post(peer, tell(2))
        await asyncio.sleep(50)
        return pair

    pair = run(idle())

    assert pair.times("proxy down") == pytest.approx([1.0 + HEARTBEAT_S])
    assert pair.times("engine down") == pytest.approx([1.0 + HEARTBEAT_S])
    assert "no heartbeat for 6 s" in pair.of("proxy down")[0][1]
    assert pair.of("proxy") == []


def test_a_link_opened_through_a_lasting_partition_is_reported_down():
    cut = Partition(sender="proxy-1", receiver="engine-1", start_s=0.0, end_s=math.inf)

    pair = run(talk(FaultPlan(seed=7, partitions=(cut,)), messages=1))

    assert pair.times("proxy down") == pytest.approx([HEARTBEAT_S])
    assert pair.of("engine") == []


@pytest.mark.parametrize("plan", [None, FaultPlan(seed=8, delay_s=(0.0, 0.1))])
def test_a_killed_endpoint_says_nothing_more_and_its_peers_hear_once(plan):
    async def killed() -> Pair:
        pair = Pair(plan)
        await pair.start()
        pair.proxy.post(pair.engine.address, tell(1))
        await asyncio.sleep(1)
        (peer, _), *_ = pair.of("engine")
        pair.engine.post(peer, tell(2))
        pair.engine.die()
        pair.engine.die()
        pair.proxy.post(pair.engine.address, tell(3))
        await asyncio.sleep(1)
        return pair

    pair = run(killed())

    assert len(pair.of("proxy down")) == 1
    assert [number for _, number in pair.of("engine")] == [1]
    assert pair.of("engine down") == []
