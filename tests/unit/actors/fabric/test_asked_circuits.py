"""Circuits that are asked for between two phases, before a switch of parallelism: promised, lit, refused or missed."""

import asyncio

import pytest

from rubato.actors.fabric.controller import RESHARD, FabricController
from rubato.actors.messages.fabric import AskCircuits, AwaitCircuits, CircuitsPromised, CircuitsReady, NoCircuits, ReleaseCircuits
from rubato.runtime.memory import MemoryStore

MOVE = (("engine-2", "engine-1", 7000),)


def ask(stage, number=1, traffic=MOVE, within_s=1.0):
    return stage.controller.ask_circuits(AskCircuits(number, traffic, within_s))


def outcome(stage, number=1):
    return stage.controller.await_circuits(AwaitCircuits(number))


def joined(stage, one: str, other: str) -> int:
    """Circuits from one to the other."""
    controller: FabricController = stage.controller
    names, ports = controller._templates.book.endpoints, stage.section.ports_per_endpoint
    pair = names.index(one), names.index(other)
    return sum((c.ingress // ports, c.egress // ports) == pair for c in stage.circuits())


def test_circuits_that_are_asked_for_are_promised_lit_and_given_back(scene):
    async def play(stage):
        await stage.iteration()
        before = stage.circuits()
        direct = joined(stage, "engine-2", "engine-1")

        promised = await ask(stage)
        began = asyncio.get_running_loop().time()
        ready = await outcome(stage)
        took_s = asyncio.get_running_loop().time() - began

        assert isinstance(promised, CircuitsPromised)
        assert ready == CircuitsReady(1)
        assert took_s == pytest.approx(promised.ready_in_s)
        assert joined(stage, "engine-2", "engine-1") > direct
        await stage.controller.release_circuits(ReleaseCircuits(1))
        await asyncio.sleep(0.1)
        assert stage.circuits() == before

    scene(play)


def test_those_in_place_are_ready_at_once(scene):
    async def play(stage):
        await stage.iteration()
        await ask(stage)
        await outcome(stage)

        again = await ask(stage, number=2)

        assert again == CircuitsPromised(2, 0.0, again.why)
        assert await outcome(stage, 2) == CircuitsReady(2)

    scene(play)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"within_s": 0.001}, "wanted within 0.001 s"),
        ({"traffic": (("stranger-1", "stranger-2", 10),)}, "no circuit would serve"),
        ({"number": -1}, "comes after ask"),
    ],
)
def test_a_no_says_why_and_the_old_circuits_stay(scene, asked, why):
    async def play(stage):
        await stage.iteration()
        before = stage.circuits()

        answer = await ask(stage, **asked)
        await asyncio.sleep(0.1)

        assert isinstance(answer, NoCircuits)
        assert why in answer.why
        assert stage.circuits() == before

    scene(play)


def test_a_phase_that_comes_first_keeps_its_slot(scene):
    async def play(stage):
        for _ in range(4):
            await stage.iteration()
        stage.number += 1
        await stage.begins("rollout")
        await asyncio.sleep(0.975)  # weights are expected at 1 s, and their change begins 20 ms before

        answer = await ask(stage)

        assert isinstance(answer, NoCircuits)
        assert "weight_sync" in answer.why

    scene(play)


def test_a_phase_that_begins_meanwhile_ends_the_promise(scene):
    async def play(stage):
        await stage.iteration()
        await ask(stage)
        waiting = asyncio.create_task(outcome(stage))  # noqa: TID251 - awaited below
        await asyncio.sleep(0)
        stage.number += 1
        await stage.begins("rollout")

        found = await waiting

        assert isinstance(found, CircuitsReady | NoCircuits)
        await asyncio.sleep(0.1)
        assert isinstance(await outcome(stage, 7), NoCircuits), "never asked for"

    scene(play)


def test_an_older_number_is_refused_and_a_newer_one_takes_its_place(scene):
    async def play(stage):
        await stage.iteration()
        await ask(stage, number=5)

        older, newer = await ask(stage, number=4), await ask(stage, number=6)

        assert isinstance(older, NoCircuits)
        assert isinstance(newer, CircuitsPromised)
        assert isinstance(await outcome(stage, 5), NoCircuits)
        assert await outcome(stage, 6) == CircuitsReady(6)

    scene(play)


def test_a_switch_that_fails_or_is_gone_answers_no_instead_of_leaving_the_asker_waiting(scene):
    async def play(stage):
        await stage.iteration()
        await ask(stage)
        del stage.context.actors["optical_switch"]
        await stage.controller.on_peers((), ("optical_switch-1",))

        async with asyncio.timeout(1):
            assert isinstance(await outcome(stage), NoCircuits)
        await asyncio.sleep(1)
        assert "electrical" in (await ask(stage, number=2)).why

    scene(play)


def test_without_the_fabric_the_electrical_path_carries_it(scene):
    async def play(stage):
        assert isinstance(await ask(stage), NoCircuits)

    scene(play, enabled=False)


OTHER = (("engine-2", "trainer-1", 7000),)


def test_who_asks_during_a_change_for_another_waits_for_its_own(scene):
    async def play(stage):
        await stage.iteration()
        direct = joined(stage, "engine-2", "trainer-1")
        await ask(stage, number=1)
        await asyncio.sleep(0.005)  # its change is under way

        promised = await ask(stage, number=2, traffic=OTHER)
        ready = await outcome(stage, 2)

        assert isinstance(promised, CircuitsPromised)
        assert ready == CircuitsReady(2)
        assert joined(stage, "engine-2", "trainer-1") > direct

    scene(play)


def test_a_refusal_takes_nothing_from_who_has_circuits(scene):
    async def play(stage):
        await stage.iteration()
        before = stage.circuits()
        await ask(stage, number=1)
        await outcome(stage, 1)

        refused = await ask(stage, number=2, traffic=OTHER, within_s=0.001)
        await stage.controller.release_circuits(ReleaseCircuits(1))
        await asyncio.sleep(0.1)

        assert isinstance(refused, NoCircuits)
        assert stage.circuits() == before, "given back"

    scene(play)


def test_what_is_given_back_late_undoes_no_change_for_the_next_phase(scene):
    async def play(stage):
        for _ in range(4):
            await stage.iteration()
        stage.number += 1
        await stage.begins("rollout")
        await asyncio.sleep(0.5)
        await ask(stage)
        await outcome(stage)
        lent = stage.circuits()
        await asyncio.sleep(0.485)  # weights are expected in 5 ms, and their circuits are lit
        coming = stage.circuits()

        await stage.controller.release_circuits(ReleaseCircuits(1))
        await asyncio.sleep(0.1)

        assert coming != lent
        assert stage.circuits() == coming

    scene(play)


def test_an_asker_that_died_keeps_no_circuits(scene):
    async def play(stage):
        await stage.iteration()
        before = stage.circuits()
        await ask(stage)
        await outcome(stage)

        await stage.controller.on_peers((), ("orchestrator-1",))
        await asyncio.sleep(0.1)

        assert stage.circuits() == before

    scene(play)


def test_a_controller_that_died_while_it_lit_them_leaves_a_successor_that_lights_every_port(scene):
    store, switches = MemoryStore(), []

    async def dies(stage):
        await stage.iteration()
        switches.append(stage.switch.device)
        await ask(stage)
        await asyncio.sleep(0.005)
        assert (await stage.report()).stage != "idle"

    async def follows(stage):
        stage.switch.device = stage.switch._dialect._device = switches[0]
        stage.switch.device._busy_until = 0.0
        assert (stage.controller._ledger.entry.stage, stage.controller._ledger.entry.phase) == ("changing", RESHARD)
        await asyncio.sleep(3)
        assert stage.controller._ledger.entry.stage == "committed"
        assert set(stage.circuits()) == set((await stage.report()).circuits)

    scene(dies, store)
    scene(follows, store, incarnation=2)


def test_circuits_that_went_dark_behind_the_controllers_back_are_not_promised_as_lit(scene):
    async def play(stage):
        await stage.iteration()
        await ask(stage)
        await outcome(stage)
        stage.switch.device.update(stage.switch.device.status(), ())

        promised = await ask(stage, number=2)

        assert isinstance(promised, CircuitsPromised)
        assert promised.ready_in_s > 0, "the switch was read"
        assert await outcome(stage, 2) == CircuitsReady(2)
        assert joined(stage, "engine-2", "engine-1") > 0

    scene(play)


def test_a_switch_that_can_not_be_read_is_promised_nothing_of(scene):
    async def play(stage):
        await stage.iteration()
        await ask(stage)
        await outcome(stage)
        del stage.context.actors["optical_switch"]

        assert isinstance(await ask(stage, number=2), NoCircuits)

    scene(play)
