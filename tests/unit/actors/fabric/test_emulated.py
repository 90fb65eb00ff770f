"""The emulated switch: what is dark when, and what it refuses."""

import asyncio

import pytest

from actors.fabric.emulated import EmulatedSwitch
from actors.fabric.errors import NoSuchPort, PortConflict
from actors.fabric.section import FabricSection
from actors.messages.fabric import Circuit, GetCircuits, SetCircuits

A, B, C = Circuit(0, 4), Circuit(4, 0), Circuit(1, 5)


@pytest.fixture
def with_switch(on_stage):
    def run(play):
        async def main(context):
            section = FabricSection(ports=8, reconfiguration_s=0.010)
            await play(EmulatedSwitch(EmulatedSwitch.Config(fabric=section), context), context)

        on_stage(main, name="optical_switch-1")

    return run


def test_new_circuits_carry_light_after_the_delay(with_switch):
    async def play(switch, context):
        state = await switch.set_circuits(SetCircuits((A, B)))

        assert asyncio.get_running_loop().time() == pytest.approx(0.010)
        assert (state.circuits, state.reconfigurations, state.delay_s) == ((A, B), 1, 0.010)

    with_switch(play)


def test_while_mirrors_move_changed_circuits_are_dark_and_others_stay_lit(with_switch):
    async def play(switch, context):
        await switch.set_circuits(SetCircuits((A, B)))

        changing = context.tasks.create_task(switch.set_circuits(SetCircuits((A, C))))
        await asyncio.sleep(0.005)

        assert (await switch.get_circuits(GetCircuits())).circuits == (A,)
        assert (await changing).circuits == (A, C)

    with_switch(play)


def test_the_same_circuits_again_cost_nothing(with_switch):
    async def play(switch, context):
        await switch.set_circuits(SetCircuits((A, B)))

        state = await switch.set_circuits(SetCircuits((B, A)))

        assert asyncio.get_running_loop().time() == pytest.approx(0.010)
        assert state.reconfigurations == 1

    with_switch(play)


def test_changes_are_made_one_after_another(with_switch):
    async def play(switch, context):
        first = context.tasks.create_task(switch.set_circuits(SetCircuits((A,))))
        second = context.tasks.create_task(switch.set_circuits(SetCircuits((B,))))
        await first

        assert (await second).circuits == (B,)
        assert asyncio.get_running_loop().time() == pytest.approx(0.020)

    with_switch(play)


def test_a_change_that_began_ends_even_when_its_asker_goes(with_switch):
    async def play(switch, context):
        asking = context.tasks.create_task(switch.set_circuits(SetCircuits((A,))))
        await asyncio.sleep(0.005)

        asking.cancel()
        await asyncio.sleep(0.006)

        assert (await switch.get_circuits(GetCircuits())).circuits == (A,)

    with_switch(play)


@pytest.mark.parametrize(
    ("circuits", "error", "sentence"),
    [
        ((A, Circuit(0, 5)), PortConflict, "input port 0 of optical_switch-1 is wanted by 0→4 and 0→5"),
        ((A, Circuit(1, 4)), PortConflict, "output port 4 of optical_switch-1 is wanted by 0→4 and 1→4"),
        ((Circuit(0, 8),), NoSuchPort, "optical_switch-1 has ports 0 to 7, not 8"),
        ((Circuit(-1, 0),), NoSuchPort, "optical_switch-1 has ports 0 to 7, not -1"),
    ],
)
def test_what_can_not_be_is_refused_and_changes_nothing(with_switch, circuits, error, sentence):
    async def play(switch, context):
        await switch.set_circuits(SetCircuits((A,)))

        with pytest.raises(error, match=sentence):
            await switch.set_circuits(SetCircuits(circuits))

        assert (await switch.get_circuits(GetCircuits())).circuits == (A,)

    with_switch(play)
