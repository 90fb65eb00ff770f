"""FabricController without a bus: the switch is the emulated one, or one that fails; time jumps."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from rubato.actors.fabric.reconciler import LEASE
from rubato.actors.fabric.templates import KEY
from rubato.actors.messages.fabric import Circuit
from rubato.bus.errors import Unknown
from rubato.runtime.memory import MemoryStore
from rubato.runtime.messages import BytesCounted, CountBytes
from rubato.runtime.store.store import Fence, Fenced, StoreUnavailable
from tests.unit.actors.fabric.conftest import ROLLOUT, SYNC

APART = {"rollout": ROLLOUT[:1], "sync": SYNC[:1]}
"""Phases that want the same engine's ports, so that no template serves both as fast as its own."""


def test_the_first_iteration_waits_for_its_circuits(scene):
    async def play(stage):
        await stage.iteration()

        report = await stage.report()
        assert report.reconfigurations == 2
        assert (report.hidden_s, report.exposed_s) == (0, pytest.approx(0.020))
        assert report.circuits == stage.circuits()

    scene(play)


def test_later_iterations_change_ahead_of_time_and_hide_the_delay(scene):
    async def play(stage):
        for _ in range(2):
            await stage.iteration(**APART)
        learned = await stage.report()

        for _ in range(10):
            await stage.iteration(**APART)

        report = await stage.report()
        assert report.reconfigurations - learned.reconfigurations == 20
        assert report.hidden_s - learned.hidden_s == pytest.approx(0.200)
        assert report.exposed_s == pytest.approx(learned.exposed_s)

    scene(play)


def test_a_phase_that_comes_early_waits_only_for_what_is_left(scene):
    async def play(stage):
        for _ in range(3):
            await stage.iteration(**APART)
        before = await stage.report()

        await stage.iteration(rollout_s=0.984, **APART)

        report = await stage.report()
        assert report.exposed_s - before.exposed_s == pytest.approx(0.006)
        assert report.hidden_s - before.hidden_s == pytest.approx(0.014)

    scene(play)


def test_an_announced_phase_finds_its_circuits_ready(scene):
    async def play(stage):
        stage.number = 1
        await stage.begins("rollout", ROLLOUT)
        await asyncio.sleep(1)
        await stage.begins("weight_sync", SYNC, in_s=0.5)
        await asyncio.sleep(0.5)
        await stage.begins("weight_sync", SYNC)
        await asyncio.sleep(0.5)

        report = await stage.report()
        assert (report.hidden_s, report.exposed_s) == (pytest.approx(0.010), pytest.approx(0.010))

    scene(play)


def test_phases_too_short_for_the_delay_keep_the_old_circuits(scene):
    async def play(stage):
        for _ in range(5):
            await stage.iteration(sync_s=0.008)

        assert (await stage.report()).reconfigurations <= 4
        assert stage.context.metrics.snapshot()["fabric/kept"] >= 4

    scene(play)


def test_a_repeated_intent_changes_nothing(scene):
    async def play(stage):
        for _ in range(3):
            await stage.begins("rollout", ROLLOUT)
            await asyncio.sleep(1)

        assert (await stage.report()).reconfigurations == 1

    scene(play)


def test_a_new_endpoint_joins_the_templates_of_every_phase(scene):
    async def play(stage):
        await stage.iteration()
        stage.number += 1

        await stage.begins("rollout", (*ROLLOUT, ("llm_proxy-1", "engine-3", 800)))
        await asyncio.sleep(1)

        book = stage.controller._templates.book
        assert "engine-3" in book.endpoints
        assert all(len({n for link in p.links for n in link}) == 5 for p in book.phases.values())

    scene(play)


def named(stage):
    """Circuits by the endpoints that they join, and the endpoints that are there."""
    names = stage.controller._templates.book.endpoints
    joined = [frozenset((names[c.ingress // 4], names[c.egress // 4])) for c in stage.circuits() if c.ingress < c.egress]
    return Counter(joined), set(names) - {""}


def test_an_engine_that_left_has_no_circuits_from_the_next_phase_on_and_a_new_one_gets_its_ports(scene):
    async def play(stage):
        await stage.iteration()
        assert named(stage)[1] == {"llm_proxy-1", "engine-1", "engine-2", "trainer-1"}

        await stage.controller.on_peers((), ("engine-2",))
        for engine in ("engine-2", "engine-3", "engine-3"):
            stage.number += 1
            told = engine if engine != "engine-2" else "engine-1"
            await stage.begins("rollout", (("llm_proxy-1", "engine-1", 1000), ("llm_proxy-1", told, 900)))
            await asyncio.sleep(1)
            await stage.begins("weight_sync", (("trainer-1", "engine-1", 5000), ("trainer-1", told, 5000)))
            await asyncio.sleep(0.1)
            circuits, endpoints = named(stage)
            await asyncio.sleep(0.2)

        assert endpoints == {"llm_proxy-1", "engine-1", "engine-3", "trainer-1"}, "all four places of a switch of 16 ports"
        assert circuits[frozenset(("trainer-1", "engine-3"))]

    scene(play, ports=16)


def test_an_engine_that_is_started_again_within_the_phase_keeps_its_ports(scene):
    async def play(stage):
        await stage.iteration()
        before = stage.controller._templates.book

        await stage.controller.on_peers((), ("engine-2",))
        await stage.controller.on_peers(("engine-2",), ())
        stage.number += 1
        await stage.begins("rollout")
        await asyncio.sleep(1)

        assert stage.controller._templates.book == before

    scene(play)


def test_what_left_while_there_was_no_controller_gives_its_ports_back(scene):
    store = MemoryStore()

    async def second(stage):
        await stage.begins("rollout", ROLLOUT[:1])
        await asyncio.sleep(1)
        await stage.begins("weight_sync", SYNC[:1])

        assert named(stage)[1] == {"llm_proxy-1", "engine-1", "trainer-1"}

    scene(lambda stage: stage.iteration(), store)
    scene(second, store)


def counts(stage, sent):
    """Actors that answer how many bytes they have sent each other so far, as `sent` says: by sender, receiver and kind."""

    def actor(name):
        async def answer(request):
            assert isinstance(request, CountBytes)
            return BytesCounted(1, {other: size for (who, other), size in sent.items() if who == name}, {})

        return answer

    for name in {name for way in sent for name in way}:
        stage.context.actors[name] = actor(name)
        stage.context.records[name] = SimpleNamespace(public="", node="node-1", provides=frozenset())


def test_a_phase_is_profiled_by_all_that_was_sent_in_it_and_not_by_what_was_sent_before_its_first_token(scene):
    async def play(stage):
        prompt, reply, put = ("llm_proxy-1", "engine-1"), ("engine-1", "llm_proxy-1"), ("env_manager-1", "sample_buffer-1")
        sent = Counter({prompt: 500, reply: 10, put: 10})
        counts(stage, sent)
        for _ in range(3):
            stage.number += 1
            await stage.begins("rollout")
            await asyncio.sleep(1)
            sent.update({prompt: 40_000, reply: 9_000, put: 70_000})
            await stage.begins("train_step")
            await asyncio.sleep(0.5)
            sent.update({put: 100})

        phases = stage.controller._templates.book.phases
        assert {(a, b): size for a, b, size in phases["rollout"].traffic} == {prompt: 40_000, reply: 9_000, put: 70_000}
        assert "train_step" not in phases, "control alone is worth no circuits"

    scene(play)


def test_messages_while_weights_travel_are_of_the_rollouts_that_begin(scene):
    async def play(stage):
        cache = ("engine-2", "engine-1")
        sent = Counter({cache: 1})
        counts(stage, sent)
        await stage.begins("train_step")
        await asyncio.sleep(1)
        stage.number = 1
        await stage.begins("weight_sync", SYNC)
        await asyncio.sleep(1)
        sent.update({cache: 3000})
        await stage.begins("rollout")
        await asyncio.sleep(1)
        sent.update({cache: 4000})
        await stage.begins("train_step")
        await asyncio.sleep(1)

        assert {p: f.traffic for p, f in stage.controller._templates.book.phases.items()} == {
            "weight_sync": SYNC, "rollout": ((*cache, 7000),),
        }  # fmt: skip

    scene(play)


def test_a_count_that_a_phase_ended_in_the_middle_of_says_nothing_of_either(scene):
    async def play(stage):
        way = ("llm_proxy-1", "engine-1")
        sent = Counter({way: 500})
        counts(stage, sent)
        await stage.begins("rollout")
        await asyncio.sleep(1)
        answer, held = stage.context.actors["engine-1"], asyncio.Event()

        async def slow(request):
            await held.wait()
            return await answer(request)

        stage.context.actors["engine-1"] = slow
        sent[way] += 1000
        stage.number = 1
        await stage.begins("train_step")
        await asyncio.sleep(0.1)
        await stage.begins("rollout")
        held.set()
        await asyncio.sleep(0.1)
        sent[way] += 7
        stage.number = 2
        await stage.begins("train_step")
        await asyncio.sleep(0.1)

        assert {p: f.traffic for p, f in stage.controller._templates.book.phases.items()} == {"rollout": ((*way, 1000),)}

    scene(play)


def test_a_switch_that_comes_back_empty_gets_its_circuits_again(scene):
    async def play(stage):
        await stage.iteration()
        wanted = stage.circuits()
        del stage.context.actors["optical_switch"]
        await stage.controller.on_peers((), ("optical_switch-1",))
        await asyncio.sleep(1)

        stage.start_switch()
        await stage.controller.on_peers(("optical_switch-1",), ())
        await asyncio.sleep(1)

        assert stage.circuits() == wanted

    scene(play)


def test_without_a_switch_intents_are_taken_and_nothing_is_asked(scene):
    async def play(stage):
        del stage.context.actors["optical_switch"]

        for _ in range(3):
            await stage.iteration()

        assert (await stage.report()).reconfigurations == 0
        assert stage.context.asked == []
        assert asyncio.get_running_loop().time() == pytest.approx(4.5)

    scene(play)


def test_a_switch_that_does_not_answer_is_asked_less_and_less_often(scene):
    async def play(stage):
        async def dead(request):
            raise Unknown("the link broke")

        stage.context.actors["optical_switch"] = dead
        await stage.begins("rollout", ROLLOUT)
        await asyncio.sleep(60)
        assert len(stage.context.asked) == 7, "at 0, then after 0.5, 1, 2, 4, 8, 16 seconds"

        stage.start_switch()
        await asyncio.sleep(60)

        assert (await stage.report()).reconfigurations == 1

    scene(play)


def test_a_restarted_controller_knows_the_templates(scene):
    store = MemoryStore()

    async def first(stage):
        await stage.iteration()

    async def second(stage):
        assert set(stage.controller._templates.book.phases) == {"rollout", "weight_sync"}
        await stage.begins("rollout")
        await asyncio.sleep(1)

        assert (await stage.report()).reconfigurations == 1

    scene(first, store)
    scene(second, store)


def test_a_record_that_can_not_be_read_is_profiled_again(scene):
    store = MemoryStore()

    asyncio.run(store.write({KEY: b"not a book"}))

    async def play(stage):
        await stage.iteration()

        assert (await stage.report()).reconfigurations == 2

    scene(play, store)


def test_a_replaced_controller_can_not_write(scene):
    store = MemoryStore()

    async def play(stage):
        await store.write({}, fence=Fence("fabric_controller-1", 2))
        await stage.begins("rollout", ROLLOUT)
        await asyncio.sleep(1)

    with pytest.raises(ExceptionGroup) as failed:
        scene(play, store)
    assert failed.group_contains(Fenced)


def test_the_lease_outlasts_a_change_of_slow_mirrors(scene):
    async def play(stage):
        stage.number = 1
        await stage.begins("rollout", ROLLOUT)
        await asyncio.sleep(119)
        assert (await stage.report()).stage == "tune"
        assert LEASE in await stage.context.store.leases(LEASE)

        await asyncio.sleep(2)

        assert (await stage.report()).reconfigurations == 1

    scene(play, reconfiguration_s=120.0)


def test_a_fabric_that_is_switched_off_leaves_the_switch_alone(scene):
    async def play(stage):
        await stage.iteration()

        assert stage.context.asked == []

    scene(play, enabled=False)


@pytest.mark.parametrize("at", ["validate", "fence", "drain", "apply", "tune", "verify", "commit", "idle"])
@pytest.mark.parametrize("change", [1, 2])
def test_killed_in_any_stage_its_successor_ends_with_the_circuits_that_are_wanted(scene, at, change):
    store, switches = MemoryStore(), []

    class KilledError(Exception):
        pass

    async def dies(stage):
        entered = []

        def enter(name):
            entered.append(name)
            if name == at and entered.count(at) == change:
                raise KilledError

        stage.controller._enter = enter
        switches.append(stage.switch)
        await stage.iteration()

    async def follows(stage):
        # The switch stays as it was left; its successor's loop begins at 0 again, and so do the mirrors.
        stage.switch.device = switches[0].device
        stage.switch._dialect._device = stage.switch.device
        stage.switch.device._busy_until = 0.0
        before = stage.controller._ledger.entry
        await asyncio.sleep(2)
        assert stage.controller._ledger.entry.stage == "committed"
        await stage.iteration()

        entry = stage.controller._ledger.entry
        assert stage.circuits() == tuple(Circuit(*cross) for cross in sorted(entry.good))
        assert set(stage.circuits()) == set((await stage.report()).circuits)
        assert (entry.stage, entry.phase) == ("committed", "weight_sync")
        assert entry.change > before.change

    with pytest.raises(ExceptionGroup) as killed:
        scene(dies, store)
    assert killed.group_contains(KilledError)
    scene(follows, store, incarnation=2)


def test_while_the_store_is_away_circuits_stay_and_the_change_is_made_later(scene):
    class Flaky(MemoryStore):
        away = False

        async def write(self, changes, *, fence=None):
            if self.away:
                raise StoreUnavailable("gone")
            await super().write(changes, fence=fence)

    store = Flaky()

    async def play(stage):
        await stage.begins("rollout", ROLLOUT)
        await asyncio.sleep(1)
        before = stage.circuits()
        store.away = True
        stage.number += 1
        await stage.begins("weight_sync", SYNC)
        await asyncio.sleep(5)
        assert stage.circuits() == before != ()
        assert not (await stage.report()).electrical

        store.away = False
        await asyncio.sleep(30)

        assert (await stage.report()).reconfigurations == 2
        assert stage.circuits() != before

    scene(play, store)


def test_a_port_that_fails_is_left_out_from_then_on(scene):
    async def play(stage):
        stage.switch.device.dead_ports.add(0)

        await stage.iteration()

        used = {port for circuit in stage.circuits() for port in (circuit.ingress, circuit.egress)}
        assert used
        assert 0 not in used
        assert stage.circuits() == (await stage.report()).circuits
        assert not (await stage.report()).electrical

    scene(play)


def test_an_endpoint_without_live_ports_leaves_all_to_the_electrical_path_until_the_switch_is_back(scene):
    async def play(stage):
        stage.switch.device.dead_ports |= {0, 1, 2, 3}
        await stage.iteration(sync_s=20)
        assert (await stage.report()).electrical

        stage.start_switch()
        await stage.controller.on_peers(("optical_switch-1",), ("optical_switch-1",))
        await asyncio.sleep(1)

        report = await stage.report()
        assert not report.electrical
        assert report.circuits == stage.circuits() != ()

    scene(play)


RACKS = {f"rack-{n}": (f"10.0.0.{n}",) for n in range(4)}
KV = (("engine-2", "engine-1", 4000), ("engine-3", "engine-2", 4000), ("engine-1", "engine-3", 4000))


@pytest.fixture
def racks(scene):
    """The trainer in rack 0, an engine in each of the others; a link carries 5,000 bytes in 40 ms, the trickle in 0.4 s."""

    def run(play, **section):
        async def settled(stage):
            for n, actor in enumerate(("trainer-1", "engine-1", "engine-2", "engine-3")):
                node = f"node-{n + 1}"
                place = {"public": f"tcp://10.0.0.{n}:77", "node": node, "provides": frozenset()}
                stage.context.records |= {actor: SimpleNamespace(**place), node: SimpleNamespace(**place)}
                stage.context.actors[node] = None
            await asyncio.sleep(1)
            await play(stage)

        given = {"racks": RACKS, "ports": 16, "link_gbps": 1e-3, "trickle_mbps": 0.1, "testbed": "simulated"}
        scene(settled, **(given | section))

    return run


def links(circuits):
    """Duplex links per pair of racks."""
    return Counter((c.ingress // 4, c.egress // 4) for c in circuits if c.ingress < c.egress)


async def period(stage, sync_s=0.08):
    stage.number += 1
    await stage.begins("weight_sync", tuple(("trainer-1", f"engine-{n}", 5000) for n in (1, 2, 3)))
    await asyncio.sleep(sync_s)
    await stage.begins("rollout", KV)
    await asyncio.sleep(0.5)
    await stage.begins("train_step")
    await asyncio.sleep(0.5)


def test_before_anything_is_known_the_ports_of_racks_are_divided_evenly(racks):
    async def play(stage):
        assert set(links(stage.circuits())) == {(a, b) for a in range(4) for b in range(a + 1, 4)}

    racks(play)


def test_racks_get_circuits_for_the_tree_by_which_weights_travel_and_then_for_the_rollouts_bytes(racks):
    async def play(stage):
        for _ in range(3):
            await period(stage)
        await stage.begins("weight_sync", ())
        await asyncio.sleep(0.05)
        assert links(stage.circuits()) == {(0, 1): 2, (0, 2): 2, (1, 3): 2}

        await asyncio.sleep(0.05)
        stage.number += 1
        await stage.begins("rollout")
        await asyncio.sleep(0.1)
        assert min(links(stage.circuits())[pair] for pair in ((1, 2), (1, 3), (2, 3))) == 1

    racks(play)


def test_circuits_are_not_taken_from_a_phase_whose_bytes_are_under_way(racks):
    async def play(stage):
        for _ in range(4):
            await period(stage, sync_s=0.025)  # by its circuits the bytes take 0.02
        stage.number += 1
        await stage.begins("weight_sync", ())
        for _ in range(20):  # later than ever: what was expected next has not begun
            await asyncio.sleep(0.01)
            assert links(stage.circuits())[0, 1] == 2

    racks(play)


GRADIENTS = (("trainer-1", "engine-1", 20_000), ("engine-1", "trainer-1", 20_000))


def test_ranks_have_their_circuits_until_weights_follow_however_long_a_step_takes(racks):
    async def trains(stage, took_s):
        await period(stage)
        await stage.begins("train_step", GRADIENTS)
        await stage.begins("weight_sync", in_s=0.8)
        await asyncio.sleep(took_s)

    async def play(stage):
        for _ in range(4):
            await trains(stage, 0.3)
        await trains(stage, 0.1)
        for _ in range(40):  # a step of more sequences than before
            await asyncio.sleep(0.05)
            assert links(stage.circuits())[0, 1] >= 3

        stage.number += 1
        await stage.begins("weight_sync")
        await asyncio.sleep(0.05)
        assert links(stage.circuits()) == {(0, 1): 2, (0, 2): 2, (1, 3): 2}

    racks(play)


def test_weights_that_follow_weights_have_their_circuits_when_they_begin(racks):
    async def play(stage):
        stage.number += 1
        await stage.begins("weight_sync", (("trainer-1", "engine-1", 5000),))
        await asyncio.sleep(0.5)
        await stage.begins("weight_sync", (("trainer-1", "engine-3", 5000),), in_s=0.5)
        await asyncio.sleep(0.5)
        assert links(stage.circuits())[0, 3] == 3

    racks(play)


def test_static_circuits_fit_all_phases_together_and_never_change_once_all_are_known(racks):
    async def play(stage):
        for _ in range(2):
            await period(stage)
        known, before = stage.circuits(), (await stage.report()).reconfigurations
        for _ in range(3):
            await period(stage)

        assert stage.circuits() == known
        assert (await stage.report()).reconfigurations == before
        assert {(0, 1), (0, 2), (1, 2), (1, 3), (2, 3)} <= set(links(known))

    racks(play, static=True)


def test_a_phase_that_gains_less_than_its_change_costs_shares_the_circuits_of_another(scene):
    async def play(stage):
        for _ in range(3):
            await stage.iteration(rollout_s=0.001, sync_s=30)
        before = (await stage.report()).reconfigurations
        for _ in range(5):
            await stage.iteration(rollout_s=0.001, sync_s=30)

        assert (await stage.report()).reconfigurations - before <= 1

    scene(play)


def test_where_one_template_is_as_fast_for_every_phase_it_stays(scene):
    async def play(stage):
        for _ in range(2):
            await stage.iteration()
        learned = (await stage.report()).reconfigurations

        for _ in range(5):
            await stage.iteration()

        assert (await stage.report()).reconfigurations - learned <= 1

    scene(play)
